"""Streams of the simulated device: what nothing orders is found, and copies run as late as they may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.simulated_cuda import install
from tests.support.simulated_cuda.plugin import needed

pytestmark = [pytest.mark.cuda, needed()]

SIZE = 100_000


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    for option in ("clocks", "late", "poison"):
        install.set_option(option, True)


def copying() -> tuple[Tensor, Tensor, torch.cuda.Stream]:
    """What a stream beside copies, and to where; it waits for what the current one has written."""
    source, to, side = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE).pin_memory(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        to.copy_(source, non_blocking=True)
    return source, to, side


def test_a_copy_that_waits_is_in_order() -> None:
    source, to, side = copying()
    torch.cuda.current_stream().wait_stream(side)
    source.zero_()
    torch.cuda.synchronize()
    assert (to == 1).all()


def test_a_copy_that_starts_too_early_is_an_error() -> None:
    source, to = torch.ones(SIZE, device="cuda"), torch.zeros(SIZE).pin_memory()
    early = pytest.raises(RuntimeError, match="does not wait for what stream 0 writes to")
    with torch.cuda.stream(torch.cuda.Stream()), early:
        to.copy_(source, non_blocking=True)


def test_a_write_that_does_not_wait_for_a_copy_is_an_error() -> None:
    source, *_kept = copying()
    with pytest.raises(RuntimeError, match="reads from the same memory"):
        source.zero_()


def test_memory_that_is_freed_too_early_is_found_where_it_is_used_again() -> None:
    source, *_kept = copying()
    place = source.data_ptr()
    del source
    other = torch.empty(SIZE, device="cuda")
    assert other.data_ptr() == place
    with pytest.raises(RuntimeError, match="reads from the same memory"):
        other.zero_()


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


def test_without_clocks_late_copies_show_in_the_bits() -> None:
    """The second way to see it, which knows nothing of who accesses what."""
    install.set_option("clocks", False)
    source, to, side = copying()
    assert not side.query()
    source.fill_(7)
    torch.cuda.synchronize()
    assert (to == 7).all()
    assert side.query()


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
