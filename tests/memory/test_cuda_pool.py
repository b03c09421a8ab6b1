"""The pool of a step on CUDA: how large its segment must be, and, with a stand-in for the device, who is in it when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from checkmate.memory import cuda_pool
from checkmate.memory.arena import PHASES, Lives
from checkmate.memory.cuda_allocator import BLOCK, SEGMENT, SMALL
from checkmate.memory.cuda_pool import CudaPool, segment_bytes, split
from checkmate.solvers.addresses import Block, overlaps
from tests.support.bits import assert_same_bits

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


def lives(*blocks: tuple[float, int, int]) -> Lives:
    """Of (MiB, born, died)."""
    sizes, born, died = (np.array(column) for column in zip(*blocks, strict=True))
    return Lives((sizes * MIB).astype(np.int64), born, died)


def test_the_smallest_gap_that_holds_a_block_is_split() -> None:
    some = lives((8, 0, 3), (2, 1, 9), (4, 2, 4), (2, 3, 9), (2, 5, 9))
    assert (split(some, 16 * MIB) // MIB).tolist() == [0, 8, 10, 14, 10]
    assert (split(some, 12 * MIB) < 0).any()


def test_what_would_leave_little_of_a_gap_takes_all_of_it() -> None:
    some = lives((4, 0, 2), (2, 1, 9), (3.5, 2, 9), (1.5, 3, 9))
    assert (split(some, 8 * MIB) / MIB).tolist() == [0, 4, 0, 6]


def test_the_segment_of_random_lives_serves_them_without_overlap() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 60))
        born = np.sort(rng.integers(0, 40, count))
        some = Lives(rng.integers(SMALL + 1, 30 * MIB, count), born, born + rng.integers(1, 20, count))
        segment = segment_bytes(some)
        placed = split(some, segment)
        rounded = -(-some.sizes // BLOCK) * BLOCK
        blocks = [Block(*map(int, block)) for block in zip(some.born, some.died, rounded, strict=True)]
        assert not list(overlaps(blocks, placed.tolist()))
        assert some.peak <= int((placed + rounded).max()) <= segment
        assert segment % SEGMENT == 0
        assert segment == SEGMENT * -(-some.peak // SEGMENT) or (split(some, segment - SEGMENT) < 0).any()


def test_small_blocks_have_segments_of_their_own() -> None:
    some = lives((1, 0, 9), (1, 0, 9), (0.5, 1, 9), (3, 1, 9), (0.25, 2, 9))
    assert segment_bytes(some) == 4 * MIB
    assert segment_bytes(lives((1, 0, 1))) == 0


class Device:
    """What stands for `torch.cuda`: pools with a number, the segments in them, and which is in use on this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside: list[int] = []
        self.asked: list[tuple[int | None, int]] = []  # in which pool how many bytes
        self.alive: dict[int, int] = {}
        self.made = 0
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "MemPool", self.pool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.use)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(cuda_pool, "_last", {})

    def pool(self) -> Any:
        self.made += 1
        return type("Pool", (), {"id": self.made})()

    @contextmanager
    def use(self, pool: Any, device: torch.device) -> Iterator[None]:
        assert pool.id not in self.inside, "PyTorch refuses to enter a pool twice"
        self.inside.append(pool.id)
        try:
            yield
        finally:
            self.inside.remove(pool.id)

    def snapshot(self, number: int, include_traces: bool = True) -> list[dict[str, int]]:
        return [{"total_size": 4 * MIB, "allocated_size": self.alive.get(number, 0)}]

    def empty(self, size: int, **options: Any) -> None:
        self.asked.append((self.inside[-1] if self.inside else None, size))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_forward_and_backward_are_in_one_pool_whose_segment_is_taken_once(device: Device) -> None:
    pool = CudaPool(CUDA, 6 * MIB)
    forward, backward = (pool.within(phase, lambda inputs: [*device.inside, *inputs]) for phase in PHASES)
    assert [forward([7]), backward([8]), forward([9])] == [[1, 7], [1, 8], [1, 9]]
    assert device.asked == [(1, 6 * MIB)]
    assert (pool.reserved, pool.allocated, device.inside) == (4 * MIB, 0, [])


