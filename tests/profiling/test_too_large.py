"""An op for which there is no memory is estimated; nothing of it ends in an error."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.capture.device import have_libraries_take_workspaces
from checkmate.capture.inplace import rules
from checkmate.capture.inplace.rules import TABLE, Written
from checkmate.memory import available
from checkmate.memory.available import within_memory
from checkmate.profiling import cost_cache, trial
from checkmate.profiling import measure as measuring
from checkmate.profiling.one_op import call_of
from checkmate.profiling.trial import same_in_two
from tests.profiling.test_trial import backward_of

MIB = 2**20
ROWS = WIDTH = 1664  # of 11 MB, which is a segment of PyTorch's allocator for itself
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _measured_anew(nothing_known: None) -> None:
    available._warn.cache_clear()


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _estimated(problem: checkmate.Problem) -> set[str]:
    return {problem.graph.ops[k].target for k in problem.profile.estimated}


class Wide(nn.Module):
    """Wide between two narrow layers; its input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, WIDTH), nn.GELU(), nn.Linear(WIDTH, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


@pytest.fixture
def with_room() -> Iterator[Callable[[float], None]]:
    """Lets PyTorch have so many more bytes of the device, and none beside those that other tests have left in use."""
    total, taken = torch.cuda.get_device_properties(0).total_memory, list[Tensor]()

    def leave(nbytes: float) -> None:
        have_libraries_take_workspaces(torch.device("cuda", 0))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total, 0)
        for size in (8 * MIB, MIB):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total, 0)

    yield leave
    taken.clear()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize(("whole", "estimated"), [(3.7, "aten.gelu_backward.default"), (2.6, "aten.gelu.default")])
def test_a_step_whose_ops_do_not_fit_is_planned_by_estimates(
    whole: float, estimated: str, with_room: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Where its gradient does not fit, and where the op itself does not."""
    net, x = Wide().cuda(), torch.randn(ROWS, 32, device="cuda")
    net(x).backward()
    with_room(whole * 4 * ROWS * WIDTH)
    problem = checkmate.trace(net, x)
    found = _estimated(problem)
    assert {estimated} <= found <= {"aten.gelu.default", "aten.gelu_backward.default"}
    assert problem.profile.source.endswith(f"{len(found)} too large to run alone in the memory that was free")
    assert "gelu_backward of body.1 (GELU, test_too_large.py" in caplog.text
    plan = checkmate.solve(problem, problem.keep_all_peak)
    assert f"  costs      {problem.profile.source}" in str(plan)


@pytest.mark.cuda
@pytest.mark.slow
def test_the_largest_batch_is_found_though_its_ops_cannot_be_measured(with_room: Callable[[float], None]) -> None:
    net = Wide().cuda()
    with_room(2.6 * 4 * ROWS * WIDTH)
    budget = torch.cuda.memory_allocated() + int(6.5 * 4 * ROWS * WIDTH)
    about: dict[str, Any] = {"smallest": ROWS, "largest": ROWS + 64, "max_overhead": None, "time_limit": 8}
    found = checkmate.max_batch_size(net, lambda n: (torch.randn(n, 32, device="cuda"),), budget, **about)
    assert found.size >= ROWS
    assert found.solution.problem.profile.estimated


def test_what_runs_out_of_memory_is_gone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ):
        made: list[weakref.ref[Tensor]] = []

        def fail(error: BaseException = error, made: list[Any] = made) -> None:
            x = torch.ones(8)
            made.append(weakref.ref(x))
            raise type(error)(*error.args)

        for _ in range(2):
            assert within_memory(fail, "mm of net.0", "it is left out") == []
        assert [there() for there in made] == [None, None]
    assert caplog.messages == ["mm of net.0: too large for the memory that is free, so it is left out"]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        within_memory(partial(torch.mm, torch.ones(2, 3), torch.ones(2, 3)), "mm", "it is left out")


def test_on_the_cpu_it_is_estimated_too(
    tanh_fails: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And measured as soon as there is memory: nothing is kept of it."""
    tanh_fails("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    x = torch.randn(8, 8, requires_grad=True)
    problem = checkmate.trace(lambda x: torch.tanh(x).sum(), x)
    assert _estimated(problem) == {"aten.tanh.default", "aten.tanh_backward.default"}
    assert problem.profile.source.endswith("; 2 ops estimated, 2 too large to run alone in the memory that was free")
    assert caplog.text.count("so its cost is estimated") == 2
    monkeypatch.setattr(measuring, "call_of", call_of)
    assert checkmate.trace(lambda x: torch.tanh(x).sum(), x).profile.estimated == ()


def test_without_memory_for_a_trial_an_op_is_measured_and_writes_over_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process tries again, and keeps the seconds."""
    x = torch.randn(64, 64, requires_grad=True)
    step = lambda x: torch.tanh(x.exp()).sum()  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(rules, "TABLE", {**TABLE, aten.tanh.default: Written(no_memory, (0,))})
        problem = checkmate.trace(step, x)
        assert problem.profile.estimated == ()
        assert problem.profile.source.endswith("; 1 too large to be tried over an input")
        patch.setattr(measuring, "measure_ops", lambda *_: pytest.fail("it is tried again in the same process"))
        checkmate.trace(step, x)
    monkeypatch.setattr(cost_cache, "_known", {})
    later = checkmate.trace(step, x)
    assert "too large" not in later.profile.source
    assert later.seconds.tolist() == problem.seconds.tolist()
    tanh = next(k for k, op in enumerate(later.graph.ops) if op.target == "aten.tanh.default")
    assert [way.op for way in {*later.profile.ways} - {*problem.profile.ways}] == [tanh]


def test_without_memory_for_two_gradients_they_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = backward_of(torch.Size([4, 3, 9, 9]), torch.Size([5, 3, 3, 3]))
    with monkeypatch.context() as patch:
        patch.setattr(trial, "call_of", no_memory)
        assert not same_in_two(node)
    assert "so its gradients are computed at once" in caplog.text
    assert same_in_two(node), "for want of memory it is not tried again"


@pytest.mark.cuda
def test_a_convolution_that_is_known_and_has_no_room_now_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its library chooses with so little memory it may take other bytes than the file of costs says."""
    net, x = nn.Conv2d(3, 8, 3).cuda(), torch.randn(2, 3, 16, 16, device="cuda")
    assert checkmate.trace(net, x).profile.estimated == ()
    monkeypatch.setattr(cost_cache, "_known", {})
    monkeypatch.setattr(measuring, "call_of", no_memory)
    problem = checkmate.trace(net, x)
    assert _estimated(problem) == {"aten.convolution.default", "aten.convolution_backward.default"}
