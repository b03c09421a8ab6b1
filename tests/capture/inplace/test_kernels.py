"""Block by block an op leaves the bits that it leaves at once, over either argument, and needs a block of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from checkmate.capture.inplace.kernels import (
    batch_norm_backward_over,
    batch_norm_block,
    convolution_backward_block,
    convolution_backward_over,
    convolution_block,
    convolution_over,
)
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

aten = torch.ops.aten
LAYOUTS = {
    "contiguous": torch.contiguous_format,
    "channels last": torch.channels_last,
}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _draw(*shape: int, seed: int, dtype: torch.dtype, layout: str) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return drawn.contiguous(memory_format=LAYOUTS[layout])


def _is_over(op: Any, over: Any, args: tuple[Any, ...], block: int) -> None:
    """Over each of the first two arguments, as far as they are like the result."""
    expected = op(*args)
    first = expected if isinstance(expected, Tensor) else expected[0]
    plain = measure_peak(lambda: op(*args)).peak
    like = [i for i in (0, 1) if args[i].shape == first.shape]
    assert like
    for i in like:
        own = (*(a.clone() if isinstance(a, Tensor) else a for a in args),)
        made: list[Any] = []
        use = measure_peak(lambda: made.append(over(*own, out=own[i])))  # noqa: B023
        assert_same_bits(made[0], expected)
        assert (made[0] if isinstance(made[0], Tensor) else made[0][0]) is own[i]
        assert_same_bits(own[1 - i], args[1 - i])
        assert use.peak <= plain - first.nbytes + block


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_gradients_of_a_batch_norm(training: bool, dtype: torch.dtype, layout: str) -> None:
    for seed, shape in enumerate([(4, 48, 14, 14), (2, 70, 9, 5)]):
        grad, x = (_draw(*shape, seed=seed + i, dtype=dtype, layout=layout) for i in (0, 2))
        weight, mean, std, nothing = torch.rand(4, shape[1]).unbind()
        saved = (mean, std) if training else (nothing[:0], nothing[:0])
        for wanted in ([True, True, True], [True, False, False]):
            statistics = (None, None, *saved) if training else (mean, std + 0.5, *saved)
            args = (grad, x, weight if wanted[1] else None, *statistics, training, 1e-5, wanted)
            block = batch_norm_block(*args)
            assert block is not None
            _is_over(aten.native_batch_norm_backward.default, batch_norm_backward_over, args, block)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 24], ids=["dense", "by channel"])
def test_a_convolution_and_the_gradient_of_its_input(groups: int, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad, x = (_draw(8, 24, 20, 20, seed=i, dtype=dtype, layout=layout) for i in (0, 2))
        weight = _draw(24, 24 // groups, 3, 3, seed=1, dtype=dtype, layout=layout)
        geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        args = (grad, x, weight, None, *geometry, [True, False, False])
        block = convolution_backward_block(*args)
        assert block == x.nbytes // 4
        _is_over(aten.convolution_backward.default, convolution_backward_over, args, block)
        _is_over(aten.convolution.default, convolution_over, (x, weight, None, *geometry), block)


def test_a_block_is_a_small_part_of_what_is_large() -> None:
    large, wanted = torch.empty(64, 64, 112, 112, device="meta"), [True, False, False]
    assert batch_norm_block(large, large, wanted) == 3 * large[:, :1].nbytes  # a channel is more than a mebibyte
    assert batch_norm_block(large[:8], large[:8], wanted) == 3 * large[:8, :2].nbytes
    few = large[:1, :, :7, :7]
    assert batch_norm_block(few, few, wanted) == 3 * few[:, :4].nbytes
    beside = large[:8].contiguous(memory_format=torch.channels_last)
    assert batch_norm_block(beside, beside, wanted) == 3 * beside[:, :16].nbytes
    assert convolution_block(large) == large[:8].nbytes
    assert convolution_block(large[:4]) == large[:2].nbytes


def test_what_makes_more_or_less_than_an_inputs_gradient_or_few_images_is_not_taken_apart() -> None:
    x = torch.empty(8, 4, 6, 6, device="meta")
    weight = torch.empty(4, 4, 3, 3, device="meta")
    assert convolution_backward_block(x, x, weight, None, [True, False, False]) is not None
    assert convolution_backward_block(x, x, weight, None, [True, True, False]) is None
    assert convolution_block(x[:3]) is None
    assert batch_norm_block(x, x, [False, True, True]) is None
