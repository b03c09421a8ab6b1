"""Along which dimension an op reads its arguments, if its result is made part by part along a given one.

An op is independent along a dimension if each part of its result is what the same op makes of parts of some arguments,
and of the others whole: rows of a product, images or output channels of a convolution, whatever softmax or a norm does
not run over. A dimension may hold several units of what is split: of B images as rows of B x T tokens each unit is T.
That an op keeps its bits so is not said here: it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import is_random
from checkmate.capture.rewrite import scale_mask
from checkmate.capture.ways.batch_norm import call_of, gradient_of_input, is_result, normalized
from checkmate.capture.ways.shape_only import convolution_backward_input, max_pool2d_backward

aten = torch.ops.aten
Shape = Sequence[int]
Dims = tuple[int | None, ...]  # one for each result; None: not in parts
SUMMED = 64  # in place of a result's dimension, of which there are 64 at most: each part makes a summand of all of it


@dataclass(frozen=True)
class Split:
    """How an op runs in parts."""

    results: Dims  # the dimension along which each result is split
    reads: Mapping[fx.Node, int | None]  # and each argument; None: it is read whole; ~dim: only its shape is
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None  # what makes the same of these, if not the op


class _Not(Exception):
    """The op does not run in parts like this."""


_Reads = Iterator[tuple[Any, int | None]]
_Rule = Callable[[fx.Node, int, int, int], tuple[Dims, _Reads]]


def split_of(node: fx.Node, index: int, dim: int, units: int) -> Split | None:
    """How an op runs in parts if one of its results is to be split along a dimension; None: it does not.

    Args:
        index: of the result.
        dim: its dimension.
        units: how many equal ones the dimension consists of; a part has some of them.
    """
    rule = _rule(node)
    if rule is None or is_random(node):
        return None
    reads: dict[fx.Node, int | None] = {}
    try:
        results, found = rule(node, index, dim, units)
        for argument, at in found:
            if isinstance(argument, fx.Node):
                if reads.setdefault(argument, at) != at:
                    return None
                if at is not None and argument.meta["val"].shape[max(at, ~at)] % units:
                    return None
    except _Not:
        return None
    for argument in node.all_input_nodes:
        reads.setdefault(argument, None)
    vals = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    for val, at in zip(vals, results, strict=True):
        if at is not None and (val is None or val.shape[at] % units):
            return None
    return Split(results, reads)


def _rule(node: fx.Node) -> _Rule | None:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return _RULES.get(target)
    found = _RULES.get(target.overloadpacket)
    if found is None and torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return _pointwise
    return found


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _aligned(node: Any, of: Shape, dim: int) -> int | None:
    """The dimension of an argument that is broadcast to a shape; None if it is the same for all parts."""
    if not isinstance(node, fx.Node):
        return None
    shape = _shape(node)
    at = dim - (len(of) - len(shape))
    return at if at >= 0 and (shape[at] != 1 or of[dim] == 1) else None


def _pointwise(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    of = _shape(node)
    return (dim,), ((argument, _aligned(argument, of, dim)) for argument in node.all_input_nodes)


def _product(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    """Of matrices, or batches of them, with a bias or without."""
    *bias, a, b = node.args
    last = len(_shape(node)) - 1
    at = (dim, dim) if dim < last - 1 else (dim, None) if dim == last - 1 else (None, last)
    return (dim,), zip((a, b, *bias), (*at, *(_aligned(x, _shape(node), dim) for x in bias)), strict=True)


def _through(shape: Shape, dim: int, units: int, other: Shape) -> int:
    """Where a dimension is in the same elements in another shape: as many stand before it."""
    before = math.prod(shape[:dim])
    for at, size in enumerate(other):
        if math.prod(other[:at]) == before and size >= units and size % units == 0:
            return at
    raise _Not


def _view(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    source: Any = node.args[0]
    return (dim,), iter([(source, _through(_shape(node), dim, units, _shape(source)))])


def _moved(to: Callable[[fx.Node, int], int | None]) -> _Rule:
    """For an op of one argument, whose dimension is told from the result's."""

    def rule(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
        return (dim,), iter([(node.args[0], to(node, dim))])

    return rule


def _rank(node: fx.Node) -> int:
    source: Any = node.args[0]
    return len(_shape(source))


def _permuted(node: fx.Node, dim: int) -> int:
    dims: Any = node.args[1]
    return int(dims[dim]) % _rank(node)


def _transposed(node: fx.Node, dim: int) -> int:
    dims: Any = node.args[1:] or (0, 1)
    one, other = (int(d) % _rank(node) for d in dims)
    return {one: other, other: one}.get(dim, dim)


def _unsqueezed(node: fx.Node, dim: int) -> int:
    given: Any = node.args[1]
    at: int = given % (_rank(node) + 1)
    if dim == at:
        raise _Not
    return dim - (dim > at)


def _squeezed(node: fx.Node, dim: int) -> int:
    source: Any = node.args[0]
    given: Any = node.args[1] if len(node.args) > 1 else range(_rank(node))
    given = [given] if isinstance(given, int) else given
    gone = {d % _rank(node) for d in given if _shape(source)[d] == 1}
    return [d for d in range(_rank(node)) if d not in gone][dim]


def _expanded(node: fx.Node, dim: int) -> int | None:
    return _aligned(node.args[0], _shape(node), dim)


def _apart(position: int, default: int | None = None) -> Callable[[fx.Node, int], int]:
    """For ops along a dimension, which is their argument at a position: any other may be split."""

    def to(node: fx.Node, dim: int) -> int:
        along: Any = node.args[position] if len(node.args) > position else default
        if along is None or dim == along % _rank(node):
            raise _Not
        return dim

    return to


def _selected(node: fx.Node, dim: int) -> int:
    along: Any = node.args[1]
    return dim + int(dim >= along % _rank(node))


def _padded(node: fx.Node, dim: int) -> int:
    pad: Any = node.args[1]
    if dim >= _rank(node) - len(pad) // 2:
        raise _Not
    return dim


def _reduced(node: fx.Node, dim: int) -> int:
    given: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(given, (list, tuple)) or not given:
        raise _Not
    gone = {d % _rank(node) for d in given}
    if len(node.args) > 2 and node.args[2]:
        if dim in gone:
            raise _Not
        return dim
    return [d for d in range(_rank(node)) if d not in gone][dim]


def _cat(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    along: Any = node.args[1] if len(node.args) > 1 else 0
    if dim == along % len(_shape(node)):
        raise _Not
    return (dim,), ((x, dim) for x in node.all_input_nodes)


def _pieces(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    along: Any = node.args[2] if len(node.args) > 2 else 0
    if dim == along % _rank(node):
        raise _Not
    return (dim,) * len(node.meta["val"]), iter([(node.args[0], dim)])


def _softmax_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    return (_apart(2)(node, dim),), ((x, dim) for x in node.args[:2])


def _by_planes(count: int) -> _Rule:
    """For ops on images and their channels, one by one: the first so many arguments have both."""

    def rule(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
        val = node.meta["val"]
        several = isinstance(val, (tuple, list))
        if dim > 1 or len(val[0].shape if several else val.shape) != 4:
            raise _Not
        return (dim,) * (len(val) if several else 1), ((x, dim) for x in node.args[:count])

    return rule


def _max_pool_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    if dim > 1 or len(_shape(node)) != 4:
        raise _Not
    grad, x, *_, indices = node.args
    return (dim,), iter([(grad, dim), (x, ~dim), (indices, dim)])


def _layer_norm(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    shape: Any = node.args[1]
    if dim >= _rank(node) - len(shape):
        raise _Not
    return (dim, dim, dim), iter([(node.args[0], dim)])


def _layer_norm_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    grad, x, shape, mean, deviation, *_, wanted = node.args
    if dim >= _rank(node) - len(shape) or any(wanted[1:]):  # type: ignore[arg-type,index]
        raise _Not
    return (dim, None, None), ((n, dim) for n in (grad, x, mean, deviation))


def _group_norm(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    if dim:
        raise _Not
    return (0, 0, 0), iter([(node.args[0], 0)])


def _batch_norm(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    """By channels. What it makes of the running statistics is not for parts, and nothing else depends on these."""
    x, w, b, mean, variance, training = node.args[:6]
    if dim != (0 if index else 1) or index > 2 or not training:
        raise _Not
    return (1, 0, 0, None, None), iter([(x, 1), (w, 0), (b, 0), (mean, ~0), (variance, ~0)])


def _without_sums(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    """Of a batch norm: along any dimension, and numbers of the channels with these."""
    rank = len(_shape(node))
    by_channels = 0 if dim == 1 else None
    return (dim,), ((n, dim if len(_shape(n)) == rank else by_channels) for n in node.all_input_nodes)


def normalized_split(node: fx.Node, dim: int) -> Split | None:
    """How the result of a batch norm runs in parts once its statistics are there, but for channels: it does so itself.

    Args:
        node: of the result; dim: its dimension.
    """
    args = call_of(node) if dim != 1 and is_result(node) else None
    if args is None:
        return None
    x, *others = args
    return Split((dim,), {x: dim, **{n: None for n in others if n is not None}}, (normalized, args))


def _batch_norm_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    grad, x, *others = node.args[:7]
    if dim != (0 if index else 1):
        raise _Not
    results = tuple(None if val is None else at for val, at in zip(node.meta["val"], (1, 0, 0), strict=True))
    return results, iter([(grad, 1), (x, 1), *((n, 0) for n in others)])


def _in_groups(groups: int, units: int) -> bool:
    """Whether a part of the channels is some of the groups."""
    if groups > 1 and groups % units:
        raise _Not
    return groups > 1


def _convolution(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    x, w, b, *_, transposed, _, groups = node.args
    if dim > 1 or (dim == 1 and transposed and groups != 1):
        raise _Not
    if dim == 0:
        return (0,), iter([(x, 0), (w, None), (b, None)])
    return (1,), iter([(x, 1 if _in_groups(groups, units) else None), (w, int(bool(transposed))), (b, 0)])  # type: ignore[arg-type]


def _of_input(grad: Any, w: Any, dim: int, units: int, transposed: Any, groups: Any) -> list[tuple[Any, int | None]]:
    """What the gradient of a convolution's input reads."""
    if dim > 1 or (dim == 1 and transposed and groups != 1):
        raise _Not
    if dim == 0:
        return [(grad, 0), (w, None)]
    return [(grad, 1), (w, 0)] if _in_groups(groups, units) else [(grad, None), (w, 0 if transposed else 1)]


def _convolution_backward_input(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    grad, w, *_, transposed, _, groups = node.args
    return (dim,), iter(_of_input(grad, w, dim, units, transposed, groups))


def _convolution_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    """The gradient of the input, or that of the weight by its outputs or its inputs."""
    grad, x, w, _, _, _, _, transposed, _, groups, wanted = node.args
    if wanted == [True, False, False]:
        given = dict(_of_input(grad, w, dim, units, transposed, groups))
        return (dim, None, None), iter([*given.items(), (x, ~dim)])
    if wanted[0] or transposed:  # type: ignore[index]
        raise _Not
    if (index, dim) == (1, 1) and not wanted[2] and groups == 1:  # type: ignore[index]
        return (None, 1, None), iter([(grad, None), (x, 1), (w, 1)])
    if dim:
        raise _Not
    by_groups = _in_groups(groups, units)  # type: ignore[arg-type]
    results = (None, 0 if wanted[1] else None, 0 if wanted[2] else None)  # type: ignore[index]
    return results, iter([(grad, 1), (x, 1 if by_groups else None), (w, 0)])


def _attention(tensors: int, results: int) -> _Rule:
    """Scaled dot product attention by batches or heads; the first so many arguments have both."""

    def rule(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
        if dim > 1:
            raise _Not
        mask: Any = node.kwargs.get("attn_mask")
        of = (*_shape(node.args[0])[:3], 2)  # type: ignore[arg-type]
        return (dim,) * results, iter([*((x, dim) for x in node.args[:tensors]), (mask, _aligned(mask, of, dim))])

    return rule


def _embedding(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    if dim == len(_shape(node)) - 1:
        return (dim,), iter([(node.args[0], 1), (node.args[1], None)])
    return (dim,), iter([(node.args[0], None), (node.args[1], dim)])


def _embedding_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    if dim != 1:
        raise _Not
    return (1,), iter([(node.args[0], _rank(node) - 1), (node.args[1], None)])


def _made(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, _Reads]:
    """Of nothing: the same number everywhere."""
    return (dim,), iter(())


_UNTAGGED = (
    *(aten.hardtanh_backward, aten.hardswish_backward, aten.leaky_relu_backward, aten.elu_backward, aten.rsub),
    *(aten.hardsigmoid_backward, aten.softplus_backward, aten.mish_backward, aten.hardswish, scale_mask),
)  # pointwise, though PyTorch does not tag them
_SAME = _moved(lambda node, dim: dim)
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_UNTAGGED, _pointwise),
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), _view),
    **dict.fromkeys((aten.clone, aten.alias, aten.detach, aten._to_copy, aten.fill), _SAME),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum), _moved(_apart(1))),
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), _softmax_backward),
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin), _moved(_reduced)),
    **dict.fromkeys((aten.transpose, aten.t), _moved(_transposed)),
    **dict.fromkeys((aten.split, aten.split_with_sizes), _pieces),
    **dict.fromkeys((aten.full, aten.zeros, aten.ones), _made),
    **dict.fromkeys((aten.max_pool2d_with_indices, aten.avg_pool2d, aten._adaptive_avg_pool2d), _by_planes(1)),
    **dict.fromkeys((aten.upsample_nearest2d, aten.upsample_bilinear2d), _by_planes(1)),
    **dict.fromkeys((aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward), _by_planes(1)),
    **dict.fromkeys((aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward, max_pool2d_backward), _by_planes(2)),
    aten.max_pool2d_with_indices_backward: _max_pool_backward,
    aten.permute: _moved(_permuted),
    aten.unsqueeze: _moved(_unsqueezed),
    aten.squeeze: _moved(_squeezed),
    aten.expand: _moved(_expanded),
    aten.slice: _moved(_apart(1, 0)),
    aten.select: _moved(_selected),
    aten.constant_pad_nd: _moved(_padded),
    aten.cat: _cat,
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten.native_group_norm: _group_norm,
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten.native_batch_norm_backward: _batch_norm_backward,
    **dict.fromkeys((normalized, gradient_of_input), _without_sums),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    convolution_backward_input: _convolution_backward_input,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(3, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(6, 3),
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
}
