"""Results of normalizations and losses have the types of the kernels, in mixed precision too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from checkmate.capture.patches.results import strides as _strides  # noqa: F401  # which describes results

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]
LAYER, GROUPS = (4, 5, 8), (4, 8, 6, 6)


def _ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _gradients_of_groups(x: torch.dtype, w: torch.dtype, mask: list[bool]) -> tuple[Tensor | None, ...]:
    like, statistics = _ones(x, *GROUPS), _ones(w, 4, 2)
    return aten.native_group_norm_backward(like, like, statistics, statistics, _ones(w, 8), 4, 8, 36, 2, mask)


CALLS: dict[str, Callable[[torch.dtype, torch.dtype], tuple[Tensor | None, ...]]] = {
    "layer": lambda x, w: aten.native_layer_norm(_ones(x, *LAYER), [8], _ones(w, 8), _ones(w, 8), 1e-5),
    "layer without parameters": lambda x, w: aten.native_layer_norm(_ones(x, *LAYER), [8], None, None, 1e-5),
    "layer with a bias": lambda x, w: aten.native_layer_norm(_ones(x, *LAYER), [8], None, _ones(w, 8), 1e-5),
    "groups": lambda x, w: aten.native_group_norm(_ones(x, *GROUPS), _ones(w, 8), _ones(w, 8), 4, 8, 36, 2, 1e-5),
    "gradients of groups": lambda x, w: _gradients_of_groups(x, w, [True] * 3),
    "gradients of groups' parameters": lambda x, w: _gradients_of_groups(x, w, [False, True, True]),
    "batch": lambda x, w: aten._native_batch_norm_legit_functional(
        _ones(x, *GROUPS), *(_ones(w, 8) for _ in range(4)), True, 0.1, 1e-5
    ),
    "batch without parameters": lambda x, w: aten._native_batch_norm_legit_functional(
        _ones(x, *GROUPS), None, None, _ones(w, 8), _ones(w, 8), True, 0.1, 1e-5
    ),
    "batch without statistics": lambda x, w: aten._native_batch_norm_legit.no_stats(
        _ones(x, *GROUPS), _ones(w, 8), _ones(w, 8), True, 0.1, 1e-5
    ),
    "soft margins": lambda x, w: (aten.soft_margin_loss(_ones(x, 4), _ones(w, 4), 1),),
    "gradients of soft margins": lambda x, w: (
        aten.soft_margin_loss_backward(_ones(x, 4), _ones(x, 4), _ones(w, 4), 1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_types_are_those_of_the_kernel(name: str) -> None:
    for dtype in (*HALVES, torch.float32):
        for parameters in {dtype, torch.float32}:
            real = CALLS[name](dtype, parameters)
            with FakeTensorMode():
                described = CALLS[name](dtype, parameters)
            about = [[t is not None and (t.dtype, t.shape, t.stride()) for t in made] for made in (described, real)]
            assert about[0] == about[1], (dtype, parameters)


NORMS = {
    "layer": lambda: nn.LayerNorm([16, 6, 6]),
    "groups": lambda: nn.GroupNorm(4, 16),
    "batch": lambda: nn.BatchNorm2d(16),
    "batch without statistics": lambda: nn.BatchNorm2d(16, track_running_stats=False),
    "batch without parameters": lambda: nn.BatchNorm2d(16, affine=False),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_peaks_under_autocast_are_predicted_to_the_byte(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Which `checkmate.verify` checks, with the bits, where much runs again; and each op is measured."""
    layers = [nn.Conv2d(3, 16, 3), NORMS[name](), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), NORMS[name](), nn.ReLU()]
    net, x = nn.Sequential(*layers), torch.randn(4, 3, 8, 8)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return net(x).float().square().mean()

    problem = checkmate.trace(step, x)
    assert "guess" not in problem.profile.source
    report = checkmate.verify(step, x, budget=checkmate.min_budget(problem, time_limit=1).peak)
    assert report.predicted_peak == report.measured_peak
    assert "estimated" not in caplog.text
