"""Memory of the machine that this process holds: the figures that Linux has of it, not those of PyTorch."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

from torch import nn

STEPS, WARM = 10, 4


def status(name: str) -> int:
    """Bytes, of this process: a line of /proc/self/status, such as VmRSS (resident) or VmData (private, writable)."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def give_back() -> None:
    """Collect garbage, and have malloc return what it keeps."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def warm_up(one: Callable[[], object]) -> None:
    """Run some steps."""
    for _ in range(WARM):
        one()


def growth(module: nn.Module, one: Callable[[], object], let_go: Callable[[], object] = lambda: None) -> int:
    """Bytes by which the peak resident set grows over some steps, from no gradients.

    Args:
        module: what is trained.
        one: a step of it.
        let_go: called before the measurement; whatever holds memory from one step to the next gives it back.
    """
    warm_up(one)
    module.zero_grad()
    let_go()
    give_back()
    return most_above(status("VmRSS"), one)


def most_above(level: int, one: Callable[[], object]) -> int:
    """Bytes by which the peak of the resident set over some steps is above a level."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    for _ in range(STEPS):
        one()
    return status("VmHWM") - level
