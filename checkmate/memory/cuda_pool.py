"""A pool for a step on CUDA: one piece of the device for what the step allocates, as large as its plan needs.

PyTorch's allocator takes segments from the device and splits them, for the step and for all else alike; what others
hold in a segment is in the way of the step, and the other way round. Here a step's allocations have a pool of their own
(`torch.cuda.MemPool`), and its first segment is as large as the plan needs when the allocator splits it by best fit,
as it does. What does not fit, since the step is not as planned, gets further segments: nothing is refused, and no
address changes what is computed.

A step whose pool is in use already, by another thread or from within itself, runs without. When another step's forward
begins, a pool in which nothing is alive goes back to the device; so does that of a step that is deleted. It has run
on a simulated device only.
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from checkmate.memory.arena import Lives, Phase, Run

BLOCK = 512  # bytes: sizes are multiples of it (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)
SMALL = 1 << 20  # up to this size blocks have segments of their own (kSmallSize)
SEGMENT = 2 << 20  # bytes of one of these, and the unit of large ones (kSmallBuffer, kRoundLarge)

STEPS = 512  # a segment is found to this part of it, or to 2 MiB


def split(lives: Lives, segment: int) -> np.ndarray:
    """Serve blocks from one segment by best fit, as the allocator does: the smallest gap, the lowest of equal ones.

    What would leave no more than `SMALL` of its gap takes all of it. Offsets (N,) int64, -1 where there was no room.

    Args:
        lives: of the blocks; those that die at a moment are gone before others are born at it.
        segment: bytes.
    """
    gaps = [(segment, 0)]  # size and begin, sorted
    offsets = np.full(len(lives.sizes), -1, dtype=np.int64)
    ends: list[tuple[int, int, int]] = []  # when, begin, size
    for i in np.argsort(lives.born, kind="stable").tolist():
        while ends and ends[0][0] <= lives.born[i]:
            _, begin, size = ends.pop(0)
            _release(gaps, begin, size)
        need = _rounded(int(lives.sizes[i]), BLOCK)
        found = next((gap for gap in gaps if gap[0] >= need), None)
        if found is None:
            continue
        gaps.remove(found)
        size, begin = found
        if size - need > SMALL:
            insort(gaps, (size - need, begin + need))
            size = need
        offsets[i] = begin
        insort(ends, (int(lives.died[i]), begin, size))
    return offsets


def segment_bytes(lives: Lives) -> int:
    """The smallest segment found that serves all blocks above `SMALL`; 0 where there are none.

    >>> mib = 1 << 20
    >>> lives = Lives(np.array([4, 4, 6]) * mib, born=np.array([0, 1, 2]), died=np.array([2, 3, 4]))
    >>> segment_bytes(lives) // mib, lives.peak // mib  # 6 do not fit where 4 were
    (14, 10)
    """
    above = lives.sizes > SMALL
    large = Lives(lives.sizes[above], lives.born[above], lives.died[above])
    if not len(large.sizes):
        return 0
    segment = _rounded(large.peak, SEGMENT)
    more = max(SEGMENT, _rounded(segment // STEPS, SEGMENT))
    while (split(large, segment) < 0).any():
        segment += more
    return segment


class CudaPool:
    """What one captured step allocates from on a CUDA device.

    Args:
        device: of the step.
        segment: bytes of the first segment, by `segment_bytes`; 0: segments are taken as they are needed.
    """

    def __init__(self, device: torch.device, segment: int = 0) -> None:
        self.device, self.segment = device, segment
        self._pool: Any = None
        self._taken = threading.Lock()  # while the pool is in use

    def within(self, phase: Phase, run: Run) -> Run:
        """A function of one list whose allocations, while it runs on its thread, are the pool's.

        A backward on CUDA runs on a thread of autograd's, and this with it: a pool serves the thread that is in it.
        """

        def inside(inputs: list[Any]) -> Any:
            with self._entered(phase):
                return run(inputs)

        return inside

    @property
    def reserved(self) -> int:
        """Bytes of the device that the pool has now."""
        return sum(segment["total_size"] for segment in self._segments())

    @property
    def allocated(self) -> int:
        """Bytes in it that are alive now."""
        return sum(segment["allocated_size"] for segment in self._segments())

    def release(self) -> bool:
        """Give the pool back to the device, if nothing in it is alive and no step is in it; whether that was so."""
        if not self._taken.acquire(blocking=False):
            return False
        try:
            if self.allocated:
                return False  # its segments would stay all the same, and a backward may be about to go on in them
            self._pool = None
            return True
        finally:
            self._taken.release()

    def _segments(self) -> list[Any]:
        return [] if self._pool is None else torch.cuda.memory_snapshot(self._pool.id)

    @contextmanager
    def _entered(self, phase: Phase) -> Iterator[None]:
        if not self._taken.acquire(blocking=False):
            yield
            return
        try:
            if phase == "forward":
                _take_over(self)
            new = self._pool is None
            if new:
                if self.segment:
                    torch.cuda.empty_cache()  # within a pool, no memory that is cached outside makes room for it
                with torch.cuda.device(self.device):  # a pool is of the device that is current
                    self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool, self.device):
                if new and self.segment:
                    self._reserve()
                yield
        finally:
            self._taken.release()

    def _reserve(self) -> None:
        """Have the pool take its first segment: what is allocated and freed is there to be split.

        For a moment these bytes count as allocated: in the first step the peak is that of the segment, not of the plan.
        """
        try:
            torch.empty(self.segment, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return  # in one piece it cannot be had; the step may still find its bytes in several


_last: dict[torch.device, Callable[[], CudaPool | None]] = {}  # whose forward ran last


def _take_over(pool: CudaPool) -> None:
    before = _last.get(pool.device, lambda: None)()
    if before is not None and before is not pool:
        before.release()
    _last[pool.device] = weakref.ref(pool)


def _release(gaps: list[tuple[int, int]], begin: int, size: int) -> None:
    """Add a gap, as one with those that it touches."""
    for gap in [gap for gap in gaps if gap[1] + gap[0] == begin or begin + size == gap[1]]:
        gaps.remove(gap)
        begin, size = min(begin, gap[1]), size + gap[0]
    insort(gaps, (size, begin))


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
