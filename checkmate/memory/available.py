"""The memory that a step can have on its device, in bytes: free memory and its own, less a margin.

An accelerator tells how much of its memory is free; what PyTorch's allocator has taken of it already is this process's
own. On the CPU it is the least that any of these still gives: the machine, the control groups (cgroups) that this
process is in with those above them, and its own limits (``ulimit``); and on top of that what the step holds already.

**The margin**, which is left of that, is for what no plan counts:

- On an accelerator a sixteenth of the memory, `LEAST_MARGIN` at least: kernels that are loaded when they first run, the
  workspaces of vendor libraries, and gaps between the blocks of PyTorch's allocator.
- On the CPU `SCRATCH` first: what oneDNN and MKL keep for themselves, the stacks of threads, the captures of further
  shapes, a process that goes on planning. Of the rest a step may take the `ROOM`-th part where an arena serves it, as
  the mapping of its first step is so many times as large as the plan; and half where malloc does, which keeps as much
  between live pieces again.

Trials and measurements can need more than the step: `within_memory` goes on without where memory runs out in them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from checkmate.devices import kind_of
from checkmate.errors import BudgetError, HostError
from checkmate.memory.arena import ROOM
from checkmate.units import format_bytes

log = logging.getLogger("checkmate.memory")
T = TypeVar("T")

LEAST_MARGIN = 256 << 20  # bytes of an accelerator
SHARE = 1 / 16  # of an accelerator's memory
SCRATCH = 256 << 20  # bytes on the CPU, outside of the step
BY_MALLOC = 2.0  # times the bytes of a plan: what a process takes by PyTorch's allocator
SHARE_THERE = 0.9  # of what a second memory has free, for a step
STEPS = 64  # from one power of two to the next: what is found is rounded down to one of these
NO_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")  # in what the CPU, other devices and libraries say
_CACHED = ("inactive_file", "active_file")  # which the kernel lets go of where memory is asked for, unless it is mapped


@dataclass(frozen=True)
class Limit:
    """A memory limit of a process."""

    of: str  # the limit in words
    total: int  # bytes
    free: int  # bytes that nobody holds
    shared: bool = True  # with other processes


@dataclass(frozen=True)
class Available:
    """The memory that a step can have."""

    limit: Limit  # the one that leaves least
    held: int  # bytes that the step, or PyTorch's allocator on an accelerator, holds already
    margin: int  # bytes that are left

    @property
    def bytes(self) -> int:
        """The largest budget."""
        return max(0, self.limit.free + self.held - self.margin)

    def __str__(self) -> str:
        others = self.limit.total - self.limit.free - self.held
        total, taken, margin = map(format_bytes, (self.limit.total, max(0, others), self.margin))
        return f"{self.limit.of} has {total}, {taken} of it are held by others, and {margin} are left as a margin"


def available(device: torch.device, held: int, *, in_arena: bool = True, sharing: int = 1) -> Available:
    """Find the memory for a step on a device.

    Args:
        held: bytes of the step's tensors that are in memory already; on an accelerator the allocator knows it.
        in_arena: what the step allocates on the CPU comes from an arena.
        sharing: processes that train together on this machine, each with an equal part of what it gives.

    Raises:
        BudgetError: if the device does not say what it has.

    >>> found = available(torch.device("cpu"), held=1000)
    >>> 0 <= found.bytes < found.limit.total
    True
    """
    if device.type != "cpu":
        try:
            free, total = kind_of(device).free_bytes(device)
            held = torch.accelerator.memory_reserved(device)
        except (RuntimeError, AttributeError) as error:
            raise _does_not_say(str(device)) from error
        return Available(Limit(str(device), total, free), held, max(LEAST_MARGIN, int(SHARE * total)))
    parts = [limit if not limit.shared else Limit(limit.of, limit.total, limit.free // sharing) for limit in limits()]
    if not parts:
        raise _does_not_say("This machine")
    least = min(parts, key=lambda limit: limit.free)
    usable = max(0, least.free - SCRATCH) / (ROOM if in_arena else BY_MALLOC)
    return Available(least, held, least.free - int(usable))


def rounded_down(count: int) -> int:
    """Round down so that small changes in free memory give the same number, and plans are found again.

    >>> rounded_down(1_000_000), rounded_down(1_005_000), rounded_down(100)
    (999424, 999424, 100)
    """
    step = max(1, (1 << max(0, count.bit_length() - 1)) // STEPS)
    return count // step * step


def free_there(where: str) -> int:
    """Bytes of a second memory for who names none: nine tenths of what its disk or the RAM has free, rounded down.

    Raises:
        HostError: if there is no such folder.

    >>> 0 < free_there("file:") < shutil.disk_usage(tempfile.gettempdir()).total
    True
    """
    _, colon, folder = where.partition(":")
    folder = folder or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(folder).free if colon else min((limit.free for limit in limits()), default=0)
    except OSError as error:
        raise HostError(f"No file can be made in {folder}: {error.strerror}. Name another folder.") from error
    return rounded_down(int(SHARE_THERE * free))


def limits(root: Path = Path("/")) -> Iterator[Limit]:
    """The limits of this process on the CPU, from ``proc`` and ``sys`` in a folder; empty if these do not say."""
    meminfo = _table(root / "proc/meminfo", 1024)
    if "MemAvailable" in meminfo:
        yield Limit("this machine", meminfo["MemTotal"], meminfo["MemAvailable"])
    else:
        with suppress(AttributeError, ValueError, OSError):  # the system may not even say how much is installed
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            yield Limit("this machine, of which half is taken to be free,", total, total // 2)
    # The limits of its control groups and those above them, of version 1 or 2.
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, prefix = root / "sys/fs/cgroup", ""
            most, current = ["memory.max", "memory.high"], "memory.current"
        elif "memory" in controllers.split(","):
            top, prefix = root / "sys/fs/cgroup/memory", "total_"  # with the groups below it
            most, current = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
        else:
            continue
        inner = top.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        for folder in (inner, *inner.parents):  # a container may see its own group as the top one
            stat = _table(folder / "memory.stat")
            mapped = stat.get(f"{prefix}mapped_file", stat.get("file_mapped", 0))
            cached = max(0, sum(stat.get(f"{prefix}{name}", 0) for name in _CACHED) - mapped)
            for name in most:
                limit, used = _text(folder / name).strip(), _text(folder / current).strip()
                if limit.isdecimal() and used.isdecimal():
                    group = f"the control group {folder.relative_to(top).as_posix()} ({name})"
                    yield Limit(group, int(limit), max(0, int(limit) - max(0, int(used) - cached)))
            if folder == top:
                break
    # The limits of this process alone, on its mappings.
    if status := _table(root / "proc/self/status", 1024):
        import resource  # which there is where there is /proc

        for name, mapped_as in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
            least, _ = resource.getrlimit(getattr(resource, name))
            if least != resource.RLIM_INFINITY:
                yield Limit(f"this process ({name})", least, max(0, least - status[mapped_as]), shared=False)


def _table(file: Path, unit: int = 1) -> dict[str, int]:
    pairs = re.findall(r"^(\w+):?\s+(\d+)", _text(file), re.MULTILINE)
    return {name: int(number) * unit for name, number in pairs}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # there is none
        return ""


def _does_not_say(name: str) -> BudgetError:
    return BudgetError(f"{name} does not say how much memory is free: name the bytes, such as budget='8 GB'.")


def within_memory(run: Callable[[], T], what: str, instead: str) -> list[T]:
    """Run a call and return its result in a list; the list is empty if memory ran out, and its tensors are freed.

    The log then says once in a process ``what`` runs, and what happens ``instead``.

    >>> within_memory(lambda: len(torch.empty(8)), "a few numbers", "there are none")
    [8]
    >>> within_memory(lambda: torch.empty(2**60), "too many numbers", "there are none")
    []
    """
    try:
        return [run()]
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
    _warn(what, instead)
    return []


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device, a library on it or the host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


@cache
def _warn(name: str, instead: str) -> None:
    log.warning("%s: too large for the memory that is free, so %s", name, instead)
