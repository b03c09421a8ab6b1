"""One meter of memory: what is allocated above the level at entry, seen by PyTorch's profiler.

On the CPU the meter is the running sum of the profiler's ``[memory]`` events: every allocation of PyTorch, workspaces
inside ops and what autograd saves included, repeatable to the byte. It does not see private scratch of oneDNN and MKL.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from checkmate.errors import Unsupported


@dataclass(frozen=True)
class MemoryUse:
    """What a call allocated."""

    peak: int  # the most bytes above the level at entry
    final: int  # bytes above that level when it returned
    result: Any = field(repr=False)  # what the call returned


@dataclass
class Recording:
    """Allocations in order of time, filled when the recording ends."""

    nanoseconds: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,), negative where freed
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # of record_function: name -> begin, end

    def within(self, name: str) -> np.ndarray:
        """(n,) int64: bytes above the level at the begin of a span, after each of its allocations; 0 first."""
        begin, end = self.spans[name]
        inside = (self.nanoseconds >= begin) & (self.nanoseconds <= end)
        return np.concatenate([[0], np.cumsum(self.bytes[inside])])


def measure_peak(fn: Callable[[], Any]) -> MemoryUse:
    """Call ``fn`` and measure what it allocates on the CPU, in bytes.

    Raises:
        Unsupported: if a profiler is running already.

    >>> import torch
    >>> measure_peak(lambda: torch.empty(1000).clone()).peak
    8000
    """
    with record_allocations() as recording:
        result = fn()
    levels = np.concatenate([[0], np.cumsum(recording.bytes)])
    return MemoryUse(int(levels.max()), int(levels[-1]), result)


@contextmanager
def record_allocations() -> Iterator[Recording]:
    """Record every allocation on the CPU within the block, with the spans of `torch.profiler.record_function`."""
    if torch.autograd.profiler._is_profiler_enabled:
        raise Unsupported(
            "Memory is measured with torch.profiler, which is running already. Call the compiled step once before you "
            "start a profiler: it measures its ops at the first call."
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each recording announces itself on the terminal
    recording = Recording()
    gc.collect()
    was_collecting = gc.isenabled()
    gc.disable()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    try:
        with profiler:
            yield recording
    finally:
        if was_collecting:
            gc.enable()
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    memory.sort(key=lambda event: event[0])  # stable: equal times stay in the order of recording
    recording.nanoseconds = np.array([time for time, _ in memory], dtype=np.int64)
    recording.bytes = np.array([count for _, count in memory], dtype=np.int64)
    recording.spans = {
        e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.is_user_annotation()
    }
