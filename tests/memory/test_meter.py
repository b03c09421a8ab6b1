"""The meter sees every byte; and what malloc keeps of freed memory is given back, before a step first runs."""

from __future__ import annotations

import gc
import platform
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import checkmate
from benchmarks.common.resident import status
from checkmate.errors import Unsupported
from checkmate.memory import aside, measure_peak, meter, record_allocations
from checkmate.memory.cuda_allocator import DeviceState
from tests.support.sampling import in_turn, slow


def test_peak_and_what_remains() -> None:
    ones, x = torch.ones(1000), torch.rand(1000, requires_grad=True)
    use = measure_peak(lambda: ones.clone().neg().sum())
    assert (use.peak, use.final, use.result) == (8000, 4, -1000)
    assert (use.device, use.before, use.reserved) == (torch.device("cpu"), None, None)  # its allocator has no count
    saved = measure_peak(lambda: x.exp().sin().sum())
    assert saved.final == 4000 + 4  # the result of exp, which is the input of sin: both need it for their gradients
    many = torch.rand(50_000)
    assert measure_peak(lambda: many.sort()).peak >= many.nbytes * 3  # with a workspace that no result shows


def test_what_cannot_be_measured_is_refused_and_an_error_ends_the_recording() -> None:
    with pytest.raises(Unsupported, match="not on meta"):
        measure_peak(lambda: None, device="meta")
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(Unsupported, match="running already"),
    ):
        measure_peak(lambda: None)
    with pytest.raises(ZeroDivisionError):
        measure_peak(lambda: 1 / 0)
    assert measure_peak(lambda: torch.empty(5)).peak == 20


ASKED, GIVEN, HELD = "requested_bytes.all", "allocated_bytes.all", "reserved_bytes.all"


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What stands for the counts of a device's allocator."""
    counts: dict[str, int] = {}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: counts)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(DeviceState, "now", lambda device: None)
    return counts


