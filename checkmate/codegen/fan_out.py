"""Give an input of a compiled step several edges in autograd's graph, one for each contribution to its gradient.

The step is one node of that graph, with one edge to each input. A `Fan` between the two has several, so that what the
step's backward leaves there reaches the input one by one (`checkmate.codegen.contributions` says when, and why).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from checkmate.codegen.arrival_order import contributed_before
from checkmate.codegen.undefined_gradients import compiled_functions
from checkmate.errors import Unsupported
from checkmate.torch_internals.engine import _current_autograd_node


@dataclass(frozen=True)
class Shared:
    """An input whose gradient a step adds up from several contributions."""

    position: int  # among what the compiled function is called with
    gradient: int  # position among what the backward returns
    count: int  # contributions
    name: str  # as the user knows it


UNKNOWN = Shared(-1, -1, 2, "An input")  # some input or other


@dataclass(frozen=True)
class Sharing:
    """The inputs of a step with several contributions: those that can be had one by one, and the others."""

    apart: tuple[Shared, ...] = ()
    together: tuple[Shared, ...] = ()


class Fan(torch.autograd.Function):
    """Inputs of a step as they are, with as many edges to each as it has contributions: each is given so many times."""

    @staticmethod
    def forward(ctx: Any, counts: tuple[int, ...], *inputs: torch.Tensor) -> Any:
        """One alias of each input."""
        ctx.counts = counts
        ctx.terms = {}  # by slot: the contributions in their order, from the step's backward to this one
        ctx.set_materialize_grads(False)
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        return tuple(inputs[i].detach() for i in firsts)

    @staticmethod
    def backward(ctx: Any, *sums: Any) -> Any:
        """The contributions that the step's backward left here, or the sums that it returned."""
        terms, ctx.terms = ctx.terms, {}
        grads: list[Any] = [None]
        for slot, count in enumerate(ctx.counts):
            grads += terms.get(slot) or [sums[slot], *[None] * (count - 1)]
        return tuple(grads)


def fan_of_this_call() -> Any:
    """The node that hands on what the backward now running returns; None outside of autograd."""
    node: Any = _current_autograd_node()
    following = node.next_functions if node is not None else ()
    return next((f for f, _ in following if isinstance(f, Fan._backward_cls)), None)


def fan_out(run: Callable[..., Any], sharing: Sharing) -> Callable[..., Any]:
    """Pass inputs with several contributions to a compiled function so that these can be handed over one by one.

    Where they cannot, and something else contributes first, the backward is refused.
    """
    if not (sharing.apart or sharing.together):
        return run

    @wraps(run)
    def fanning(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args)
        given = list(args)
        for shared, alias in zip(sharing.apart, _aliases(args, sharing.apart), strict=True):
            given[shared.position] = alias
        original = {id(given[s.position]): args[s.position] for s in sharing.apart}
        known = [s for s in sharing.together if s is not UNKNOWN]
        edges = [get_gradient_edge(args[s.position])[:2] for s in known]  # a write moves them
        results = run(*given)
        if sharing.together:
            _refuse_together(sharing.together, edges, compiled_functions(results, given))
        return type(results)(original.get(id(result), result) for result in results)

    return fanning


def _aliases(args: Sequence[Any], apart: Sequence[Shared]) -> Sequence[torch.Tensor]:
    if not apart:
        return ()
    inputs = [args[shared.position] for shared in apart for _ in range(shared.count)]
    aliases: Sequence[torch.Tensor] = Fan.apply(tuple(shared.count for shared in apart), *inputs)
    return aliases


def _refuse_together(together: Sequence[Shared], edges: Sequence[Any], functions: Iterable[Any]) -> None:
    for function in functions:
        function.register_prehook(_check(weakref.ref(function), together, edges))


def _check(function: Callable[[], Any], together: Sequence[Shared], edges: Sequence[Any]) -> Callable[[Any], None]:
    def check(grads: Any) -> None:
        node = function()
        unknown = node.next_functions if UNKNOWN in together else ()
        named = [s for s in together if s is not UNKNOWN] + [UNKNOWN] * len(unknown)
        before = contributed_before(node, [*edges, *unknown])
        if shared := next((s for s, yes in zip(named, before, strict=True) if yes), None):
            raise Unsupported(
                f"{shared.name} is used more than once within the compiled step, and once more after it, in this "
                "backward. Plain PyTorch adds all these contributions to its gradient one after the other; here those "
                "of the step are known only as a sum, because the step overwrites its memory or returns a view of it. "
                "Write to a copy or return a copy, x.clone(), or compute the other part within the step."
            )

    return check
