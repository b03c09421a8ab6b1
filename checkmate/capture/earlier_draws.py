"""For a question that depends on random draws: make these ahead of the step, in order, and put the generator back.

A question that depends on draws has its answer beforehand if all draws of the same generator that come before it are
made first, in the same order, with the same shapes and types, and the generator is put back afterwards: the step then
draws the same numbers once more. What they are made for is not computed: a dropout of activations draws as many numbers
whatever the activations are, so that it is drawn on ones.

`draws_of` finds them by tracing a node of Dynamo's graph on fake tensors, and seeing which ops that PyTorch marks as
random it comes to: dropout inside attention or a recurrent layer is found as that of `F.dropout` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from checkmate.capture.autocast import ENTER, EXIT, autocast_as_found
from checkmate.capture.device import same_random_state
from checkmate.capture.provenance import where
from checkmate.capture.random_draws import draws
from checkmate.torch_internals.descriptions import FakeTensorMode
from checkmate.torch_internals.dispatcher import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    _enter_autocast,
    _exit_autocast,
    functorch,
)
from checkmate.torch_internals.trees import tree_leaves, tree_map

_KNOWN = "earlier_draws"  # in the meta of a node: what it draws, once it was traced
_BODIES = {"tag_activation_checkpoint": 1, "autograd_function_apply": 1, "wrap": 1}  # that run once, in the forward
_AS_MANY_WHATEVER_THE_VALUES = {  # without the underscore of those that draw in place
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "native_dropout", "normal"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "randperm", "uniform"),
}
# any will do: what draws and takes such a number is refused
_NUMBERS = {torch.SymInt: 1, torch.SymFloat: 0.5, torch.SymBool: True}


class CannotTellError(Exception):
    """Why a question has no answer before the step runs: the end of a sentence."""


@dataclass(frozen=True)
class _Ones:
    """Stands for a tensor that a draw is made for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        reach = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        held = torch.ones(0 if 0 in self.shape else reach, dtype=self.dtype, device=self.device)
        return held.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class Draw:
    """An op that draws, with `_Ones` in place of tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device  # whose generator it draws from
    where: str

    def make(self) -> None:
        """Draw."""
        self.op(*_made(self.args), **_made(self.kwargs))

    def check(self) -> None:
        """Refuse what may draw more or fewer numbers than on ones.

        Raises:
            CannotTellError: for such an op.
        """
        if self.op._schema.name.removeprefix("aten::").removesuffix("_") not in _AS_MANY_WHATEVER_THE_VALUES:
            raise CannotTellError(
                f"it depends on random numbers, and {self.op._schema.name} ({self.where}) draws before it: how many, "
                "is not known before the step runs"
            )


class Draws(nn.Module):
    """Makes draws, one after the other, and keeps nothing of them."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__()
        self.draws = draws

    def forward(self) -> None:
        """Draw."""
        for draw in self.draws:
            draw.make()


def _made(arguments: Any) -> Any:
    return tree_map(lambda a: a.make() if isinstance(a, _Ones) else a, arguments)


def draws_of(nodes: Iterable[fx.Node], attributes: Mapping[str, Any]) -> dict[fx.Node, tuple[Draw, ...]]:
    """What each node draws, of nodes from the beginning of a graph of Dynamo's on, which keep what was found.

    ``attributes``: what the graph's ``get_attr`` nodes stand for.

    Raises:
        CannotTellError: if it cannot be told of a node.
    """
    found, fakes = {}, FakeTensorMode(shape_env=ShapeEnv())
    regions: list[Any] = []
    with same_random_state(), autocast_as_found():
        for node in nodes:
            if node.target is ENTER:
                regions.append(_enter_autocast(*node.args))
            elif node.target is EXIT:
                _exit_autocast(regions.pop())
            else:
                if _KNOWN not in node.meta:
                    node.meta[_KNOWN] = _draws(node, attributes, fakes)
                found[node] = node.meta[_KNOWN]
    return found


