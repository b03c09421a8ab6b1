"""Which ops can write their result over an argument, and how they are called to do so: a table of candidates.

Whether an op of the table leaves the same bits so is not assumed: it is tried, for each shape, layout and type, when
costs are measured (`checkmate.profiling`). Whether its argument may go is another question (`legal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Written:
    """An op with its variant that writes into given tensors.

    >>> Written(aten.relu.out, (0,)).out
    'out'
    """

    into: torch._ops.OpOverload  # the variant
    positions: tuple[int, ...]  # of the arguments that it may write over
    out: str = "out"  # what the variant calls the tensor that it writes to


_UNARY = ("exp", "neg", "relu", "rsqrt", "sigmoid", "silu", "tanh", "gelu", "hardswish")
_BINARY = ("add", "div", "mul", "sub")
TABLE: Mapping[Any, Written] = {
    **{getattr(aten, name).default: Written(getattr(aten, name).out, (0,)) for name in _UNARY},
    **{getattr(aten, name).Tensor: Written(getattr(aten, name).out, (0, 1)) for name in _BINARY},
    aten.threshold_backward.default: Written(aten.threshold_backward.grad_input, (0, 1), "grad_input"),
}


def positions(node: fx.Node) -> tuple[int, ...]:
    """The arguments that a node's op could write its result over, as far as its own shapes, types and layouts tell."""
    written = TABLE.get(node.target)
    if written is None:
        return ()
    return tuple(i for i in written.positions if i < len(node.args) and _is_alike(node.args[i], node))


def _is_alike(argument: Any, node: fx.Node) -> bool:
    """The argument fills its storage, without gaps or overlaps, just as the result will."""
    if not isinstance(argument, fx.Node):
        return False
    a, made = argument.meta.get("val"), node.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    same = a.dtype == made.dtype and a.shape == made.shape and a.stride() == made.stride() and a.device == made.device
    whole = a.untyped_storage().nbytes() == a.numel() * a.element_size() == made.untyped_storage().nbytes()
    return same and whole and bool(aten.is_non_overlapping_and_dense(a))


def call_over(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> tuple[Any, Any, Any]:
    """Target, arguments and keywords of the call that writes over one of its arguments.

    >>> x = torch.tensor([-1.0, 2.0])
    >>> target, args, kwargs = call_over(aten.relu.default, (x,), {}, 0)
    >>> target(*args, **kwargs) is x, x
    (True, tensor([0., 2.]))
    """
    written = TABLE[target]
    return written.into, args, {**kwargs, written.out: args[position]}
