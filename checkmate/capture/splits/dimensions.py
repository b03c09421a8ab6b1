"""Along which dimension an op reads its arguments, if its result is made part by part along a given one.

An op is independent along a dimension if each part of its result is what the same op makes of parts of some arguments,
and of the others whole: rows of a product, images or output channels of a convolution, whatever softmax or a norm does
not run over. A dimension may hold several units of what is split: of B images as rows of B x T tokens each unit is T.
That an op keeps its bits so is not said here: it is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import is_random
from checkmate.capture.rewrite import scale_mask
from checkmate.capture.splits.moves import (
    MOVES,
    Dims,
    NoParts,
    Reads,
    Rule,
    aligned,
    apart_from,
    moved,
    rank_of,
    shape_of,
)
from checkmate.capture.ways.batch_norm import call_of, gradient_of_input, is_result, normalized
from checkmate.capture.ways.shape_only import convolution_backward_input, max_pool2d_backward
from checkmate.torch_internals.dispatcher import OpOverload

aten = torch.ops.aten
SUMMED = 64  # in place of a result's dimension, of which there are 64 at most: each part makes a summand of all of it


@dataclass(frozen=True)
class Split:
    """How an op runs in parts."""

    results: Dims  # the dimension along which each result is split
    reads: Mapping[fx.Node, int | None]  # and each argument; None: it is read whole; ~dim: only its shape is
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None  # what makes the same of these, if not the op


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
    except NoParts:
        return None
    for argument in node.all_input_nodes:
        reads.setdefault(argument, None)
    vals = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    for val, at in zip(vals, results, strict=True):
        if at is not None and (val is None or val.shape[at] % units):
            return None
    return Split(results, reads)


def _rule(node: fx.Node) -> Rule | None:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return _RULES.get(target)
    found = _RULES.get(target.overloadpacket)
    one = isinstance(node.meta.get("val"), torch.Tensor)  # `torch.frexp` makes two
    if found is None and one and torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return _pointwise
    return found


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of a result is made of the same element of the arguments, broadcast."""
    return _rule(node) is _pointwise


