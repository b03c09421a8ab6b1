"""The simulated allocator and its streams: the rules of PyTorch's on CUDA, in figures that follow from them.

`tests/memory/test_cuda_allocator.py` holds the rules in Python to the same figures, and this allocator to them after
each of many random events, also with expandable segments: blocks, segments, snapshots and peaks. `test_waits` has what
no stream orders, and copies that run late.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.sampling import in_turn
from tests.support.simulated_cuda import install
from tests.support.simulated_cuda.plugin import needed

pytestmark = [pytest.mark.cuda, needed()]

MIB = 1 << 20
OTHER = 1  # the device that no other test uses
COPIED = 100_000  # numbers that another stream copies


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    """Nothing is on the device, before and after; it is as large as before."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # which steps on that device have left
    with torch.cuda.device(OTHER):
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0, "what ran before holds memory of this device"
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.get_device_properties(OTHER).total_memory
        yield
        torch.cuda.synchronize()
        install.set_capacity(before, OTHER)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == 0


def take(nbytes: float) -> Tensor:
    return torch.empty(int(nbytes), dtype=torch.uint8, device=f"cuda:{OTHER}")


def stats(name: str) -> int:
    return torch.cuda.memory_stats(OTHER)[name]


def used() -> tuple[int, ...]:
    """Requested, allocated, reserved."""
    return tuple(stats(f"{what}_bytes.all.current") for what in ("requested", "allocated", "reserved"))


@in_turn(
    case=[
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not split off
        (33 * MIB - 5, 34 * MIB, 34 * MIB),
    ],
)
def test_blocks_and_segments(case: tuple[int, int, int]) -> None:
    nbytes, allocated, reserved = case
    kept = take(nbytes)
    assert used() == (nbytes, allocated, reserved)
    del kept
    assert used() == (0, 0, reserved)
    torch.cuda.empty_cache()
    assert used() == (0, 0, 0)


def test_the_smallest_block_that_fits_is_taken_the_lowest_of_equal_ones() -> None:
    kept: list[Any] = [take(size * MIB) for size in (2, 3, 2, 4, 2, 3, 2)]  # 18 of 20 MiB
    places = [tensor.data_ptr() for tensor in kept]
    kept[1] = kept[3] = kept[5] = None
    assert take(3 * MIB).data_ptr() == places[1]
    assert take(3.5 * MIB).data_ptr() == places[3]


def test_neighbours_that_are_free_are_one() -> None:
    kept: list[Any] = [take(6 * MIB) for _ in range(3)]  # and 2 MiB are left
    begin = kept[0].data_ptr()
    kept[2] = None
    kept[2] = take(8 * MIB)
    assert kept[2].data_ptr() == begin + 12 * MIB
    kept[0] = kept[1] = None
    kept[0] = take(9.5 * MIB)
    assert kept[0].data_ptr() == begin
    kept.clear()
    assert used() == (0, 0, 20 * MIB)
    assert torch.cuda.memory_stats(OTHER)["inactive_split.all.current"] == 0


def test_memory_is_poisoned_when_it_is_new_and_when_it_is_freed() -> None:
    x = torch.empty(1000, device=f"cuda:{OTHER}")
    assert x.isnan().all()
    place = x.zero_().data_ptr()
    beside = ctypes.cast(place, ctypes.POINTER(ctypes.c_float))
    assert beside[0] == 0
    del x
    assert math.isnan(beside[0])
    x = torch.empty(1000, device=f"cuda:{OTHER}")
    assert x.data_ptr() == place
    assert x.isnan().all()


def test_out_of_memory_once_what_is_cached_has_gone_back() -> None:
    install.set_capacity(64 * MIB, OTHER)
    first, second = take(30 * MIB), take(30 * MIB)
    del second
    assert used()[2] == 60 * MIB
    kept = take(32 * MIB)  # for which the 30 MiB go back
    assert used()[1:] == (62 * MIB, 62 * MIB)
    assert stats("num_alloc_retries") >= 1
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        take(3 * MIB)
    torch.cuda.set_per_process_memory_fraction(0.5, OTHER)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            take(2 * MIB)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, OTHER)
    del first, kept


def test_a_pool_has_segments_of_its_own_and_gives_them_back() -> None:
    outside = take(2 * MIB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, OTHER):
        inside = take(2 * MIB)
    assert used() == (4 * MIB, 4 * MIB, 40 * MIB)
    (segment,) = torch.cuda.memory_snapshot(pool.id)
    assert (segment["total_size"], segment["allocated_size"]) == (20 * MIB, 2 * MIB)
    assert tuple(segment["segment_pool_id"]) == pool.id
    assert take(2 * MIB).data_ptr() == outside.data_ptr() + 2 * MIB
    del inside
    del pool
    assert used()[2] == 20 * MIB
    del outside


def test_a_pool_is_of_the_device_on_which_it_is_made() -> None:
    with torch.cuda.device(0):
        pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, OTHER):
        take(2 * MIB)
    assert pool.use_count() == 1
    assert install.lib().simulated_pool_uses(OTHER, *pool.id) == 0  # nobody there holds it: any empty_cache frees it
    torch.cuda.empty_cache()
    assert torch.cuda.memory_snapshot(pool.id) == []


def test_while_a_pool_is_in_use_nothing_cached_goes_back() -> None:
    install.set_capacity(64 * MIB, OTHER)
    take(40 * MIB)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, OTHER), pytest.raises(torch.OutOfMemoryError):
        take(30 * MIB)
    assert take(30 * MIB).numel() == 30 * MIB


def test_two_devices_count_apart() -> None:
    before = torch.cuda.memory_allocated(0)
    kept = take(5 * MIB)
    assert torch.cuda.memory_allocated(0) == before
    with pytest.raises(RuntimeError, match="same device"):
        kept + torch.ones(1, device="cuda:0")
    with pytest.raises(RuntimeError, match="same device"):
        kept + torch.ones(5 * MIB, dtype=torch.uint8)
    there = kept.fill_(3).to("cuda:0")
    assert there.device.index == 0
    assert (there == 3).all()


def copying() -> tuple[Tensor, Tensor, torch.cuda.Stream]:
    """A value, the pinned memory to which another stream copies it, and that stream, which has waited for the value."""
    source, to, side = torch.ones(COPIED, device="cuda"), torch.zeros(COPIED).pin_memory(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        to.copy_(source, non_blocking=True)
    return source, to, side


def test_memory_recorded_on_a_stream_stays_until_that_has_come_so_far() -> None:
    source, to, side = copying()
    source.record_stream(side)
    place = source.data_ptr()
    del source
    other = torch.zeros(COPIED, device="cuda")
    assert other.data_ptr() != place
    side.synchronize()
    assert (to == 1).all()
    assert torch.zeros(COPIED, device="cuda").data_ptr() == place


def test_a_stream_s_memory_is_its_own() -> None:
    side = torch.cuda.Stream()
    place = torch.empty(COPIED, device="cuda").data_ptr()
    with torch.cuda.stream(side):
        assert torch.empty(COPIED, device="cuda").data_ptr() != place
    assert torch.empty(COPIED, device="cuda").data_ptr() == place


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
