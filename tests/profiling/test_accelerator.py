"""Seconds and bytes of an op on an accelerator, by a device whose clock and allocator are set by hand."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from checkmate.profiling import measure

ELSEWHERE = torch.device("meta")


class Clock:
    """A device's milliseconds, and its events."""

    now = 0.0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        self.at: float | None = None

    def record(self) -> None:
        self.at = Clock.now

    def elapsed_time(self, end: Clock) -> float:
        assert self.at is not None, "the event was not recorded"
        assert end.at is not None, "the event was not recorded"
        return end.at - self.at


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.now = 0.0
    monkeypatch.setattr(torch, "Event", Clock)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(measure, "kind_of", lambda device: SimpleNamespace(cache_bytes=lambda of: 4, block_bytes=512))


def test_seconds_are_those_between_the_events_around_a_run() -> None:
    runs = 0

    def run() -> None:
        nonlocal runs
        runs += 1
        Clock.now += 2.0

    assert measure.time_on_accelerator(run, torch.device("cpu")) == 2e-3
    assert runs >= measure.REPEATS
    assert runs % measure.REPEATS == 0


@pytest.mark.parametrize(("asked", "expected"), [(600, 1024), (700, 700 + 512)])
def test_tensors_of_the_device_are_rounded_to_blocks_each(
    asked: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op returns 600 bytes there and 100 on the CPU; 2,048 were given, in one block of the allocator."""
    names = {"allocated_bytes": 2048, "requested_bytes": asked, "allocation": 1}
    before = {f"{name}.all.current": 0 for name in names}
    peak = {f"{name}.all.peak": value for name, value in names.items()}
    stats = iter([before, peak])
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: next(stats))

    def run() -> list[torch.Tensor]:
        return [torch.empty(600, dtype=torch.uint8, device=ELSEWHERE), torch.empty(100, dtype=torch.uint8)]

    assert measure.allocated_bytes(run, ELSEWHERE) == expected


def test_workspaces_that_libraries_take_once_in_each_thread_are_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = threading.local()

    def run() -> None:
        warm.has_run = True

    def allocated(run: Any, device: torch.device) -> int:
        taken = 50 if hasattr(warm, "has_run") else 100
        run()
        return taken

    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(measure, "call_of", lambda node: run)
    monkeypatch.setattr(measure, "ways_of", lambda node, run, count: {})
    monkeypatch.setattr(measure, "allocated_bytes", allocated)
    monkeypatch.setattr(measure, "time_on_accelerator", lambda run, device: 1.0)
    node = fx.Graph().call_function(torch.ops.aten.relu.default)
    node.meta["val"] = torch.empty(1)
    with ThreadPoolExecutor(1) as autograds:
        monkeypatch.setattr(measure, "in_autograds_thread", lambda device, call: autograds.submit(call).result())
        assert measure._measure_on_accelerator(node, None).allocated_bytes == 50