def _pointwise(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    of = shape_of(node)
    return (dim,), ((argument, aligned(argument, of, dim)) for argument in node.all_input_nodes)


def _product(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    """Of matrices, or batches of them, with a bias or without."""
    *bias, a, b = node.args
    last = len(shape_of(node)) - 1
    at = (dim, dim) if dim < last - 1 else (dim, None) if dim == last - 1 else (None, last)
    return (dim,), zip((a, b, *bias), (*at, *(aligned(x, shape_of(node), dim) for x in bias)), strict=True)


def _cat(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    along: Any = node.args[1] if len(node.args) > 1 else 0
    rank = len(shape_of(node))
    if dim == along % rank:
        raise NoParts
    # beside tensors of more dimensions one of shape (0,) adds nothing, and is read as it is
    return (dim,), ((x, dim if len(shape_of(x)) == rank else None) for x in node.all_input_nodes)


def _pieces(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    along: Any = node.args[2] if len(node.args) > 2 else 0
    if dim == along % rank_of(node):
        raise NoParts
    return (dim,) * len(node.meta["val"]), iter([(node.args[0], dim)])


def _softmax_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    return (apart_from(2)(node, dim),), ((x, dim) for x in node.args[:2])


def _by_planes(count: int) -> Rule:
    """For ops on images and their channels, one by one: the first so many arguments have both."""

    def rule(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
        val = node.meta["val"]
        several = isinstance(val, (tuple, list))
        if dim > 1 or len(val[0].shape if several else val.shape) != 4:
            raise NoParts
        return (dim,) * (len(val) if several else 1), ((x, dim) for x in node.args[:count])

    return rule


def _max_pool_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    if dim > 1 or len(shape_of(node)) != 4:
        raise NoParts
    grad, x, *_, indices = node.args
    return (dim,), iter([(grad, dim), (x, ~dim), (indices, dim)])


def _layer_norm(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    shape: Any = node.args[1]
    if dim >= rank_of(node) - len(shape):
        raise NoParts
    return (dim, dim, dim), iter([(node.args[0], dim)])


def _layer_norm_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    grad, x, shape, mean, deviation, *_, wanted = node.args
    if dim >= rank_of(node) - len(shape) or any(wanted[1:]):  # type: ignore[arg-type,index]
        raise NoParts
    return (dim, None, None), ((n, dim) for n in (grad, x, mean, deviation))


def _group_norm(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    if dim:
        raise NoParts
    return (0, 0, 0), iter([(node.args[0], 0)])


def _batch_norm(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    """By channels. What it makes of the running statistics is not for parts, and nothing else depends on these."""
    x, w, b, mean, variance, training = node.args[:6]
    if dim != (0 if index else 1) or index > 2 or not training:
        raise NoParts
    return (1, 0, 0, None, None), iter([(x, 1), (w, 0), (b, 0), (mean, ~0), (variance, ~0)])


def _without_sums(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    """Of a batch norm: along any dimension, and numbers of the channels with these."""
    rank = len(shape_of(node))
    by_channels = 0 if dim == 1 else None
    return (dim,), ((n, dim if len(shape_of(n)) == rank else by_channels) for n in node.all_input_nodes)


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


def _batch_norm_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    grad, x, *others = node.args[:7]
    if dim != (0 if index else 1):
        raise NoParts
    results = tuple(None if val is None else at for val, at in zip(node.meta["val"], (1, 0, 0), strict=True))
    return results, iter([(grad, 1), (x, 1), *((n, 0) for n in others)])


def _in_groups(groups: int, units: int) -> bool:
    """Whether a part of the channels is some of the groups."""
    if groups > 1 and groups % units:
        raise NoParts
    return groups > 1


def _convolution(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    x, w, b, *_, transposed, _, groups = node.args
    if dim > 1 or (dim == 1 and transposed and groups != 1):
        raise NoParts
    if dim == 0:
        return (0,), iter([(x, 0), (w, None), (b, None)])
    return (1,), iter([(x, 1 if _in_groups(groups, units) else None), (w, int(bool(transposed))), (b, 0)])  # type: ignore[arg-type]


def _of_input(grad: Any, w: Any, dim: int, units: int, transposed: Any, groups: Any) -> list[tuple[Any, int | None]]:
    """What the gradient of a convolution's input reads."""
    if dim > 1 or (dim == 1 and transposed and groups != 1):
        raise NoParts
    if dim == 0:
        return [(grad, 0), (w, None)]
    return [(grad, 1), (w, 0)] if _in_groups(groups, units) else [(grad, None), (w, 0 if transposed else 1)]


def _convolution_backward_input(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    grad, w, *_, transposed, _, groups = node.args
    return (dim,), iter(_of_input(grad, w, dim, units, transposed, groups))


def _convolution_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    """The gradient of the input, or that of the weight by its outputs or its inputs."""
    grad, x, w, _, _, _, _, transposed, _, groups, wanted = node.args
    if wanted == [True, False, False]:
        given = dict(_of_input(grad, w, dim, units, transposed, groups))
        return (dim, None, None), iter([*given.items(), (x, ~dim)])
    if wanted[0] or transposed:  # type: ignore[index]
        raise NoParts
    if (index, dim) == (1, 1) and not wanted[2] and groups == 1:  # type: ignore[index]
        return (None, 1, None), iter([(grad, None), (x, 1), (w, 1)])
    if dim:
        raise NoParts
    by_groups = _in_groups(groups, units)  # type: ignore[arg-type]
    results = (None, 0 if wanted[1] else None, 0 if wanted[2] else None)  # type: ignore[index]
    return results, iter([(grad, 1), (x, 1 if by_groups else None), (w, 0)])


def _attention(tensors: int, results: int) -> Rule:
    """Scaled dot product attention by batches or heads; the first so many arguments have both."""

    def rule(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
        if dim > 1:
            raise NoParts
        mask: Any = node.kwargs.get("attn_mask")
        of = (*shape_of(node.args[0])[:3], 2)  # type: ignore[arg-type]
        return (dim,) * results, iter([*((x, dim) for x in node.args[:tensors]), (mask, aligned(mask, of, dim))])

    return rule


def _embedding(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    if dim == len(shape_of(node)) - 1:
        return (dim,), iter([(node.args[0], 1), (node.args[1], None)])
    return (dim,), iter([(node.args[0], None), (node.args[1], dim)])


def _embedding_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    if dim != 1:
        raise NoParts
    return (1,), iter([(node.args[0], rank_of(node) - 1), (node.args[1], None)])


def _nll_loss2d_backward(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    """By images, rows or columns, which targets have and, if it is not one number, the gradient of the loss."""
    grad, x, target, weight, _, _, total = node.args
    if dim == 1:
        raise NoParts
    at = dim - (dim > 1)
    of_each = at if shape_of(grad) == shape_of(target) else None  # type: ignore[arg-type]
    return (dim,), iter([(grad, of_each), (x, dim), (target, at), (weight, None), (total, None)])


def _made(node: fx.Node, index: int, dim: int, units: int) -> tuple[Dims, Reads]:
    """Of nothing: the same number everywhere."""
    return (dim,), iter(())


_UNTAGGED = (
    *(aten.hardtanh_backward, aten.hardswish_backward, aten.leaky_relu_backward, aten.elu_backward, aten.rsub),
    *(aten.hardsigmoid_backward, aten.softplus_backward, aten.mish_backward, aten.hardswish, scale_mask),
    aten.log_sigmoid_backward,
)  # pointwise, though PyTorch does not tag them
_RULES: dict[Any, Rule] = {
    **MOVES,
    **dict.fromkeys(_UNTAGGED, _pointwise),
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum), moved(apart_from(1))),
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), _softmax_backward),
    **dict.fromkeys((aten.split, aten.split_with_sizes), _pieces),
    **dict.fromkeys((aten.full, aten.zeros, aten.ones), _made),
    **dict.fromkeys((aten.max_pool2d_with_indices, aten.avg_pool2d, aten._adaptive_avg_pool2d), _by_planes(1)),
    **dict.fromkeys((aten.upsample_nearest2d, aten.upsample_bilinear2d), _by_planes(1)),
    **dict.fromkeys((aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward), _by_planes(1)),
    **dict.fromkeys((aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward, max_pool2d_backward), _by_planes(2)),
    aten.max_pool2d_with_indices_backward: _max_pool_backward,
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
    aten.nll_loss2d_backward: _nll_loss2d_backward,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
}