def test_a_pool_is_left_where_a_step_fails(device: Device) -> None:
    pool = CudaPool(CUDA)

    def fails(inputs: list[Any]) -> None:
        raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        pool.within("forward", fails)([])
    assert device.inside == []
    assert pool.within("forward", lambda inputs: list(device.inside))([]) == [1]


def test_within_itself_and_beside_another_thread_a_step_runs_without(device: Device) -> None:
    pool = CudaPool(CUDA)
    inner = pool.within("forward", lambda inputs: "inner")
    elsewhere: list[Any] = []

    def outer(inputs: list[Any]) -> Any:
        thread = threading.Thread(target=lambda: elsewhere.append(inner([])))
        thread.start()
        thread.join()
        return inner([])

    assert (pool.within("forward", outer)([]), elsewhere) == ("inner", ["inner"])


def test_another_step_takes_over_from_a_pool_in_which_nothing_is_alive(device: Device) -> None:
    first, second = CudaPool(CUDA), CudaPool(CUDA)

    def run(pool: CudaPool, phase: Any = "forward") -> int:
        return pool.within(phase, lambda inputs: device.inside[-1])([])

    assert [run(first), run(second), run(first)] == [1, 1, 1]
    assert (first.reserved, second.reserved) == (4 * MIB, 0)
    device.alive[1] = 5  # a gradient, or what a backward that is still to come has saved
    assert [run(second), run(first, "backward"), run(first), run(second)] == [2, 1, 1, 3]


def test_a_pool_that_is_too_small_for_the_next_step_goes_back(device: Device) -> None:
    small, large = CudaPool(CUDA, 6 * MIB), CudaPool(CUDA, 40 * MIB)
    inside = [pool.within("forward", lambda inputs: device.inside[-1])([]) for pool in (small, large, small, large)]
    assert inside == [1, 2, 2, 2]
    assert device.asked == [(1, 6 * MIB), (2, 40 * MIB)]


def test_a_segment_that_cannot_be_had_is_done_without(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(size: int, **options: Any) -> None:
        raise torch.OutOfMemoryError("no piece as large")

    monkeypatch.setattr(torch, "empty", out_of_memory)
    assert CudaPool(CUDA, 6 * MIB).within("forward", lambda inputs: "done")([]) == "done"


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device")
def test_a_pool_is_of_its_own_device_whichever_is_current() -> None:
    pool = CudaPool(torch.device("cuda", 1), 32 * MIB)
    with torch.cuda.device(0):
        kept = pool.within("forward", lambda inputs: torch.ones(5 * MIB, device="cuda:1"))([])
        assert pool._pool.use_count() == 1  # what the device counts, after the step has left it
        torch.cuda.empty_cache()
    assert (pool.reserved, pool.allocated) == (32 * MIB, 20 * MIB)
    del kept
    assert pool.release()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_is_cached_makes_room_for_a_pool() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 48 * MIB) / total, device)
    try:
        torch.empty(40 * MIB, dtype=torch.uint8, device=device)  # freed, and cached
        pool = CudaPool(device, 32 * MIB)
        pool.within("forward", lambda inputs: None)([])
        assert pool.reserved == 32 * MIB
        assert pool.release()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_that_take_turns_take_nothing_more_of_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pools = [CudaPool(device, size * MIB) for size in (64, 48)]

    def turn() -> None:
        for pool in pools:
            pool.within("forward", lambda inputs: torch.empty(5 * MIB, device=device).sum() and None)([])

    def asked() -> list[int]:
        return [torch.cuda.memory_stats(device)[f"num_device_{what}"] for what in ("alloc", "free")]

    turn()
    before = asked()
    turn()
    turn()
    assert asked() == before
    assert [pool.release() for pool in pools] == [True, True]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_a_step_allocates_on_cuda_is_in_its_pool() -> None:
    pool = CudaPool(torch.device("cuda", torch.cuda.current_device()), 32 * MIB)
    elsewhere = torch.ones(5 * MIB, device="cuda")
    kept = pool.within("forward", lambda inputs: (inputs[0] + 1).mul(2))([elsewhere])
    assert pool.reserved == (32 + 20) * MIB  # 20 MiB twice: the second does not fit beside the first
    assert pool.allocated == 20 * MIB
    assert not pool.release()
    assert_same_bits(kept, torch.full_like(kept, 4.0))
    del kept
    assert pool.release()
    assert pool.reserved == 0
