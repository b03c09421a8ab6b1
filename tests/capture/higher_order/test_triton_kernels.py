"""Kernels of Triton's within a step: run by its interpreter here, looked into as for an H100, and run on a GPU."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.capture.higher_order.triton_kernels import Launch
from checkmate.capture.without_device.cuda import triton_for
from checkmate.core import files
from checkmate.core.graph import Op
from checkmate.profiling import cost_cache, measure, trial
from checkmate.profiling.one_op import key_of
from tests.support.plainly import assert_as_plain, pinned, run_again, train_as_plain, train_at_smallest_budget

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import JITFunction

from benchmarks.networks.triton_norm import TritonRMSNorm
from tests.support.simulated_cuda.install import is_installed

WIDTH, ROWS = 24, 6


@triton.jit
def add_all(x, total, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.atomic_add(total, tl.sum(tl.load(x + tl.program_id(0) * SIZE + tl.arange(0, SIZE))))


@triton.jit
def collect(total, value):  # type: ignore[no-untyped-def]
    tl.atomic_add(total, value)


@triton.jit
def add_all_by_another(x, total, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    collect(total, tl.sum(tl.load(x + tl.program_id(0) * SIZE + tl.arange(0, SIZE))))


@triton.jit
def scale(x, y, by, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at) * by)


@triton.jit
def half(x, y, by, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at) * 0.5)


X, W = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)


def _net(device: str = "cpu") -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), TritonRMSNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(device), torch.randn(ROWS, WIDTH).to(device)


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """The kernels that Triton's interpreter has run: captured as on a GPU, launches run here."""
    ran: list[str] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        ran.append(self.fn.__name__)
        # The interpreter holds the arguments in cycles. They are young as long as nothing else is collected, and to
        # look for them among all objects of a process with many tests takes longer than the kernel.
        collects = gc.isenabled()
        gc.disable()
        try:
            InterpretedFunction(self.fn).run(*args, **options)
        finally:
            if collects:
                gc.enable()
        gc.collect(0)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        scope = _patch_lang(self.fn)  # which Triton's own call leaves in place, so that nothing compiles any more
        try:
            return InterpretedFunction(self.fn).rewrite()(*args, **options)
        finally:
            scope.restore()

    def index_by_item(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)  # Triton 3.6 takes an array of one element for a number, which NumPy 2.4 refuses
        tensor.__index__ = lambda self: self.handle.data.item()

    plain = interpreter._patch_lang_tensor
    called = patch.object(JITFunction, "run", run), patch.object(JITFunction, "__call__", call)
    with triton_for((9, 0)), called[0], called[1], patch.object(interpreter, "_patch_lang_tensor", index_by_item):
        yield ran


@pytest.mark.usefixtures("one_thread")
def test_a_kernel_runs_again(ran: list[str]) -> None:
    net, x = _net()
    plan, peaks = train_at_smallest_budget(net, _loss, x, target="triton")
    assert "triton.norm" in run_again(plan)
    assert {"norm", "norm_backward"} == {*ran}
    assert peaks == [plan.peak] * len(peaks)


def _ops(step: Callable[..., Tensor], *batch: Tensor, **options: Any) -> dict[str, Op]:
    """The launches of a step, by the kernel's name."""
    return {op.name: op for op in checkmate.trace(step, *batch, **options).graph.ops if "triton" in op.target}


def _total(x: Tensor, kernel: Any) -> Tensor:
    """The sum of a tensor, that of each row added by a program of its own."""
    total = x.new_zeros(())
    kernel[(x.shape[0],)](x, total, SIZE=x.shape[1])
    return total


@pytest.mark.long
@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize("kernel", [add_all, add_all_by_another])
def test_a_kernel_that_adds_by_atomic_operations_runs_once(kernel: Any) -> None:
    (op,) = _ops(lambda x: ((x @ W) * _total(x, kernel)).sum(), X).values()
    assert op.pinned == "runs a kernel of Triton's that calls atomic_add"


def _scaled(x: Tensor, kernel: Any = scale, by: float = 2.0) -> Tensor:
    """The loss of a step that scales by a kernel."""
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, y, by, SIZE=x.shape[1])
    return ((x @ W) * y).sum()


@pytest.mark.long
def test_a_kernel_that_leaves_other_bits_when_it_runs_again_runs_once(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = JITFunction.run

    def run(kernel: Any, x: Tensor, y: Tensor, *args: Any, **options: Any) -> None:
        runs(kernel, x, y, *args, **options)
        y.view(-1)[5] += len(ran)

    assert _ops(_scaled, X)["scale"].pinned is None
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(trial, "_known", {})
    assert _ops(_scaled, X)["scale"].pinned == "left other bits when it ran again here"


@pytest.mark.long
@pytest.mark.usefixtures("ran")
def test_what_a_kernel_writes_over_is_copied_also_where_it_is_a_view() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).detach()
        half[(y.shape[0],)](y, y, 1.0, SIZE=y.shape[1])
        rows = torch.zeros(3, *x.shape)
        half[(x.shape[0],)](y, rows[1], 1.0, SIZE=x.shape[1])
        return ((x @ w) * (y + rows.sum(0))).sum()

    assert_as_plain(step, X, W, profile="measure")


@pytest.mark.long
@pytest.mark.usefixtures("ran")
def test_keys_of_costs_tell_kernels_apart_and_hold_in_every_process() -> None:
    def key(**options: Any) -> str:
        solution = checkmate.solve(checkmate.trace(partial(_scaled, **options), X), "1 MB")
        (node,) = (n for n in solution.modules.forward.graph.nodes if isinstance(n.target, Launch))
        return key_of(node)

    assert key() == key()
    assert len({key(), key(kernel=half), key(by=3.0)}) == 3
    assert not re.search(r" at 0x|kernel_idx", key())


@pytest.mark.usefixtures("ran")
def test_measured_costs_of_kernels_are_kept_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "folder", lambda: tmp_path)
    net, x = _net()
    problem = checkmate.trace(lambda x: _loss(net, x), x)
    measure.export(tmp_path / "ops.json")
    monkeypatch.setattr(cost_cache, "_known", {})
    elsewhere = checkmate.trace(lambda x: _loss(net, x), x, profile=str(tmp_path / "ops.json"))
    kernels = [k for k, op in enumerate(problem.graph.ops) if "triton" in op.target]
    assert [elsewhere.seconds[k] for k in kernels] == [problem.seconds[k] for k in kernels]
    assert not {*kernels} & {*problem.profile.estimated, *elsewhere.profile.estimated}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")
def test_kernels_are_planned_for_a_gpu_from_a_machine_without_one() -> None:
    net, x = _net("meta")
    problem = checkmate.trace(lambda x: _loss(net, x), x, profile="roofline:h100")
    kernels = {op.target: op for op in problem.graph.ops if "triton" in op.target}
    assert {name: op.pinned for name, op in kernels.items()} == {"triton.norm": None, "triton.norm_backward": None}
    smallest = checkmate.min_budget(problem, time_limit=1).peak
    assert smallest < checkmate.min_budget(pinned(problem, "triton"), time_limit=1).bound


if not is_installed():  # the simulated device runs no kernels of Triton's

    @pytest.mark.cuda
    def test_a_kernel_runs_again_on_a_gpu() -> None:
        net, x = _net("cuda")
        smallest = checkmate.min_budget(checkmate.trace(lambda x: _loss(net, x), x), time_limit=1).peak
        plan, _ = train_as_plain(net, _loss, x, budget=smallest)
        assert any("norm" in name for name in plan.modules.again)
