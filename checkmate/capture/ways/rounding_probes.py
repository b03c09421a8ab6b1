"""Numbers on which a sum in another order gives other bits: to try whether two ways to run an op round alike.

A sum of n numbers in another order has other last digits mostly, and on numbers drawn at random these show in the
result where that has as many digits as the sum: of products in float32 two orders give equal bits in 5 to 40 of a
hundred elements. In half precision they show in one of 1e4 to 1e5, since the sum is rounded once more. So the terms are
made in pairs that are opposite, in any order among the others, and of sizes that are powers of two apart: the exact sum
is zero, and what is left is what the order has rounded. Two orders then agree in

    n terms      8     16     32     64    256
    float32      0      0      0      0      0   of a hundred elements
    float64     52     16      1      0      0
    bfloat16    68     40      4      1      0
    float16     44      9      1      0      0

(`benchmarks/results/orders.jsonl`). An order differs in all elements of a block, a row or a column,
not in one; and four inputs at least are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from checkmate.capture.random_draws import Drawn
from checkmate.capture.ways.shape_only import convolution_backward_input
from checkmate.torch_internals.dispatcher import OpOverload

aten = torch.ops.aten
SPREAD = 6  # factors are powers of two, from -SPREAD to SPREAD


def made_up(like: Tensor, draw: torch.Generator, seed: int) -> Tensor:
    """Normal numbers, or such between 0.1 and 0.9, which are valid variances; bools; zeros, which are valid indices."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    memory = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))  # an element may be many
    if like.dtype.is_floating_point:
        numbers = torch.empty(len(memory))
        memory.copy_(numbers.uniform_(0.1, 0.9, generator=draw) if seed % 2 else numbers.normal_(generator=draw))
    elif like.dtype.is_complex:
        pairs = torch.view_as_real(memory)
        pairs.copy_(torch.empty(pairs.shape, dtype=pairs.dtype).normal_(generator=draw))
    elif like.dtype is torch.bool:
        memory.copy_(torch.rand(len(memory), generator=draw) < 0.7)
    else:
        memory.zero_()
    return made


def cancel(target: Any, args: tuple[Any, ...], draw: torch.Generator) -> None:
    """Change the arguments of an op that sums, so that the terms of its sums are opposite in pairs.

    Of ops that are not known here nothing is changed, nor where there are no two terms.

    >>> a, b = torch.randn(2, 8), torch.randn(8, 2)
    >>> cancel(torch.ops.aten.mm.default, (a, b), torch.Generator())
    >>> bool(((a.double() @ b.double()).abs() < 1e-9).all())
    True
    """
    if (rule := _RULES.get(packet_of(target))) is not None:
        rule(_Pairs(draw), *args)


def packet_of(target: Any) -> Any:
    """An op of PyTorch's, whichever its overload; a function as it is."""
    op = target.op if isinstance(target, Drawn) else target
    return op.overloadpacket if isinstance(op, OpOverload) else op


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits, signs of zeros and NaNs included, wherever these lie."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(a.element_size(), torch.uint8)
    as_they_lie = a.stride() == b.stride() and aten.is_non_overlapping_and_dense(a)
    flat = (t.as_strided((t.numel(),), (1,)) if as_they_lie else t.contiguous().view(-1) for t in (a, b))
    return torch.equal(*(t.view(integers) for t in flat))  # noqa: TID251  # of whole numbers


