"""Measure memory: the bytes that a call allocates above the level at entry, on the CPU or an accelerator.

On the CPU the meter is the running sum of the profiler's ``[memory]`` events: every allocation of PyTorch, workspaces
inside ops and what autograd saves included, repeatable to the byte. It does not see private scratch of oneDNN and MKL.
Where somebody else's profiler runs, that of PyTorch's which belongs to a thread records another thread (`aside`).
On CUDA and other accelerators it is the peak of the bytes that were asked for, which PyTorch's allocator counts itself;
those of the blocks that it gave for them, and those that it holds of the device, in use or not, are told beside it.

`trim` gives back to the machine what malloc keeps of freed memory, which it does only when it is asked to.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.autograd import ProfilerConfig, ProfilerState
from torch.profiler import ProfilerActivity, profile

from checkmate.devices import REQUESTED, is_known, requested
from checkmate.errors import Unsupported
from checkmate.memory.cuda_allocator import DeviceState
from checkmate.torch_internals.running import _autograd, _profiler, autograd_profiler

CPU = torch.device("cpu")
YOUNG = 1  # generation of garbage
SELDOM = (50_000, 20, 1_000)  # `gc.set_threshold`
T = TypeVar("T")


@dataclass(frozen=True)
class MemoryUse:
    """The memory use of a call."""

    peak: int  # the most bytes above the level at entry
    final: int  # bytes above that level when it returned
    result: Any = field(repr=False)  # of the call
    device: torch.device = CPU  # where they were counted
    before: int | None = None  # bytes that were asked for at entry; None on the CPU, where PyTorch keeps no count
    allocated: int | None = None  # the most bytes of blocks that the allocator gave; None on the CPU
    reserved: int | None = None  # the most bytes that the allocator held of the device; None on the CPU
    began: DeviceState | None = field(default=None, repr=False)  # of its allocator at entry; None: it is not known


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


def measure_peak(fn: Callable[[], Any], device: torch.device | str = CPU) -> MemoryUse:
    """Call ``fn`` and measure its allocations on a device.

    On CUDA, and other accelerators, ``before + peak`` is the most that was asked for at a time (``requested_bytes`` of
    `torch.accelerator.memory_stats`). The allocator gives blocks for it, ``allocated`` at their peak: multiples of 512
    bytes, and for a tensor above 1 MiB up to 1 MiB more than asked for, by what was freed before, unless it runs with
    ``expandable_segments:True``. What it has cached goes back to the device before the call, and its peaks are reset.

    On the CPU it counts what this thread and its backward allocate and free. That a thread of another library frees
    something is not seen: the buffers that DistributedDataParallel sends with gloo ahead of a forward may count as if
    they stayed, in ``peak`` and in ``final``, in some runs and not in others.

    Raises:
        Unsupported: on the CPU, if a profiler is running in this thread; for another kind of device.

    >>> import torch
    >>> measure_peak(lambda: torch.empty(1000).clone()).peak
    8000
    >>> x = torch.randn(64, 64, requires_grad=True)
    >>> use = measure_peak(lambda: (x * x).sum().backward())  # on a GPU: measure_peak(..., device="cuda")
    >>> use.final == x.grad.nbytes, use.reserved
    (True, None)
    """
    device = torch.device(device)
    if not is_known(device):
        raise Unsupported(f"Memory is measured on the CPU and on CUDA devices, not on {device}.")
    if device.type != "cpu":
        return _measure_by_allocator(fn, device)
    # Free no present garbage, even by ``gc.collect()``: that would hide allocations. It is put aside; only the young is
    # collected first, as to look through all objects of a large program takes half a second.
    gc.collect(YOUNG)
    due = gc.get_count()[-1]
    gc.freeze()
    try:
        with record_allocations() as recording:
            result = fn()
    finally:
        gc.unfreeze()
        # Freezing forgets how long the old was not collected: where each length is measured, it never would be again.
        for _ in range(due):
            gc.collect(YOUNG)
    levels = np.concatenate([[0], np.cumsum(recording.bytes)])
    return MemoryUse(int(levels.max()), int(levels[-1]), result)


def _measure_by_allocator(fn: Callable[[], Any], device: torch.device) -> MemoryUse:
    gc.collect()  # garbage in cycles does not count as allocated before
    with _no_collection():
        torch.accelerator.empty_cache()  # which waits for other streams that still use what was let go of
        if torch.accelerator.memory_stats(device):  # none before the first tensor: then PyTorch 2.11 refuses to reset
            torch.accelerator.reset_peak_memory_stats(device)
        before = requested(device)
        began = DeviceState.now(device) if device.type == "cuda" else None
        result = fn()
        torch.accelerator.synchronize(device)
        stats = torch.accelerator.memory_stats(device)
        return MemoryUse(
            peak=stats[f"{REQUESTED}.peak"] - before,
            final=stats[f"{REQUESTED}.current"] - before,
            result=result,
            device=device,
            before=before,
            allocated=stats["allocated_bytes.all.peak"],
            reserved=stats["reserved_bytes.all.peak"],
            began=began,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Within the block, collect no garbage: its frees would hide allocations."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collect garbage seldom within the block, which makes millions of lasting objects: it took a tenth of the time."""
    before = gc.get_threshold()
    if before[0]:  # else it is turned off
        gc.set_threshold(*map(max, before, SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def aside(fn: Callable[[], T]) -> T:
    """Call ``fn`` where allocations can be recorded: in its own thread if a profiler runs in this one.

    Gradients are on or off in that thread as in this; modes and autocast are not taken along.

    >>> with torch.profiler.profile():
    ...     aside(lambda: measure_peak(lambda: torch.empty(1000)).peak)
    4000
    """
    if not _autograd._profiler_enabled():
        return fn()
    with_gradients = torch.is_grad_enabled()

    def run() -> T:
        with torch.set_grad_enabled(with_gradients):
            return fn()

    with ThreadPoolExecutor(1, "checkmate-measure") as pool:
        return pool.submit(run).result()


@contextmanager
def record_allocations() -> Iterator[Recording]:
    """Record every CPU allocation within the block, with the spans of `torch.profiler.record_function`.

    No garbage is collected within it, unless it is asked for.

    Raises:
        Unsupported: if a profiler is running in this thread (`aside` calls what records in another).
    """
    if _autograd._profiler_enabled():
        raise Unsupported(
            "Memory is measured with torch.profiler, which is running already. Measure it before you start a profiler."
        )
    by = _by_thread if autograd_profiler._is_profiler_enabled else _by_process
    recording, allocations = Recording(), list[tuple[int, int]]()
    with _no_collection(), by(allocations, recording.spans):
        yield recording
    rows = np.array(allocations, dtype=np.int64).reshape(-1, 2)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]  # equal times stay in the order of recording
    recording.nanoseconds, recording.bytes = rows.T


@contextmanager
def _by_process(allocations: list[tuple[int, int]], spans: dict[str, tuple[int, int]]) -> Iterator[None]:
    """Times and bytes of allocations, and spans, by PyTorch's profiler, which runs once per process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each recording announces itself on the terminal
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        yield
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    allocations += ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans |= {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.is_user_annotation()}


@contextmanager
def _by_thread(allocations: list[tuple[int, int]], spans: dict[str, tuple[int, int]]) -> Iterator[None]:
    """Times and bytes by PyTorch's profiler of one thread, which may run beside another profiler."""
    experimental = _profiler._ExperimentalConfig()
    only_memory = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, experimental)
    _autograd._enable_profiler_legacy(only_memory)
    try:
        yield
    finally:
        threads = _autograd._disable_profiler_legacy()
    (begin,) = (event for thread in threads for event in thread if event.name() == "__start_profile")
    for thread in threads:
        opened: list[tuple[str, int]] = []
        for event in thread:
            now = round(1000 * begin.cpu_elapsed_us(event))
            if event.kind() == "memory_alloc":
                allocations.append((now, event.cpu_memory_usage()))
            elif event.kind() == "push":
                opened.append((event.name(), now))
            elif event.kind() == "pop" and opened:
                name, began = opened.pop()
                spans[name] = began, now


def trim() -> bool:
    """Make glibc's malloc return all unused pages; tell whether there were any. Elsewhere False.

    Measuring ops and tracing free hundreds of megabytes, which malloc keeps between the blocks that live on.

    >>> trim() in (True, False)
    True
    """
    try:
        give_back = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another libc, another system
        return False
    return bool(give_back(ctypes.c_size_t(0)))
