"""Gradients that are computed without an input of which the op reads the shape only have the same bits."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends.tensor_state import same_bits
from checkmate.capture.inplace.shape_only import convolution_backward_input as input_gradient
from checkmate.capture.inplace.shape_only import has_certain_format, max_pool2d_backward, stand_in
from checkmate.memory import measure_peak
from checkmate.torch_internals.capturing import suggest_memory_format
from tests.support.sampling import every, in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


def _sizes(rng: random.Random, dims: int, *choices: int) -> list[int]:
    return [rng.choice(choices) for _ in range(dims)]


def _convolution(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """An input, a weight, the gradient of the result, and the geometry."""
    dims, channels, transposed = rng.choice((1, 2, 2, 3)), rng.choice((2, 4, 16)), rng.random() < 0.2
    groups = rng.choice((1, 1, 2, channels))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
    x = torch.randn([rng.choice((1, 2, 5)), channels, *_sizes(rng, dims, 9, 12, 17)]).to(dtype)
    weight = torch.randn([channels, channels // groups, *_sizes(rng, dims, 1, 2, 3)]).to(dtype)
    if dims == 2 and rng.random() < 0.4:
        x = x.to(memory_format=torch.channels_last)
    if dims == 2 and rng.random() < 0.2:
        x = x.transpose(2, 3)
    stride, padding, dilation = _sizes(rng, dims, 1, 1, 2), _sizes(rng, dims, 0, 1), _sizes(rng, dims, 1, 1, 2)
    geometry = stride, padding, dilation, transposed, [0] * dims, groups
    y = aten.convolution(x, weight, None, *geometry)
    return x, weight, torch.randn(y.shape).to(dtype), geometry


@in_turn(block=every(3, range(20)))
def test_the_input_gradient_of_any_convolution(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        torch.manual_seed(seed)
        x, weight, grad, geometry = _convolution(random.Random(seed))
        plain = aten.convolution_backward(grad, x, weight, None, *geometry, [True, False, False])[0]
        assert same_bits(input_gradient(grad, weight, x.shape, x.stride(), *geometry), plain), seed


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gradient_of_a_maximum_over_windows(channels_last: bool) -> None:
    x = torch.randn(3, 4, 15, 17).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    geometry = [3, 3], [2, 2], [1, 1], [1, 1], False
    y, indices = aten.max_pool2d_with_indices(x, *geometry)
    grad = torch.randn_like(y)
    plain = aten.max_pool2d_with_indices_backward(grad, x, *geometry, indices)
    assert same_bits(max_pool2d_backward(grad, indices, x.shape, x.stride(), *geometry), plain)


def test_what_stands_in_takes_no_memory_and_is_zero() -> None:
    shape, stride = (2**13, 2**10), (2**10, 1)
    assert measure_peak(lambda: stand_in(shape, stride, torch.float32)).peak == 0
    assert not stand_in(shape, stride, torch.float32)[::97].any()
    assert stand_in((3, 0), (0, 1), torch.float64).shape == (3, 0)


def test_a_step_needs_no_input_for_its_gradient() -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    batch = torch.randn(4, 3, 16, 16)
    problem = checkmate.trace(lambda x: F.mse_loss(body(x), torch.zeros(())), batch)
    readers = {op.target: [problem.graph.values[v].name for v in op.inputs] for op in problem.graph.ops}
    assert "max_pool2d_with_indices[0]" not in readers["checkmate.convolution_backward_input"]
    assert "convolution" not in readers["checkmate.max_pool2d_backward"]


def test_a_certain_format_is_that_of_all_strides_of_one_element() -> None:
    """PyTorch's own answer is the oracle, over all strides that a dimension of one element may have."""
    rng = random.Random(0)
    certain = 0
    for _ in range(600):
        n = rng.choice((4, 5))
        order, shape = rng.sample(range(n), n), _sizes(rng, n, 1, 2, 3)
        stride, step = [0] * n, 1
        for d in order:
            stride[d], step = step, step * shape[d]
        ones = [d for d in range(n) if shape[d] == 1]
        formats = set()
        for steps in product(*([0, 1, 2, 3, 6, 18, 10**6] for _ in ones)):
            for d, other in zip(ones, steps, strict=True):
                stride[d] = other
            x = torch.empty_strided(shape, stride, device="meta")
            formats.add(suggest_memory_format(x))
            assert has_certain_format(shape, stride) == has_certain_format(x.shape, [*x.stride()])
        if has_certain_format(shape, stride):
            certain += 1
            assert len(formats) == 1, (shape, stride)
    assert certain > 150


def test_a_map_of_one_channel_has_the_gradient_of_plain_pytorch() -> None:
    """A convolution of a map that a norm and a view have made, whose channel has two possible strides."""
    for _ in range(4):
        mixed, norm, conv = nn.Conv2d(2, 1, 3, padding=1), nn.LayerNorm(1), nn.Conv2d(1, 1, 3, padding=1)

        def step(x: Tensor, mixed: Any = mixed, norm: Any = norm, conv: Any = conv) -> Tensor:
            x = mixed(x)
            kept = norm(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(x.shape) * x
            return ((conv(kept) + kept) ** 2).sum()

        checkmate.verify(step, torch.randn(4, 2, 7, 7))
