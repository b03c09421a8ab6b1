"""Which ops sum over a dimension, and what they read of it if each part makes a summand: gradients of weights, mostly.

The summands of parts are added up one after the other, which rounds otherwise than the op does. So this is offered only
where a person has asked for it, with ``numerics="rounding"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.splits.dimensions import SUMMED, Dims, Split
from checkmate.torch_internals.dispatcher import OpOverload

aten = torch.ops.aten
_Found = tuple[Dims, dict[Any, int]]  # how each result is split, and what of the arguments, by node


def sums_of(node: fx.Node) -> Iterator[Split]:
    """How an op sums over parts of a dimension of what it reads, if it does: one for each such dimension."""
    target: Any = node.target
    rule = _RULES.get(target.overloadpacket) if isinstance(target, OpOverload) else None
    for results, reads in () if rule is None else rule(node):
        yield Split(results, {n: reads.get(n) for n in node.all_input_nodes})


def divides(split: Split, units: int) -> bool:
    """Whether what is read in parts consists of so many equal units."""
    return all(n.meta["val"].shape[at] % units == 0 for n, at in split.reads.items() if at is not None)


def _product(node: fx.Node) -> Iterator[_Found]:
    a, b = node.args
    rank = len(node.meta["val"].shape)
    if a is not b:
        yield (SUMMED,), {a: rank - 1, b: rank - 2}


def _sum(node: fx.Node) -> Iterator[_Found]:
    source: Any = node.args[0]
    rank = source.meta["val"].dim()
    given: Any = node.args[1] if len(node.args) > 1 else None
    for dim in sorted(d % rank for d in given) if given else range(rank):
        yield (SUMMED,), {source: dim}


def _where_wanted(wanted: Sequence[bool], dim: int) -> Dims:
    """The gradient of the input is split, those of weight and bias are summed."""
    return tuple(at if one else None for at, one in zip((dim, SUMMED, SUMMED), wanted, strict=True))


def _convolution_backward(node: fx.Node) -> Iterator[_Found]:
    """Over images."""
    grad, x, *_, wanted = node.args
    yield _where_wanted(wanted, 0), {grad: 0, x: 0}  # type: ignore[arg-type]


def _layer_norm_backward(node: fx.Node) -> Iterator[_Found]:
    grad, x, shape, mean, deviation, *_, wanted = node.args
    for dim in range(x.meta["val"].dim() - len(shape)):  # type: ignore[union-attr,arg-type]
        yield _where_wanted(wanted, dim), dict.fromkeys((grad, x, mean, deviation), dim)  # type: ignore[arg-type]


def _group_norm_backward(node: fx.Node) -> Iterator[_Found]:
    """Over images."""
    grad, x, mean, deviation, *_, wanted = node.args
    yield _where_wanted(wanted, 0), dict.fromkeys((grad, x, mean, deviation), 0)  # type: ignore[arg-type]


def _batch_norm_backward(node: fx.Node) -> Iterator[_Found]:
    """Over images, of a backward that makes nothing but sums."""
    grad, x, *_, training, _, wanted = node.args
    if training and not wanted[0]:  # type: ignore[index]
        yield _where_wanted(wanted, 0), {grad: 0, x: 0}  # type: ignore[arg-type]


_RULES: dict[Any, Callable[[fx.Node], Iterator[_Found]]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.sum: _sum,
    aten.convolution_backward: _convolution_backward,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.native_group_norm_backward: _group_norm_backward,
    aten.native_batch_norm_backward: _batch_norm_backward,
}