def forget_draws(graph: fx.Graph) -> None:
    """Forget what `draws_of` has kept in the nodes."""
    for node in graph.nodes:
        node.meta.pop(_KNOWN, None)


def _draws(node: fx.Node, attributes: Mapping[str, Any], fakes: FakeTensorMode) -> tuple[Draw, ...]:
    if isinstance(node.target, HigherOrderOperator):
        return _draws_of_bodies(node, attributes)
    if node.op not in ("call_function", "call_method", "call_module"):
        return ()
    if node.op == "call_module":
        raise _untold(node)
    if getattr(node.target, "__module__", "") == "_operator" or not _makes_tensors(node):
        return ()
    before, seen = torch.get_rng_state(), _Seeing(where(node))
    try:
        with fakes, torch.no_grad():
            args, kwargs = _stand_ins(node)
            run: Any = node.target if node.op == "call_function" else getattr(type(args[0]), str(node.target))
            with seen:
                run(*args, **kwargs)
    except CannotTellError:
        raise
    except Exception as error:  # of whatever the node calls
        raise _untold(node) from error
    numbers = [a for a in node.all_input_nodes if type(a.meta.get("example_value")) in _NUMBERS]
    if (seen.draws and numbers) or bool((before != torch.get_rng_state()).any()):
        raise _untold(node)
    return tuple(seen.draws)


def _draws_of_bodies(node: fx.Node, attributes: Mapping[str, Any]) -> tuple[Draw, ...]:
    """What the graphs draw that a higher-order op is given; of those that are known, the one that its forward runs."""
    bodies = [attributes[str(a.target)] for a in node.all_input_nodes if a.op == "get_attr"]
    bodies = [body for body in bodies if isinstance(body, fx.GraphModule)]
    runs = _BODIES.get(node.target.name()) if isinstance(node.target, HigherOrderOperator) else None
    found: list[Draw] = []
    for body in bodies[:runs]:
        within = {n.target: getattr(body, n.target) for n in body.graph.find_nodes(op="get_attr")}
        found += [draw for drawn in draws_of(body.graph.nodes, within).values() for draw in drawn]
    if found and runs is None:
        raise _untold(node)
    return tuple(found)


def _untold(node: fx.Node) -> CannotTellError:
    return CannotTellError(
        f"it depends on random numbers, and what {node.target} ({where(node)}) draws before it cannot be told"
    )


def _makes_tensors(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):  # Dynamo's own of sizes give numbers
        return any("Tensor" in str(result.type) for result in node.target._schema.returns)
    if isinstance(node.target, OpOverloadPacket):
        return True
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(node.meta.get("example_value")))


def _stand_ins(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node, described by tensors of their own: what it writes to is not what Dynamo describes."""
    given = node.all_input_nodes
    known = [a.meta.get("example_value") for a in (node, *given)]
    if any(map(_is_wrapped, tree_leaves(known))) or not all("example_value" in a.meta for a in given):
        raise _untold(node)
    made = {a: tree_map(_stand_in, a.meta["example_value"]) for a in given}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    return args, kwargs


def _is_wrapped(value: Any) -> bool:
    """Whether a tensor has more elements than its shape says, or is laid out in another way."""
    return isinstance(value, torch.Tensor) and (
        value.layout is not torch.strided or functorch.is_functorch_wrapped_tensor(value)
    )


def _stand_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape, strides = [int(n) for n in value.shape], [int(n) for n in value.stride()]
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return _NUMBERS.get(type(value), value)


class _Seeing(TorchDispatchMode):
    """Note the ops that draw."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self.place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, and note it."""
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        described = tree_map(_described, (args, kwargs))
        if func is torch.ops.aten.bernoulli_.float:  # of dropout: as many numbers, in fewer bytes, as in `draw_mask`
            described = ((replace(described[0][0], dtype=torch.bool), *described[0][1:]), described[1])
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((result, args, kwargs)) if isinstance(leaf, torch.Tensor)]
        (device, *_) = [t.device for t in tensors] or [torch.device("cpu")]
        self.draws.append(Draw(func, described[0], described[1], device, self.place))
        return result


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Ones(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    return value
