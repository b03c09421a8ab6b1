"""Replay a plan from the present state of a CUDA device: the bytes its allocator gives and holds."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from checkmate.memory.cuda_allocator import IN_USE, Block, CudaAllocator, PoolKey, Used
from checkmate.memory.lives import Lives
from checkmate.torch_internals.kernels import _snapshot

STEPS = 4  # that are replayed at most, until one leaves the allocator as the one before did


@dataclass(frozen=True)
class DeviceState:
    """A snapshot of PyTorch's allocator on a device, and its settings."""

    segments: tuple[dict[str, Any], ...] = ()  # as `torch.cuda.memory_snapshot` lists them, by address
    expandable: bool = False  # it runs with ``expandable_segments:True``
    capacity: float = math.inf  # bytes that it can have of the device in all
    stream: int = 0  # on which the step runs

    @classmethod
    def now(cls, device: torch.device) -> DeviceState | None:
        """The state of a CUDA device; None where settings have its allocator go by other rules than those here.

        Nothing may be under way that uses memory on another stream than its own.
        """
        if torch.cuda.get_allocator_backend() != "native":
            return None
        found = _snapshot()
        settings = found["allocator_settings"]
        others = settings.get("max_split_size", -1) != -1, settings.get("garbage_collection_threshold", 0) != 0
        if any((*others, *settings.get("roundup_power2_divisions", {}).values())):
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        segments = [segment for segment in found["segments"] if segment["device"] == index]
        free, _ = torch.cuda.mem_get_info(device)
        return cls(
            tuple(sorted(segments, key=lambda segment: segment["address"])),
            bool(settings.get("expandable_segments")),
            free + sum(segment["total_size"] for segment in segments),
            torch.cuda.current_stream(device).cuda_stream,
        )

    @property
    def asked(self) -> list[int]:
        """Bytes of each block in use, as they were asked for."""
        blocks = (block for segment in self.segments for block in segment["blocks"])
        return [block["requested_size"] for block in blocks if block["state"] == IN_USE]

    @property
    def allocator(self) -> CudaAllocator:
        """An allocator in this state."""
        allocator = CudaAllocator(expandable=self.expandable, capacity=self.capacity)
        for segment in self.segments:
            allocator.add_segment(segment)
        return allocator

    @property
    def expanding(self) -> CudaAllocator:
        """An allocator with expandable segments and the blocks in use here."""
        allocator = CudaAllocator(expandable=True, capacity=self.capacity)
        for size in self.asked:
            allocator.take(size, self.key)
        return allocator

    @property
    def key(self) -> PoolKey:
        """The pools of the step's stream."""
        return (0, 0), self.stream


def replay(lives: Lives, allocator: CudaAllocator, key: PoolKey = ((0, 0), 0)) -> Used:
    """The most bytes that an allocator gives and holds, from now on, while blocks are allocated and freed.

    Blocks that die at a moment are gone before others are born at it; all are let go of in the end.

    Raises:
        torch.OutOfMemoryError: if the device has no room.

    >>> mib = 1 << 20
    >>> lives = Lives(np.array([4, 3, 3]) * mib, born=np.array([0, 1, 2]), died=np.array([2, 3, 4]))
    >>> used = replay(lives, CudaAllocator())
    >>> used.allocated // mib, used.reserved // mib  # the last gets the 4 MiB of the first
    (7, 20)
    """
    allocator.reset_peaks()
    held: list[tuple[int, Block]] = []  # when it dies; sorted
    sizes, born, died = (array.tolist() for array in (lives.sizes, lives.born, lives.died))
    for i in np.argsort(lives.born, kind="stable").tolist():
        while held and held[0][0] <= born[i]:
            allocator.free(held.pop(0)[1])
        if sizes[i]:
            insort(held, (died[i], allocator.take(sizes[i], key)), key=itemgetter(0))
    for _, block in held:
        allocator.free(block)
    return allocator.peaks


def replay_steps(lives: Lives, allocator: CudaAllocator, key: PoolKey = ((0, 0), 0)) -> Used:
    """Replay several steps, each of which frees its leftovers before the next one begins."""
    allocated = reserved = 0
    for _ in range(STEPS):
        before = allocator.state
        used = replay(lives, allocator, key)
        allocated, reserved = max(allocated, used.allocated), max(reserved, used.reserved)
        if allocator.state == before:
            break
    return Used(allocated, reserved)
