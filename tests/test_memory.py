"""The meter sees every byte."""

from __future__ import annotations

import pytest
import torch

from checkmate.errors import Unsupported
from checkmate.memory import measure_peak, record_allocations


def test_peak_and_what_remains() -> None:
    ones = torch.ones(1000)
    use = measure_peak(lambda: ones.clone().neg().sum())
    assert (use.peak, use.final) == (8000, 4)
    assert use.result == -1000


def test_memory_inside_an_op() -> None:
    """A sort allocates a workspace that no result shows."""
    x = torch.rand(50_000)
    assert measure_peak(lambda: x.sort()).peak >= x.nbytes * 3


def test_what_autograd_saves() -> None:
    x = torch.rand(1000, requires_grad=True)
    use = measure_peak(lambda: x.exp().sin().sum())
    assert use.final == 4000 + 4  # the result of exp, which is the input of sin: both need it for their gradients


def test_spans() -> None:
    ones = torch.ones(100)
    with record_allocations() as recording:
        before = ones[:10].clone()
        with torch.profiler.record_function("inside"):
            ones.clone() + ones.clone()
    assert recording.within("inside").max() == 1200
    assert recording.within("inside")[0] == 0
    assert before.sum() == 10


def test_repeats_to_the_byte() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    x = torch.randn(4, 3, 32, 32)
    net(x).sum().backward()
    assert len({measure_peak(lambda: net(x).sum().backward()).peak for _ in range(5)}) == 1


def test_one_profiler_at_a_time() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(Unsupported, match="running already"),
    ):
        measure_peak(lambda: None)


def test_an_error_inside_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 / 0)
    assert measure_peak(lambda: torch.empty(5)).peak == 20
