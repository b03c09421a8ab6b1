"""Refuse hooks and `retain_grad` on a result that other results are computed from: a step knows a part of its gradient.

A step may return ``loss, logits``. In plain PyTorch the gradient of the loss passes through the logits: hooks on them
see it, ``logits.retain_grad()`` keeps it. A captured step is one function of autograd, and its results are its ends:
through one of them passes only what comes from outside. Who asks for more gets an error in the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.fx as fx

from checkmate.codegen.undefined_gradients import is_compiled
from checkmate.errors import Unsupported
from checkmate.torch_internals.aot import ForwardTokenAOTOutput
from checkmate.torch_internals.dispatcher import _is_any_autocast_enabled
from checkmate.torch_internals.trees import tree_leaves

aten = torch.ops.aten
_NO_GRADIENT = {aten.detach.default, aten.alias.default}


def computed_from(graph: fx.Graph, count: int) -> dict[int, tuple[int, ...]]:
    """Which of a graph's first outputs others of them are computed from: its position, with theirs.

    Positions are those of autograd's node, which has no tokens of effects. What passes through ``detach`` is left out.
    """
    output: Any = graph.output_node()
    first = tokens_of(output, count)
    position = {node: i for i, node in enumerate(output.args[0][first:count]) if isinstance(node, fx.Node)}
    users: dict[int, dict[int, None]] = {}
    for node, user in position.items():
        stack, seen = list(node.all_input_nodes), set[fx.Node]()
        while stack:
            n = stack.pop()
            if n in seen or n.target in _NO_GRADIENT:
                continue
            seen.add(n)
            if n in position:
                users.setdefault(position[n], {})[user] = None
            stack += n.all_input_nodes
    return {i: tuple(sorted(found)) for i, found in users.items()}


def tokens_of(output: fx.Node, count: int) -> int:
    """How many of the first outputs of a joint graph are tokens of effects (of `torch.linalg`'s checks, say)."""
    return sum(isinstance(desc, ForwardTokenAOTOutput) for desc in output.meta.get("desc", ())[:count])


def refuse_watching(run: Callable[..., Any], users: Mapping[int, tuple[int, ...]]) -> Callable[..., Any]:
    """Have the backward refuse hooks and kept gradients of results that other differentiated results come from.

    Args:
        run: a compiled function.
        users: what `computed_from` found of it; it may be filled later.
    """

    @wraps(run)
    def watching(*args: Any) -> Any:
        results = run(*args)
        for tensor in tree_leaves(results) if users else ():
            function: Any = getattr(tensor, "grad_fn", None)
            later = users.get(tensor.output_nr) if is_compiled(function) else None
            if later:
                function.register_prehook(_check(weakref.ref(tensor), later))
        return results

    return watching


def _check(result: weakref.ref[torch.Tensor], later: tuple[int, ...]) -> Callable[[Any], None]:
    def check(grads: tuple[torch.Tensor | None, ...]) -> None:
        tensor = result()
        if tensor is None or not (tensor.retains_grad or tensor._backward_hooks):
            return
        if any(grads[i] is not None for i in later):
            raise Unsupported(
                f"A result of the compiled step, of shape {tuple(tensor.shape)}, has a hook or keeps its gradient, and "
                "another result that is differentiated is computed from it within the step. No gradient passes from "
                "one result to the other. Register the hook within the step, tensor.register_hook(...), or compute "
                "the other one outside."
            )

    return check


def watch_backward(result: Any) -> None:
    """Have a backward for which there is no plan end in a clear error: a differentiable one, or one under autocast."""
    tensors = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
    functions = {t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None}
    for function in functions:
        function.register_prehook(_check_backward)


def _check_backward(grads: Any) -> None:
    if torch.is_grad_enabled():
        raise Unsupported(
            "create_graph=True: the backward of a compiled step cannot itself be differentiated. "
            "Compute this loss with the plain model, which shares its parameters with the compiled one."
        )
    if _is_any_autocast_enabled():
        raise Unsupported(
            "backward() was called within torch.autocast, where plain PyTorch computes other gradients than outside of "
            "it. Call it after the block, as PyTorch advises."
        )
