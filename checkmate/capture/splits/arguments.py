"""By which argument an op in parts has the bits of the whole: the table of what may be split with equal bits.

    copies        nothing is computed
    once          each element is one operation of IEEE 754 on elements of the arguments, or one of these: whichever
                  code computes it, it is rounded once, to the same bits
    vectors       each element is a function of one number that ATen has for vectors only; the rest of a run is put in
                  a vector too (``vec::map``, or Intel's VML), so that it does not matter where an element lies
    lanes         each element is computed by the same code in a part as in the whole (`checkmate.capture.splits.lanes`)
    rows          an op goes through rows, planes or images one by one, by code that depends on the length of one only
                  (``vec_host_softmax_lastdim``, ``LayerNormKernelImplInternal``, ``cpu_max_pool`` and others of ATen's)
    order         an op sums, in an order that depends on shapes, layouts and types, on the processor and the number of
                  threads, but not on the numbers: what is compared on a few inputs holds for all, if these can tell one
                  order from another (`checkmate.capture.ways.made_up`)

What has none is not split, but with ``numerics="rounding"`` what sums. Rows are tried as well. On a GPU each element of
an elementwise op is computed by the same code wherever it lies, so that lanes hold there always.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import tensors
from checkmate.capture.rewrite import scale_mask
from checkmate.capture.splits.dimensions import Split, is_elementwise
from checkmate.capture.splits.moves import MOVES, rank_of
from checkmate.capture.ways.batch_norm import gradient_of_input, normalized
from checkmate.capture.ways.shape_only import convolution_backward_input, max_pool2d_backward
from checkmate.torch_internals.dispatcher import OpOverload

aten = torch.ops.aten


class Argument(Enum):
    """Why an op in parts has the bits of the whole."""

    COPIES = "copies"
    ONCE = "rounded once"
    VECTORS = "vectors only"
    LANES = "same lanes"
    ROWS = "same rows"
    ORDER = "same order of sums"


_SUMS = {aten.sum, aten.mean}
_ONCE = {
    *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.abs, aten.sqrt, aten.reciprocal, aten.square),
    *(aten.relu, aten.threshold_backward, aten.hardtanh, aten.hardtanh_backward, aten.leaky_relu_backward),
    *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum, aten.where, aten.masked_fill),
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.logical_not, aten.logical_and, aten.logical_or),
    *(aten.bitwise_not, aten.bitwise_and, aten.bitwise_or, aten.isnan, aten.isinf, aten.sign, aten.sgn),
    *(aten.ceil, aten.floor, aten.round, aten.trunc, aten._to_copy, aten.amax, aten.amin, scale_mask),
    *(aten.nll_loss2d_backward,),
}
_VECTORS = {
    *(aten.acos, aten.asin, aten.atan, aten.cos, aten.erf, aten.erfc, aten.exp, aten.expm1, aten.log, aten.log10),
    *(aten.log1p, aten.log2, aten.sin, aten.tan, aten.tanh),
}
_COPIES = {
    *(MOVES.keys() - _SUMS - _ONCE),
    *(aten.cat, aten.split, aten.split_with_sizes, aten.full, aten.zeros, aten.ones, aten.embedding),
    *(aten.max_pool2d_with_indices, aten.upsample_nearest2d, operator.getitem),
}
_ROWS = {
    *(aten._softmax, aten._log_softmax, aten._safe_softmax, aten._softmax_backward_data),
    *(aten._log_softmax_backward_data, aten.cumsum, aten.native_layer_norm, aten.native_layer_norm_backward),
    *(aten.avg_pool2d, aten._adaptive_avg_pool2d, aten.upsample_bilinear2d, aten.upsample_nearest2d_backward),
    *(aten.upsample_bilinear2d_backward, aten.avg_pool2d_backward, aten._adaptive_avg_pool2d_backward),
    *(aten.max_pool2d_with_indices_backward, max_pool2d_backward, aten.embedding_dense_backward),
}
_ORDER = {
    *_SUMS,
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward),
    *(convolution_backward_input, aten.native_group_norm, aten.native_group_norm_backward),
    *(aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward, normalized, gradient_of_input),
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
_WITH_FACTOR = {aten.add, aten.sub, aten.rsub, aten.div}  # or how the quotient is cut, as their third argument
_BY_CONTIGUITY = {aten.logit, aten.logit_backward}  # another library's function where a tensor is contiguous
_ALONG = {  # which argument says along which dimension an op goes through a row
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum), 1),
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), 2),
}


def argument_of(node: fx.Node, split: Split) -> Argument | None:
    """Why an op that runs in parts has the bits of the whole, if what is said of it holds; None: nothing says so."""
    packet = _packet(node.target)
    if packet in _COPIES:
        return Argument.COPIES
    real = not any(t.dtype.is_complex for n in (node, *node.all_input_nodes) for t in tensors(n.meta["val"]))
    if packet in _ONCE and real and not _is_more(node):
        return Argument.ONCE
    if packet in _VECTORS and real:
        return Argument.VECTORS
    if packet in _ROWS:
        along: Any = node.args[_ALONG[packet]] if packet in _ALONG else None
        at = split.results[0]
        inside = along is not None and at is not None and packet is not aten.cumsum and at > along % rank_of(node)
        return None if inside else Argument.ROWS
    if packet in _ORDER:
        return Argument.ORDER
    return Argument.LANES if is_elementwise(node) and packet not in _BY_CONTIGUITY else None


def _packet(target: Callable[..., Any] | str) -> Any:
    return target.overloadpacket if isinstance(target, OpOverload) else target


def _is_more(node: fx.Node) -> bool:
    """Whether a term is multiplied first, which rounds twice, or once, depending on the code, or a quotient cut."""
    factor: Any = node.kwargs.get("alpha", 1)
    return factor != 1 or (_packet(node.target) in _WITH_FACTOR and len(node.args) > 2)