class _Pairs:
    """Makes pairs along dimensions of tensors."""

    def __init__(self, draw: torch.Generator) -> None:
        self.draw = draw

    def scale(self, *given: Tensor) -> None:
        """Have elements of many sizes."""
        for t in given:
            if t.is_floating_point() and _is_plain(t):
                powers = torch.randint(-SPREAD, SPREAD + 1, t.shape, generator=self.draw)
                sizes = torch.ldexp(torch.ones(t.shape, dtype=torch.float64), powers).to(t.device)
                t.copy_((t.double() * sizes).to(t.dtype))

    def pair(self, same: Iterable[tuple[Tensor, int]], opposite: tuple[Tensor, int], groups: int = 1) -> bool:
        """Have entries along a dimension be equal in some tensors, opposite in another, by twos; False: it is one."""
        given = [*same, opposite]
        size = opposite[0].shape[opposite[1]] // groups
        if size < 2 or not all(_is_plain(t) for t, _ in given) or len({t.data_ptr() for t, _ in given}) < len(given):
            return False
        order = torch.randperm(size, generator=self.draw).to(opposite[0].device)
        one, other, rest = order[: size // 2], order[size // 2 : size // 2 * 2], order[size // 2 * 2 :]
        for t, dim in given:
            sign = -1 if t is opposite[0] else 1
            for group in t.tensor_split(groups, dim):
                group.index_copy_(dim, other, sign * group.index_select(dim, one))
                if t is opposite[0]:
                    group.index_fill_(dim, rest, 0)
        return True


def _is_plain(t: Tensor) -> bool:
    """No element is at two places."""
    return all(stride or size == 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def _product(pairs: _Pairs, *args: Any) -> None:
    *bias, a, b = args
    pairs.scale(a, b)
    if pairs.pair([(a, -1 % a.dim())], (b, -2 % b.dim())):
        for t in bias:
            t.zero_()


def _convolution(pairs: _Pairs, x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> None:
    *_, transposed, _, groups = geometry
    pairs.scale(w)
    done = pairs.pair([(x, 1)], (w, 0), groups) if transposed else _within(pairs, x, w, groups)
    if done and bias is not None:
        bias.zero_()


def _within(pairs: _Pairs, x: Tensor, w: Tensor, groups: int) -> bool:
    """Pairs of the channels that a convolution reads; if that is one for each, of the places that it reads."""
    size = w.shape[1]
    if size < 2:
        x.copy_(x.flatten(2)[..., :1].reshape(*x.shape[:2], *[1] * (x.dim() - 2)).expand_as(x).clone())
        return w.is_contiguous() and pairs.pair([], (w.view(*w.shape[:2], -1), 2))
    order = torch.randperm(size, generator=pairs.draw).to(w.device)
    one, other, rest = order[: size // 2], order[size // 2 : size // 2 * 2], order[size // 2 * 2 :]
    w.index_copy_(1, other, -w.index_select(1, one))
    w.index_fill_(1, rest, 0)
    for group in x.tensor_split(groups, 1):
        group.index_copy_(1, other, group.index_select(1, one))
    return True


def _of_input(pairs: _Pairs, grad: Tensor, w: Tensor, transposed: bool, groups: int) -> None:
    pairs.scale(w)
    if transposed:
        _within(pairs, grad, w, groups)
    else:
        pairs.pair([(grad, 1)], (w, 0), groups)


def _convolution_backward(pairs: _Pairs, grad: Tensor, x: Tensor, w: Tensor, *others: Any) -> None:
    *_, transposed, _, groups, wanted = others
    if wanted[0]:
        _of_input(pairs, grad, w, transposed, groups)
    else:
        _over_images(pairs, grad, x)


def _over_images(pairs: _Pairs, grad: Tensor, x: Tensor) -> None:
    pairs.scale(grad)
    pairs.pair([(x, 0)], (grad, 0))


def _sum(pairs: _Pairs, x: Tensor, dims: Any = None, *others: Any) -> None:
    pairs.scale(x)
    if x.is_floating_point():
        pairs.pair([], (x, dims[0] % x.dim() if dims else 0))


def _attention(pairs: _Pairs, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> None:
    pairs.scale(v)
    pairs.pair([(k, 2)], (v, 2))


_RULES: dict[Any, Callable[..., None]] = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.sum, aten.mean), _sum),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    convolution_backward_input: lambda pairs, grad, w, *others: _of_input(pairs, grad, w, others[-3], others[-1]),
    aten._native_batch_norm_legit_functional: lambda pairs, x, *_: pairs.pair([], (x, 0)),
    aten.native_batch_norm_backward: lambda pairs, grad, x, *_: _over_images(pairs, grad, x),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}
