"""Streams and events of the simulated device; `test_waits` has what nothing orders, and copies that run late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.simulated_cuda.plugin import needed

pytestmark = [pytest.mark.cuda, needed()]

SIZE = 100_000


@pytest.fixture(autouse=True)
def _synchronized() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def copying() -> tuple[Tensor, Tensor, torch.cuda.Stream]:
    """A value, the pinned memory to which another stream copies it, and that stream, which has waited for the value."""
    source, to, side = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE).pin_memory(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        to.copy_(source, non_blocking=True)
    return source, to, side


def test_memory_recorded_on_a_stream_stays_until_that_has_come_so_far() -> None:
    source, to, side = copying()
    source.record_stream(side)
    place = source.data_ptr()
    del source
    other = torch.zeros(SIZE, device="cuda")
    assert other.data_ptr() != place
    side.synchronize()
    assert (to == 1).all()
    assert torch.zeros(SIZE, device="cuda").data_ptr() == place


def test_a_stream_s_memory_is_its_own() -> None:
    side = torch.cuda.Stream()
    place = torch.empty(SIZE, device="cuda").data_ptr()
    with torch.cuda.stream(side):
        assert torch.empty(SIZE, device="cuda").data_ptr() != place
    assert torch.empty(SIZE, device="cuda").data_ptr() == place


def test_the_host_may_read_what_it_has_waited_for() -> None:
    source, to, side = copying()
    event = side.record_event()
    assert not event.query()
    assert (to == 0).all()
    event.synchronize()
    assert event.query()
    assert (to == 1).all()
    source.zero_()  # what the host has waited for is over


def test_events_time_the_device_s_work_and_not_the_host_s() -> None:
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(10_000_000, device="cuda")
    begin.record()
    x.add_(1)
    middle.record()
    y.add_(1)
    end.record()
    assert 0 < begin.elapsed_time(middle) < middle.elapsed_time(end) / 5
    assert begin.elapsed_time(middle) == pytest.approx(2e-3, rel=0.01)  # ms: a launch