def test_on_cuda_the_allocator_is_read(level: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes there before, 5000 at most, 1200 left, 8192 held of the device."""
    level |= {f"{ASKED}.current": 1000, f"{ASKED}.peak": 9000, f"{GIVEN}.peak": 9216, f"{HELD}.peak": 20480}
    forget = {f"{ASKED}.peak": 1000, f"{GIVEN}.peak": 1024, f"{HELD}.peak": 4096}
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: level.update(forget))

    def work() -> str:
        level.update({f"{ASKED}.current": 1200, f"{ASKED}.peak": 5000, f"{GIVEN}.peak": 5120, f"{HELD}.peak": 8192})
        return "done"

    use = measure_peak(work, device="cuda:0")
    assert (use.before, use.peak, use.final, use.allocated, use.reserved) == (1000, 4000, 200, 5120, 8192)
    assert (use.result, use.device) == ("done", torch.device("cuda:0"))


def test_the_first_tensor_on_a_device_may_be_measured(level: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator has no counts before it has given anything, and in PyTorch 2.11 no peaks that could be reset."""
    uninitialized = Mock(side_effect=RuntimeError("Invalid device argument 0: did you call init?"))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", uninitialized)
    first = {f"{ASKED}.current": 0, f"{ASKED}.peak": 4, f"{GIVEN}.peak": 512, f"{HELD}.peak": 2 << 20}
    use = measure_peak(lambda: level.update(first), device="cuda:0")
    assert (use.before, use.peak, use.final, use.allocated, use.reserved) == (0, 4, 0, 512, 2 << 20)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_peak_on_cuda() -> None:
    ones = torch.ones(1000, device="cuda")
    use = measure_peak(lambda: ones.clone().neg().sum(), device="cuda")
    assert (use.peak, use.final) == (2 * 4000, 4)
    assert use.before >= 4000
    assert use.reserved >= use.allocated >= use.before + use.peak
    assert use.allocated % 512 == 0


def test_spans() -> None:
    ones = torch.ones(100)
    with record_allocations() as recording:
        assert not gc.isenabled()  # garbage would count as freed
        before = ones[:10].clone()
        with torch.profiler.record_function("inside"):
            ones.clone() + ones.clone()
    assert recording.within("inside").max() == 1200
    assert recording.within("inside")[0] == 0
    assert before.sum() == 10
    assert gc.isenabled()


@in_turn(age=[slow(0), slow(1), slow(2)])
def test_garbage_hides_nothing_though_the_call_collects_it(age: int) -> None:
    """Whatever its generation."""
    gc.collect()
    cycle: list[object] = [torch.empty(1000)]
    cycle.append(cycle)
    for generation in range(age):
        gc.collect(generation)  # what is alive grows older
    del cycle
    use = measure_peak(lambda: (gc.collect(), torch.empty(100))[1])
    assert (use.peak, use.final) == (400, 400)


def test_old_garbage_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large program that takes half a second. What is put aside meanwhile is back afterwards."""
    asked: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: asked.append(generation))
    measure_peak(lambda: None)
    assert set(asked) == {1}
    assert gc.get_freeze_count() == 0


def test_old_garbage_is_collected_soon_though_calls_are_measured_again_and_again() -> None:
    gc.collect()
    for times in range(1, 5):
        measure_peak(lambda: None)
        assert gc.get_count()[-1] >= times  # the old generation's turn comes at eleven


@pytest.mark.slow
def test_repeats_to_the_byte() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    x = torch.randn(4, 3, 32, 32)
    net(x).sum().backward()
    assert len({measure_peak(lambda: net(x).sum().backward()).peak for _ in range(5)}) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_aside_of_a_profiler_the_same_is_recorded(threads: int) -> None:
    x = torch.rand(300_000, requires_grad=True)  # enough for two threads
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def record() -> tuple[list[int], list[int], int]:
        with record_allocations() as recording:
            y = x.exp()
            with torch.profiler.record_function("inner"):
                y.sin().sort()[0].sum().backward()
        return recording.bytes.tolist(), recording.within("inner").tolist(), torch.get_num_threads()

    try:
        record()  # the first makes the gradient
        x.grad = None
        alone = record()
        x.grad = None
        with torch.profiler.profile(profile_memory=True) as profiler:
            beside = aside(record)
    finally:
        torch.set_num_threads(before)
    assert beside == alone
    assert max(alone[1]) > 3 * x.nbytes
    assert not any("sort" in event.name for event in profiler.events())
    with torch.profiler.profile():  # gradients are on or off as here
        assert aside(torch.is_grad_enabled)
        with torch.no_grad():
            assert not aside(torch.is_grad_enabled)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the pages that glibc's malloc keeps are looked at")
def test_pages_between_what_is_alive_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    meter.trim()
    blocks = [torch.ones(100_000, dtype=torch.uint8) for _ in range(400)]  # too small to be mapped by themselves
    before = status("VmRSS")
    del blocks[:-1]  # the last is behind them
    meter.trim()
    assert before - status("VmRSS") >= 20_000_000
    assert blocks[0].sum() == 100_000
    monkeypatch.setattr(meter.ctypes, "CDLL", lambda name: object())  # where there is no such function
    assert meter.trim() is False


def test_malloc_gives_back_what_capturing_left_before_the_first_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, happened = nn.Linear(8, 8), list[str]()

    @torch.library.custom_op("checkmate_malloc::runs", mutates_args=())
    def runs(x: torch.Tensor) -> torch.Tensor:
        happened.append("op")
        return x.clone()

    runs.register_fake(torch.empty_like)
    runs.register_autograd(lambda ctx, grad: grad)

    monkeypatch.setattr(meter, "trim", lambda: happened.append("trim"))
    step: Any = checkmate.compile(lambda x: runs(model(x)).sum(), budget="1 MB", cache=False)
    for _ in range(2):
        step(torch.ones(4, 8)).backward()
    assert happened.count("trim") == 1
    assert happened[-3:] == ["trim", "op", "op"]
