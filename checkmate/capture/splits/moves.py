"""Along which dimension ops that move dimensions read what they view, copy or reduce; words for all such rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten
Shape = Sequence[int]
Dims = tuple[int | None, ...]  # one for each result; None: not in parts
Reads = Iterator[tuple[Any, int | None]]  # arguments, and the dimension along which each is read
Rule = Callable[[fx.Node, int, int, int], tuple[Dims, Reads]]  # of a node, the result, its dimension, and the units


class NoParts(Exception):
    """The op does not run in parts like this."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Of what a node of one result makes."""
    return tuple(node.meta["val"].shape)


def rank_of(node: fx.Node) -> int:
    """How many dimensions a node's first argument has."""
    source: Any = node.args[0]
    return len(shape_of(source))


def aligned(node: Any, of: Shape, dim: int) -> int | None:
    """The dimension of an argument that is broadcast to a shape; None if it is the same for all parts."""
    if not isinstance(node, fx.Node):
        return None
    shape = shape_of(node)
    at = dim - (len(of) - len(shape))
    return at if at >= 0 and (shape[at] != 1 or of[dim] == 1) else None


def _through(shape: Shape, dim: int, units: int, other: Shape) -> int:
    """Where a dimension is in the same elements in another shape: as many stand before it."""
    before = math.prod(shape[:dim])
    for at, size in enumerate(other):
        if math.prod(other[:at]) == before and size >= units and size % units == 0:
            return at
    raise NoParts


def _viewed(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    source: Any = node.args[0]
    return (dim,), iter([(source, _through(shape_of(node), dim, units, shape_of(source)))])


def moved(to: Callable[[fx.Node, int], int | None]) -> Rule:
    """For an op of one argument, whose dimension is told from the result's."""

    def rule(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
        return (dim,), iter([(node.args[0], to(node, dim))])

    return rule


def _permuted(node: fx.Node, dim: int) -> int:
    dims: Any = node.args[1]
    return int(dims[dim]) % rank_of(node)


def _transposed(node: fx.Node, dim: int) -> int:
    dims: Any = node.args[1:] or (0, 1)
    one, other = (int(d) % rank_of(node) for d in dims)
    return {one: other, other: one}.get(dim, dim)


def _unsqueezed(node: fx.Node, dim: int) -> int:
    given: Any = node.args[1]
    at: int = given % (rank_of(node) + 1)
    if dim == at:
        raise NoParts
    return dim - (dim > at)


def _squeezed(node: fx.Node, dim: int) -> int:
    source: Any = node.args[0]
    given: Any = node.args[1] if len(node.args) > 1 else range(rank_of(node))
    given = [given] if isinstance(given, int) else given
    gone = {d % rank_of(node) for d in given if shape_of(source)[d] == 1}
    return [d for d in range(rank_of(node)) if d not in gone][dim]


def _expanded(node: fx.Node, dim: int) -> int | None:
    return aligned(node.args[0], shape_of(node), dim)


def apart_from(position: int, default: int | None = None) -> Callable[[fx.Node, int], int]:
    """For ops along a dimension, which is their argument at a position: any other may be split."""

    def to(node: fx.Node, dim: int) -> int:
        along: Any = node.args[position] if len(node.args) > position else default
        if along is None or dim == along % rank_of(node):
            raise NoParts
        return dim

    return to


def _selected(node: fx.Node, dim: int) -> int:
    along: Any = node.args[1]
    return dim + int(dim >= along % rank_of(node))


def _padded(node: fx.Node, dim: int) -> int:
    pad: Any = node.args[1]
    if dim >= rank_of(node) - len(pad) // 2:
        raise NoParts
    return dim


def _reduced(node: fx.Node, dim: int) -> int:
    given: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(given, (list, tuple)) or not given:
        raise NoParts
    gone = {d % rank_of(node) for d in given}
    if len(node.args) > 2 and node.args[2]:
        if dim in gone:
            raise NoParts
        return dim
    return [d for d in range(rank_of(node)) if d not in gone][dim]


MOVES: dict[Any, Rule] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), _viewed),
    **dict.fromkeys((aten.clone, aten.alias, aten.detach, aten._to_copy, aten.fill), moved(lambda node, dim: dim)),
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin), moved(_reduced)),
    **dict.fromkeys((aten.transpose, aten.t), moved(_transposed)),
    aten.permute: moved(_permuted),
    aten.unsqueeze: moved(_unsqueezed),
    aten.squeeze: moved(_squeezed),
    aten.expand: moved(_expanded),
    aten.slice: moved(apart_from(1, 0)),
    aten.select: moved(_selected),
    aten.constant_pad_nd: moved(_padded),
}
