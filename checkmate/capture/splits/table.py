"""The table of ops that may run in parts: along which dimensions, and why the bits are those of the whole.

Each op has letters for the dimensions of what it reads and makes, as `torch.einsum` has them:

    mm                          ik,kj->ij
    convolution                 n.,o.,o->no
    max_pool2d backward         nc,~nc,,,,,,nc->nc

A result is made part by part along a dimension of parts of the arguments that have its letter, and of the others whole.
``.`` is a dimension that is not split; ``~`` an argument of which nothing but the shape is read; ``-`` a result that is
not for parts. A letter that a result lacks is summed over: each part makes a summand of all of it, and these are added
up one after the other, which rounds otherwise than the op does; it is offered with ``numerics="rounding"`` only. A
dimension may hold several units of what is split: of B images as rows of B x T tokens each unit is T.

An op keeps its bits in parts by one of these arguments, or is not split:

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
                  order from another (`checkmate.capture.ways.rounding_probes`)

Rows are tried as well. On a GPU each element of an elementwise op is computed by the same code wherever it lies: lanes
hold there always.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import is_random, tensors
from checkmate.capture.rewrite import scale_mask
from checkmate.capture.splits import letters as by
from checkmate.capture.splits.letters import Letters, Rule, pointwise, rank_of, values_of
from checkmate.capture.ways.batch_norm import call_of, gradient_of_input, is_result, normalized
from checkmate.capture.ways.rounding_probes import packet_of
from checkmate.capture.ways.shape_only import convolution_backward_input, max_pool2d_backward
from checkmate.torch_internals.dispatcher import OpOverload

aten = torch.ops.aten
SUMMED = 64  # in place of a result's dimension, of which there are 64 at most: each part makes a summand of all of it


class Argument(Enum):
    """Why an op in parts has the bits of the whole."""

    COPIES = "copies"
    ONCE = "rounded once"
    VECTORS = "vectors only"
    LANES = "same lanes"
    ROWS = "same rows"
    ORDER = "same order of sums"


@dataclass(frozen=True)
class OpSplit:
    """How an op runs in parts."""

    results: tuple[int | None, ...]  # the dimension along which each result is split; None: it is not; or `SUMMED`
    reads: Mapping[fx.Node, int | None]  # and each argument; None: it is read whole; ~dim: only its shape is
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None  # what makes the same of these, if not the op


def split_of(node: fx.Node, index: int, dim: int, units: int) -> OpSplit | None:
    """How an op runs in parts if one of its results is to be split along a dimension; None: it does not.

    Args:
        index: of the result.
        dim: its dimension.
        units: how many equal ones the dimension consists of; a part has some of them.
    """
    letters = _letters_of(node, units)
    split = None if letters is None else _along(node, letters, letters.made[index].removeprefix("-")[dim : dim + 1])
    if split is None or SUMMED in split.results or not divides(split, units):
        return None
    sizes = [val.shape[at] for val, at in zip(values_of(node), split.results, strict=True) if at is not None]
    return None if any(size % units for size in sizes) else split


def sums_of(node: fx.Node) -> Iterator[OpSplit]:
    """How an op sums over parts of a dimension of what it reads, if it does: one for each such dimension."""
    letters = _letters_of(node, 1)
    for letter in dict.fromkeys("".join(read for _, read in letters.read) if letters else ""):
        assert letters is not None
        split = _along(node, letters, letter)
        if split is not None and SUMMED in split.results:
            yield split


def divides(split: OpSplit, units: int) -> bool:
    """Whether what is read in parts consists of so many equal units."""
    return all(n.meta["val"].shape[max(at, ~at)] % units == 0 for n, at in split.reads.items() if at is not None)


def normalized_split(node: fx.Node, dim: int) -> OpSplit | None:
    """How the result of a batch norm runs in parts once its statistics are there, but for channels: it does so itself.

    Args:
        node: of the result; dim: its dimension.
    """
    args = call_of(node) if dim != 1 and is_result(node) else None
    if args is None:
        return None
    x, *others = args
    return OpSplit((dim,), {x: dim, **{n: None for n in others if n is not None}}, (normalized, args))


def argument_of(node: fx.Node, split: OpSplit) -> Argument | None:
    """Why an op that runs in parts has the bits of the whole, if what is said of it holds; None: nothing says so."""
    packet = packet_of(node.target)
    _, found = TABLE.get(packet, (None, Argument.LANES))
    if found in (Argument.ONCE, Argument.VECTORS):
        real = not any(t.dtype.is_complex for n in (node, *node.all_input_nodes) for t in tensors(n.meta["val"]))
        found = found if real and not _is_more(node) else Argument.LANES
    if found is Argument.LANES:
        return found if _rule(node) is pointwise and packet not in _BY_CONTIGUITY else None
    at = split.results[0]
    if packet in _GOES_ALONG and at is not None:
        along: Any = node.args[_GOES_ALONG[packet]]
        return None if at > along % rank_of(node.args[0]) else found
    return found


def _is_more(node: fx.Node) -> bool:
    """Whether a term is multiplied first, which rounds twice, or once, depending on the code, or a quotient cut."""
    factor: Any = node.kwargs.get("alpha", 1)
    return factor != 1 or (packet_of(node.target) in _WITH_FACTOR and len(node.args) > 2)


def _rule(node: fx.Node) -> Rule | None:
    target: Any = node.target
    if (packet := packet_of(target)) in TABLE:
        return TABLE[packet][0]
    one = isinstance(node.meta.get("val"), torch.Tensor)  # `torch.frexp` makes two
    tagged = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable
    return pointwise if one and tagged else None


def _letters_of(node: fx.Node, units: int) -> Letters | None:
    rule = None if is_random(node) else _rule(node)
    found = rule if rule is None or isinstance(rule, str) else rule(node, units)
    if not isinstance(found, str):
        return found
    read, made = (side.split(",") for side in found.split("->"))
    return Letters([*zip(node.args, read, strict=False)], made)


def _along(node: fx.Node, letters: Letters, letter: str) -> OpSplit | None:
    """How an op runs in parts along what a letter stands for; None: an argument would be read in two ways."""
    if not letter.isalpha():
        return None
    reads: dict[fx.Node, int | None] = {}
    for argument, text in letters.read:
        if isinstance(argument, fx.Node):
            at = text.removeprefix("~").find(letter)
            place = None if at < 0 else ~at if text.startswith("~") else at
            if reads.setdefault(argument, place) != place:
                return None
    made: list[int | None] = [
        None if val is None or text.startswith("-") else text.index(letter) if letter in text else SUMMED
        for val, text in zip(values_of(node), letters.made, strict=True)
    ]
    return OpSplit(tuple(made), {n: reads.get(n) for n in (*reads, *node.all_input_nodes)})


def _each(argument: Argument, rule: Rule | None, *packets: Any) -> dict[Any, tuple[Rule | None, Argument]]:
    return dict.fromkeys(packets, (rule, argument))


COPIES, ONCE, VECTORS, LANES, ROWS, ORDER = Argument
TABLE: Mapping[Any, tuple[Rule | None, Argument]] = {  # what has no line and is elementwise has its lanes
    **_each(COPIES, by.viewed, aten.view, aten._unsafe_view, aten.reshape),
    **_each(COPIES, by.moved(lambda node, letters: letters), aten.clone, aten.alias, aten.detach, aten.fill),
    **_each(COPIES, by.moved(by.transposed), aten.transpose, aten.t),
    **_each(COPIES, by.moved(lambda node, letters: "".join(letters[d] for d in node.args[1])), aten.permute),
    **_each(COPIES, by.moved(by.unsqueezed), aten.unsqueeze),
    **_each(COPIES, by.moved(by.squeezed), aten.squeeze),
    **_each(COPIES, pointwise, aten.expand),
    **_each(COPIES, by.moved(by.apart_from(1, 0)), aten.slice),
    **_each(COPIES, by.moved(lambda node, letters: by.but(letters, node.args[1], by="")), aten.select),
    **_each(
        COPIES,
        by.moved(lambda node, letters: by.but(letters, *range(-(len(node.args[1]) // 2), 0))),
        aten.constant_pad_nd,
    ),
    **_each(COPIES, by.cat, aten.cat),
    **_each(COPIES, by.moved(by.apart_from(2, 0)), aten.split, aten.split_with_sizes),
    **_each(COPIES, pointwise, aten.full, aten.zeros, aten.ones),
    **_each(COPIES, by.embedding, aten.embedding),
    **_each(COPIES, by.moved(by.planes), aten.max_pool2d_with_indices, aten.upsample_nearest2d),
    **_each(COPIES, None, operator.getitem),
    **_each(ONCE, pointwise, aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.abs, aten.sqrt),
    **_each(ONCE, pointwise, aten.reciprocal, aten.square, aten.relu, aten.threshold_backward, aten.hardtanh),
    **_each(ONCE, pointwise, aten.hardtanh_backward, aten.leaky_relu_backward, aten.clamp, aten.clamp_min),
    **_each(ONCE, pointwise, aten.clamp_max, aten.maximum, aten.minimum, aten.where, aten.masked_fill, aten.eq),
    **_each(ONCE, pointwise, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.logical_not, aten.logical_and),
    **_each(ONCE, pointwise, aten.logical_or, aten.bitwise_not, aten.bitwise_and, aten.bitwise_or, aten.isnan),
    **_each(ONCE, pointwise, aten.isinf, aten.sign, aten.sgn, aten.ceil, aten.floor, aten.round, aten.trunc),
    **_each(ONCE, pointwise, scale_mask),
    **_each(ONCE, by.moved(lambda node, letters: letters), aten._to_copy),
    **_each(ONCE, by.moved(by.reduced), aten.amax, aten.amin),
    **_each(ONCE, by.nll_loss2d_backward, aten.nll_loss2d_backward),
    **_each(VECTORS, pointwise, aten.acos, aten.asin, aten.atan, aten.cos, aten.erf, aten.erfc, aten.exp, aten.expm1),
    **_each(VECTORS, pointwise, aten.log, aten.log10, aten.log1p, aten.log2, aten.sin, aten.tan, aten.tanh),
    # elementwise, though PyTorch does not tag them
    **_each(LANES, pointwise, aten.hardswish_backward, aten.elu_backward, aten.hardsigmoid_backward),
    **_each(LANES, pointwise, aten.softplus_backward, aten.mish_backward, aten.hardswish),
    **_each(LANES, pointwise, aten.log_sigmoid_backward),
    **_each(ROWS, by.moved(by.apart_from(1)), aten._softmax, aten._log_softmax, aten._safe_softmax, aten.cumsum),
    **_each(ROWS, by.moved(by.apart_from(2), reads=2), aten._softmax_backward_data, aten._log_softmax_backward_data),
    **_each(ROWS, by.moved(lambda node, letters: letters[: -len(node.args[1])]), aten.native_layer_norm),
    **_each(ROWS, by.layer_norm_backward, aten.native_layer_norm_backward),
    **_each(ROWS, by.moved(by.planes), aten.avg_pool2d, aten._adaptive_avg_pool2d, aten.upsample_bilinear2d),
    **_each(ROWS, by.moved(by.planes), aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward),
    **_each(
        ROWS,
        by.moved(by.planes, reads=2),
        aten.avg_pool2d_backward,
        aten._adaptive_avg_pool2d_backward,
        max_pool2d_backward,
    ),
    **_each(
        ROWS,
        lambda node, _: "nc,~nc,,,,,,nc->nc" if rank_of(node) == 4 else None,
        aten.max_pool2d_with_indices_backward,
    ),
    **_each(ROWS, lambda node, _: f"{'.' * (rank_of(node.args[0]) - 1)}z->.z", aten.embedding_dense_backward),
    **_each(ORDER, by.moved(by.reduced), aten.mean),
    **_each(ORDER, by.moved(by.reduced, summed=True), aten.sum),
    **_each(ORDER, "ik,kj->ij", aten.mm),
    **_each(ORDER, "bik,bkj->bij", aten.bmm),
    **_each(ORDER, by.with_bias, aten.addmm, aten.baddbmm),
    **_each(ORDER, by.convolution, aten.convolution),
    **_each(ORDER, by.convolution_backward, aten.convolution_backward),
    **_each(ORDER, by.convolution_backward_input, convolution_backward_input),
    **_each(ORDER, "n->n,n,n", aten.native_group_norm),
    **_each(ORDER, lambda node, _: by.gradients(node, "n,n,n,n", "n", "", ""), aten.native_group_norm_backward),
    **_each(
        ORDER,
        lambda node, _: ".c,c,c,~c,~c->.c,c,c,-,-" if node.args[5] else None,
        aten._native_batch_norm_legit_functional,
    ),
    **_each(ORDER, by.batch_norm_backward, aten.native_batch_norm_backward),
    **_each(ORDER, by.without_sums, normalized, gradient_of_input),
    **_each(ORDER, by.attention(3, 2), aten._scaled_dot_product_flash_attention_for_cpu),
    **_each(ORDER, by.attention(6, 3), aten._scaled_dot_product_flash_attention_for_cpu_backward),
}
_WITH_FACTOR = {aten.add, aten.sub, aten.rsub, aten.div}  # or how the quotient is cut, as their third argument
_BY_CONTIGUITY = {aten.logit, aten.logit_backward}  # another library's function where a tensor is contiguous
_GOES_ALONG = {  # which argument says along which dimension an op goes through a row: by vectors of what lies within
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten._safe_softmax), 1),
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), 2),
}
