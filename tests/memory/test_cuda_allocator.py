"""The allocator's rules in Python against the simulated device's, in C++: the same bytes after each event."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkmate.memory.cuda_allocator import BLOCK, CudaAllocator, DeviceState, Used, replay, replay_steps
from checkmate.memory.lives import Lives
from tests.support.simulated_cuda import install

MIB = 1 << 20
OTHER = torch.device("cuda", 1)  # which no other test uses

simulated = pytest.mark.skipif(not install.is_installed(), reason="addresses are those of the simulated CUDA device")
sizes = st.one_of(
    st.sampled_from([1, BLOCK, BLOCK + 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 2 * MIB, 3 * MIB]),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 45 * MIB),
)
events = st.lists(
    st.one_of(st.tuples(st.just("take"), sizes), st.tuples(st.just("free"), st.integers(0, 99)), st.just(("empty", 0))),
    max_size=60,
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    gc.collect()
    with torch.cuda.device(OTHER):
        torch.cuda.empty_cache()
        capacity = torch.cuda.get_device_properties(OTHER).total_memory
        yield OTHER
        install.set_option("expandable", False)
        install.set_option("poison", True)
        install.set_capacity(capacity, 1)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(OTHER) == 0


def take(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=OTHER)


def on_device() -> Used:
    return Used(torch.cuda.memory_allocated(OTHER), torch.cuda.memory_reserved(OTHER))


@pytest.mark.cuda
@simulated
@pytest.mark.parametrize("expandable", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=events, then=events)
def test_each_event_leaves_the_bytes_of_the_simulated_device(
    device: torch.device, expandable: bool, before: Any, then: Any
) -> None:
    """From whatever state the allocator is in, as far as a snapshot tells it.

    The first block of each pool stays: of an expandable segment whose first addresses have no memory, a snapshot does
    not say where they begin.
    """
    install.set_option("expandable", expandable)
    install.set_option("poison", False)
    there: list[Tensor] = []
    first = [take(BLOCK), take(2 * MIB)]
    for kind, number in before:
        if kind == "take":
            there.append(take(number))
        elif kind == "free" and there:
            del there[number % len(there)]
        elif kind == "empty":
            torch.cuda.empty_cache()
    state, both = DeviceState.now(device), list[tuple[Tensor, Any]]()
    follows = state.allocator
    assert Used(follows.allocated, follows.reserved) == on_device()
    torch.cuda.reset_peak_memory_stats(device)
    follows.reset_peaks()
    for kind, number in then:
        if kind == "take":
            both.append((take(number), follows.take(number)))
        elif kind == "free" and both:
            tensor, block = both.pop(number % len(both))
            del tensor
            follows.free(block)
        elif kind == "empty":
            torch.cuda.empty_cache()
            follows.empty_cache()
        assert Used(follows.allocated, follows.reserved) == on_device()
    assert follows.peaks == Used(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    both.clear()
    there.clear()
    first.clear()
    torch.cuda.empty_cache()


def lives(*blocks: tuple[float, int, int]) -> Lives:
    """Of (MiB, born, died)."""
    sizes, born, died = (np.array(column) for column in zip(*blocks, strict=True))
    return Lives((sizes * MIB).astype(np.int64), born, died)


def test_blocks_and_segments() -> None:
    """As the simulated device has them: tests/support/simulated_cuda/test_allocator.py."""
    for nbytes, *taken in (
        *((1, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB)),
        *((10 * MIB - 512, 10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB, 10 * MIB)),
        *((11 * MIB, 12 * MIB, 12 * MIB), (33 * MIB - 5, 34 * MIB, 34 * MIB)),
    ):
        allocator = CudaAllocator()
        block = allocator.take(nbytes)
        assert [allocator.allocated, allocator.reserved] == taken
        allocator.free(block)
        allocator.empty_cache()
        assert (allocator.allocated, allocator.reserved) == (0, 0)
        assert [*allocator.peaks] == taken


def test_a_replay_ends_with_nothing_in_use_and_the_next_step_finds_what_is_cached() -> None:
    some, allocator = lives((4, 0, 2), (2, 1, 9), (3.5, 2, 9), (12, 3, 4)), CudaAllocator()
    assert replay(some, allocator) == (18 * MIB, 20 * MIB)
    assert (allocator.allocated, allocator.reserved) == (0, 20 * MIB)
    assert replay_steps(some, allocator) == (18 * MIB, 20 * MIB)
    assert replay(some, CudaAllocator(expandable=True)).allocated == int(17.5 * MIB)


def test_where_the_device_has_no_room_what_is_cached_goes_back_first() -> None:
    allocator = CudaAllocator(capacity=64 * MIB)
    first = allocator.take(30 * MIB)
    allocator.free(allocator.take(30 * MIB))
    allocator.take(32 * MIB)
    assert allocator.reserved == 62 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="are not to be had"):
        allocator.take(3 * MIB)
    allocator.free(first)
    with pytest.raises(torch.OutOfMemoryError):
        replay(lives((40, 0, 1)), allocator)
