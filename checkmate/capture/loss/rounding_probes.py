"""Numbers on which a sum in another order has other bits, to try whether two ways to run an op round alike.

A sum of n numbers in another order has other last digits mostly. On numbers drawn at random two orders of a product in
float32 give equal bits in 5 to 40 of a hundred elements, and in half precision in all but one of 1e4 to 1e5, since the
sum is rounded once more. So the terms are made in pairs that are opposite, in any order among the others, and of sizes
that are powers of two apart: the exact sum is zero, and what is left is what the order has rounded. Two orders agree in

    n terms       8     16     32     64    256
    float32       0      0      0      0    0-4   of a hundred elements, by the processor
    float64      52     16      1      0      0
    bfloat16  68-76  39-40   4-19    1-8    0-5
    float16   44-56   9-17   1-13    0-7    0-4

(`benchmarks/results/orders.jsonl`, with AVX-512 and AVX2). An order differs in all elements of a block, a row or a
column, not in one; and four inputs at least are tried.

Numbers are drawn on the host, so that they are the same for each device, `DRAWN` of a tensor at most, and repeated over
its memory. These tell two orders apart as all drawn ones would: the order in which an op sums depends on shapes and
layouts, not on numbers, and the terms of each element's own sum are random all the same. Rows, tiles, channels or
images have the same numbers only if they begin a multiple of `DRAWN` apart. That is a prime, so of rows of n elements
row i and row i + `DRAWN` are alike, and none in between: an order that is wrong in some of them, or a row in the place
of another one, shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from checkmate.capture.higher_order.fused_attention import Fused
from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.capture.nodes import storage
from checkmate.capture.random_draws import Drawn
from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten
SPREAD = 6  # factors are powers of two, from -SPREAD to SPREAD
DRAWN = 2**20 - 3  # numbers of a tensor that are drawn, and then repeated: a prime


def made_up(like: Tensor, draw: torch.Generator, seed: int) -> Tensor:
    """Normal numbers, or numbers from 0.1 to 0.9, which are valid variances; bools; zeros, which are valid indices."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    memory = flat(tensor)  # an element may be many
    if like.dtype.is_floating_point or like.dtype.is_complex:
        memory = torch.view_as_real(memory).view(-1) if like.dtype.is_complex else memory
        numbers = torch.empty(min(DRAWN, len(memory)))
        repeat(memory, numbers.normal_(generator=draw) if seed % 2 == 0 else numbers.uniform_(0.1, 0.9, generator=draw))
    elif like.dtype is torch.bool:
        repeat(memory, torch.rand(min(DRAWN, len(memory)), generator=draw) < 0.7)
    else:
        memory.zero_()
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """(N,) the memory of a tensor."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def repeat(memory: Tensor, numbers: Tensor) -> None:
    """Fill memory with repeated numbers, which may be its own first ones."""
    whole = len(memory) // len(numbers) * len(numbers) if len(numbers) else 0
    if numbers.data_ptr() != memory.data_ptr() or numbers.device != memory.device:
        memory[: len(numbers)] = numbers[: len(memory)]
    if whole:
        memory[:whole].view(-1, len(numbers))[1:] = memory[: len(numbers)]
        memory[whole:] = memory[: len(memory) - whole]


def cancel(target: Any, args: tuple[Any, ...], draw: torch.Generator) -> None:
    """Change the arguments of an op that sums, so that terms cancel in pairs.

    Of ops that are not known here nothing is changed, nor where there are no two terms.

    >>> a, b = torch.randn(2, 8), torch.randn(8, 2)
    >>> cancel(torch.ops.aten.mm.default, (a, b), torch.Generator())
    >>> bool(((a.double() @ b.double()).abs() < 1e-9).all())
    True
    """
    if (rule := _RULES.get(packet_of(target))) is not None:
        rule(_Pairs(draw), *args)


def packet_of(target: Any) -> Any:
    """The op of an overload; functions unchanged."""
    op = target.op if isinstance(target, (Drawn, Fused)) else target
    return op.overloadpacket if isinstance(op, OpOverload) else op


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have the same shape, type and bits, signs of zeros and NaNs included."""
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

    def scale(self, *tensors: Tensor) -> None:
        """Scale elements to many magnitudes."""
        for t in tensors:
            if t.is_floating_point() and _is_plain(t):
                memory = flat(t)
                powers = torch.randint(0, len(_SIZES), (min(DRAWN, len(memory)),), generator=self.draw)
                sizes = _SIZES[powers].to(t.device, t.dtype)
                for block in memory.split(max(1, len(sizes))):
                    block.mul_(sizes[: len(block)])

    def pair(self, same: Iterable[tuple[Tensor, int]], opposite: tuple[Tensor, int]) -> bool:
        """Make pairs of entries along a dimension equal in some tensors, opposite in another; False for size one."""
        tensors = [*same, opposite]
        size = opposite[0].shape[opposite[1]]
        if size < 2 or not all(_is_plain(t) for t, _ in tensors):
            return False
        if len({(storage(t), t.storage_offset()) for t, _ in tensors}) < len(tensors):
            return False

        # Pair places at random, but the middle one of an odd number. Of many places some at either end are paired at a
        # time, in an order that is drawn once. Repeated from one end only, it could pair each place of the first half
        # with one as far into the other: a sum by halves would be exact.
        half, most = size // 2, DRAWN // 2
        drawn = torch.randperm(2 * min(half, most), generator=self.draw)
        for begin in range(0, half, most):
            count = min(most, half - begin)
            order = drawn[drawn < 2 * count].to(opposite[0].device)
            order += torch.where(order < count, begin, size - begin - 2 * count)
            places, partners = order[:count], order[count:]
            for t, dim in tensors:
                t.index_copy_(dim, partners, t.index_select(dim, places).mul_(-1 if t is opposite[0] else 1))
        if size % 2:
            opposite[0].select(opposite[1], size // 2).zero_()
        return True


_SIZES = torch.tensor([2.0**power for power in range(-SPREAD, SPREAD + 1)])


def _is_plain(t: Tensor) -> bool:
    """Tell whether no two elements share memory."""
    return all(stride or size == 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def _product(pairs: _Pairs, *args: Any) -> None:
    *bias, a, b = args
    pairs.scale(a, b)
    if pairs.pair([(a, -1 % a.dim())], (b, -2 % b.dim())):
        for t in bias:
            t.zero_()


def _channels(pairs: _Pairs, x: Tensor, w: Tensor, transposed: bool, groups: int) -> bool:
    """Pairs of the channels that a convolution reads, or of places if it reads one channel each."""
    pairs.scale(w)
    if transposed:  # its weight has these channels first
        by_group = zip(x.tensor_split(groups, 1), w.tensor_split(groups, 0), strict=True)
        return all(pairs.pair([(of_x, 1)], (of_w, 0)) for of_x, of_w in by_group)  # which are alike
    if w.shape[1] < 2:
        first = x
        for dim in range(2, x.dim()):
            first = first.narrow(dim, 0, 1)
        x.copy_(first.clone().expand_as(x))
        return w.is_contiguous() and pairs.pair([], (w.view(*w.shape[:2], -1), 2))
    return pairs.pair([(group, 1) for group in x.tensor_split(groups, 1)], (w, 1))


def _convolution(pairs: _Pairs, x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> None:
    *_, transposed, _, groups = geometry
    if _channels(pairs, x, w, transposed, groups) and bias is not None:
        bias.zero_()


def _convolution_backward(pairs: _Pairs, grad: Tensor, x: Tensor, w: Tensor, *options: Any) -> None:
    *_, transposed, _, groups, wanted = options
    if wanted[0]:
        _channels(pairs, grad, w, not transposed, groups)
    else:
        _over_images(pairs, grad, x)


def _over_images(pairs: _Pairs, grad: Tensor, x: Tensor) -> None:
    pairs.scale(grad)
    pairs.pair([(x, 0)], (grad, 0))


def _sum(pairs: _Pairs, x: Tensor, dims: Any = None, *_: Any) -> None:
    pairs.scale(x)
    if x.is_floating_point():
        pairs.pair([], (x, dims[0] % x.dim() if dims else 0))


def _attention(pairs: _Pairs, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> None:
    pairs.scale(v)
    pairs.pair([(k, 2)], (v, 2))


_RULES: dict[Any, Callable[..., bool | None]] = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.sum, aten.mean), _sum),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    convolution_backward_input: lambda pairs, grad, w, *options: _channels(
        pairs, grad, w, not options[-3], options[-1]
    ),
    aten._native_batch_norm_legit_functional: lambda pairs, x, *_: pairs.pair([], (x, 0)),
    aten.native_batch_norm_backward: lambda pairs, grad, x, *_: _over_images(pairs, grad, x),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}
