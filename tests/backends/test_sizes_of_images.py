"""Images and signals of another size at each step: their ops are traced for sizes that are symbols, or by floats."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn, long
from tests.support.stepping import left_by

CPU, _LAST = torch.device("cpu"), torch.channels_last


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(24, 4, 3, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Dropout2d(0.1))

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        wide = F.interpolate(self.middle(F.max_pool2d(skip, 2)), size=skip.shape[-2:], mode="bilinear")
        target = torch.arange(x[:, 0].numel()).view(x[:, 0].shape) % 4
        return F.cross_entropy(self.up(torch.cat([skip, wide], 1)), target)


class _ViT(nn.Module):
    """Patches, and a table of positions that is laid over them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 16, 4, 4), nn.MultiheadAttention(16, 2, 0.1, batch_first=True)
        self.positions = nn.Parameter(torch.randn(1, 16, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        h = h + F.interpolate(self.positions, size=h.shape[2:], mode="bicubic", align_corners=False)
        h = h.flatten(2).transpose(1, 2)
        return self.attention(h, h, h, need_weights=False)[0].square().mean()


class _Conv(nn.Module):
    """A convolution, and something behind it."""

    def __init__(self, dims: int, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv: nn.Module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](3, 6, 3, padding=1)
        self.norm, self.behind = nn.GroupNorm(2, 6), behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.norm(self.conv(x))).square().mean()


def _resized(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda h: F.interpolate(h, mode=mode, **options)


def _circled(h: Tensor) -> Tensor:
    return F.pad(h, (1, 2, 1, 1), mode="circular")


def _turned(h: Tensor) -> Tensor:
    grid = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3) * 0.9, [*h.shape], align_corners=False)
    return F.grid_sample(h, grid, align_corners=False)


def _of_half(h: Tensor) -> Tensor:
    """Of a size that is computed with floats."""
    kept = torch.rand(h.shape[-1]).argsort()[: int(h.shape[-1] * (1 - 0.6))]
    return h[..., kept] * round(math.sqrt(h.shape[-1]))


# What is behind, of how many dimensions.
BEHIND = {
    "nearest by size": (2, lambda h: F.interpolate(h[..., ::2, ::2], size=h.shape[2:])),
    "bilinear": (2, _resized("bilinear", scale_factor=2)),
    "bilinear, channels last": (2, lambda h: F.interpolate(h.to(memory_format=_LAST), scale_factor=2, mode="bilinear")),
    "bilinear by half": (2, _resized("bilinear", scale_factor=0.5, align_corners=True)),
    "bicubic, computed anew": (2, _resized("bicubic", scale_factor=1.3, recompute_scale_factor=True)),
    "to one size": (2, _resized("bilinear", size=(7, 9), antialias=True)),
    "linear": (1, lambda h: F.interpolate(h, size=2 * h.shape[-1], mode="linear")),
    "trilinear": (3, _resized("trilinear", scale_factor=2)),
    "a grid": (2, _turned),
    "circular padding": (2, _circled),
    "pooling of signals": (1, lambda h: F.max_pool1d(h, 3, 2, 1)),
    "positions of the largest": (1, lambda h: F.max_pool1d(h, 2, return_indices=True)[0]),
    "adaptive pooling": (2, lambda h: F.adaptive_avg_pool2d(h, 3) + F.adaptive_max_pool2d(h, 3)),
    "a part by floats": (1, _of_half),
}
IN_SHORT = ("U-Net", "a part by floats")
NETWORKS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "U-Net": (2, _UNet),
    "ViT": (2, _ViT),
    **{name: (dims, partial(_Conv, dims, behind)) for name, (dims, behind) in BEHIND.items()},
}


def _images(size: int, dims: int) -> Tensor:
    shape = [size, size + 4, 5] if dims == 3 else [size, size + 4][:dims]
    return torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(size))


@in_turn(name=[name if name in IN_SHORT else long(name) for name in NETWORKS])
def test_sizes_are_captured_twice_and_have_plain_bits_in_the_bytes_of_their_plan(name: str) -> None:
    dims, network = NETWORKS[name]
    torch.manual_seed(0)
    net = network()
    twin = copy.deepcopy(net)
    problem = checkmate.trace(copy.deepcopy(net), _images(24, dims))
    budget = checkmate.min_budget(problem).peak if name == "U-Net" else problem.keep_all_peak
    step: Any = checkmate.compile(lambda x: twin(x), budget=budget)
    pools = name in ("U-Net", "pooling of signals", "positions of the largest")
    odd = () if pools else (15,)  # PyTorch 2.11 asks whether windows two apart fill what they pool
    for size in (12, 20, 24, 14, *odd):
        x, before = _images(size, dims), {id(plan) for plan in step._caches[0].plans}
        assert_same_bits(left_by(step, twin, x), left_by(net, net, x))
        (plan,) = [plan.plan for plan in step._caches[0].plans if id(plan) not in before]

        def again(x: Tensor = x) -> None:
            step(x).backward()
            twin.zero_grad()

        assert measure_peak(again, CPU).peak == plan.peak - plan.problem.resident
        assert plan.peak <= budget
        twin.load_state_dict(net.state_dict())
    assert len(step._caches[0].steps) == 1


def test_a_size_that_algebra_rounds_otherwise_has_a_capture_of_its_own() -> None:
    """7 * 0.29 * 100 is 202.99999999999997, and 29.0 * 7 is 203.0, which a guard computes."""
    net = nn.Linear(8, 8)

    def loss(x: Tensor) -> Tensor:
        return F.pad(net(x), (0, 0, 0, int(x.shape[0] * 0.29 * 100) - 28 * x.shape[0])).cumsum(0).mean()

    step: Any = checkmate.compile(loss, budget="10 MB")
    for length in (24, 30, 7, 17, 7, 14, 24):
        x = torch.randn(length, 8)
        assert_same_bits(left_by(step, net, x), left_by(loss, net, x))
    assert 2 <= len(step._caches[0].steps) <= 3
