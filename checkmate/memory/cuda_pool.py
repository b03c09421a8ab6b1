"""A pool for a step on CUDA: one piece of the device for what the step allocates, as large as its plan needs.

PyTorch's allocator takes segments from the device and splits them, for the step and for all else alike; what others
hold in a segment is in the way of the step, and the other way round. Here a step's allocations have a pool of their own
(`torch.cuda.MemPool`), and its first segment is as large as the plan needs when the allocator splits it by best fit,
as it does. What does not fit, since the step is not as planned, gets further segments: nothing is refused, and no
address changes what is computed.

A step whose pool is in use already, by another thread or from within itself, runs without. When another step's forward
begins, it has the pool in which nothing is alive, if its first segment is large enough; else that goes back to the
device, as that of a step that is deleted does. It has run on a simulated device only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch

from checkmate.memory.arena import Lives, Phase, Run
from checkmate.memory.cuda_allocator import OWN, SEGMENT, SMALL, CudaAllocator, rounded, served

# What a user has recorded of the allocator is not copied; older versions always do.
WITHOUT_TRACES = (
    {"include_traces": False} if "include_traces" in signature(torch.cuda.memory_snapshot).parameters else {}
)
STEPS = 512  # a segment is found to this part of it, or to 2 MiB


def split(lives: Lives, segment: int) -> np.ndarray:
    """Serve blocks from one segment by best fit, as the allocator does: the smallest gap, the lowest of equal ones.

    What would leave no more than `SMALL` of its gap takes all of it. Offsets (N,) int64, -1 where there was no room.

    Args:
        lives: of the blocks; those that die at a moment are gone before others are born at it.
        segment: bytes.
    """
    key, piece = (OWN, 0), {"address": 0, "size": segment, "requested_size": 0, "state": "inactive"}
    one = {"segment_pool_id": OWN, "stream": 0, "segment_type": "large", "is_expandable": False, "address": 0}
    allocator = CudaAllocator(capacity=segment)
    allocator.add_segment({**one, "total_size": segment, "blocks": [piece]})
    offsets = np.full(len(lives.sizes), -1, dtype=np.int64)
    for i, block in served(lives, allocator, key):
        offsets[i] = -1 if block is None else block.begin
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
    segment = rounded(large.peak, SEGMENT)
    more = max(SEGMENT, rounded(segment // STEPS, SEGMENT))
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
        self._first = 0  # bytes of its first segment
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

    def hand_over(self, to: CudaPool) -> bool:
        """Let another step have the pool, if it is large enough and nothing in it is alive; whether that was so.

        So steps that take turns have one pool, and no memory goes back to the device in between.
        """
        if self._first < to.segment or not self._taken.acquire(blocking=False):
            return False
        try:
            if self._pool is None or self.allocated:
                return False
            to._pool, to._first, self._pool = self._pool, self._first, None
            return True
        finally:
            self._taken.release()

    def _segments(self) -> list[Any]:
        return [] if self._pool is None else torch.cuda.memory_snapshot(self._pool.id, **WITHOUT_TRACES)

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
                    self._pool, self._first = torch.cuda.MemPool(), self.segment
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
    if before is not None and before is not pool and not (pool._pool is None and before.hand_over(pool)):
        before.release()
    _last[pool.device] = weakref.ref(pool)
