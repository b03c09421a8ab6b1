"""Whole steps on a CUDA device: plain PyTorch's bits with what runs there only, and nothing of ours stays there."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.capture.device import have_libraries_take_workspaces
from checkmate.capture.nodes import target_name
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.memory import measure_peak
from checkmate.memory.available import SHARE, STEPS, rounded_down
from checkmate.profiling import cost_cache, measure, trial
from tests.support.bits import assert_same_bits
from tests.support.budgets import between
from tests.support.plainly import assert_alike, run_again
from tests.support.sampling import long
from tests.support.simulated_cuda.install import is_installed, set_waver
from tests.support.whole_steps import assert_as_plain, training

pytestmark = pytest.mark.cuda
SECONDS = 0.3  # to plan


class Net(nn.Module):
    """Convolutions, batch norm and dropout, and attention over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.body(x).flatten(2)  # (batch, 16, 64)
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        return self.head((rows + mixed).mean(1))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 3, 8, 8, device="cuda"), torch.randint(10, (32,), device="cuda")


def loss_of(net: nn.Module, dtype: torch.dtype | None) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            return F.cross_entropy(net(x), y)

    return loss


def chain(
    count: int, parts: Callable[[], tuple[nn.Module, ...]], *shape: int
) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Layers that repeat, an input, and the mean square of what they make of it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(count) for part in parts())).cuda()
    return net, torch.randn(*shape, device="cuda"), lambda x: net(x).square().mean()


def least(step: Callable[[Tensor], Tensor], x: Tensor, **host: Any) -> int:
    """The smallest budget that is quickly found."""
    return checkmate.min_budget(checkmate.trace(step, x, **host), time_limit=SECONDS).peak


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "fused"), [long(None, True), long(torch.bfloat16, False), (torch.float16, None)])
def test_a_training_step_leaves_the_bits_of_plain_pytorch(dtype: torch.dtype | None, fused: bool | None) -> None:
    """Each implementation of AdamW, in each precision; float16 with its scaler."""
    data = [batch() for _ in range(3)]
    how: dict[str, Any] = {"loss": lambda net: loss_of(net, dtype), "batch": data.__getitem__, "metered": False}
    if dtype is torch.float16:
        how["scaler"] = lambda net: torch.amp.GradScaler("cuda")
    assert_as_plain(training(lambda: Net().cuda(), lambda net: torch.optim.AdamW(net.parameters(), fused=fused), **how))


def test_states_that_the_first_update_makes_count_beside_what_is_allocated() -> None:
    net, x, loss = chain(2, lambda: (nn.Linear(256, 256), nn.GELU()), 16, 256)
    step = checkmate.training_step(loss, torch.optim.AdamW(net.parameters()), budget="1 GB", time_limit=SECONDS)
    peaks = [use.before + use.peak for use in (measure_peak(lambda: step(x), x.device) for _ in range(2))]
    assert max(peaks) <= step.plans[0].peak


@pytest.mark.slow
def test_values_wait_in_pinned_memory_and_come_back_as_they_were() -> None:
    net, x, step = chain(6, lambda: (nn.Linear(256, 256), nn.GELU()), 1024, 256)
    host: dict[str, Any] = {"host_budget": "100 MB", "host": "pinned"}
    alone, beside = least(step, x), least(step, x, **host)
    assert beside < alone
    compiled = checkmate.compile(step, budget=(alone + beside) // 2, time_limit=SECONDS, verify=True, **host)
    assert_alike(lambda run: torch.autograd.grad(run(x), [*net.parameters()]), compiled, step)
    assert compiled.plans[0].plan.sent


def test_measuring_leaves_nothing_on_the_device() -> None:
    """The smallest budget of a trace is then that of a step which is compiled next."""
    x = torch.rand(64, 65, dtype=torch.float64, device="cuda", requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return F.softmax(x.sin(), 1).tanh().sum()

    torch.autograd.grad(step(x), x)
    residents = []
    for _ in range(2):
        problem = checkmate.trace(step, x, cache=False)
        residents.append(problem.resident)
        del problem
        gc.collect()
    assert residents[1] <= residents[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *sizes: nn.RNN(*sizes, nonlinearity="relu")])
def test_layers_that_are_one_kernel_of_cudnn_are_refused_by_name(kind: Any) -> None:
    net, x = kind(4, 8).cuda(), torch.randn(3, 2, 4, device="cuda")
    with pytest.raises(Unsupported, match=r"is a kernel of cuDNN.*nn\.RNNCell"):
        checkmate.trace(lambda x: net(x)[0].sum(), x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_step_on_another_device_than_the_current_one() -> None:
    net, x = nn.Linear(64, 64).to("cuda:1"), torch.randn(512, 64, device="cuda:1")
    gc.collect()
    held = torch.cuda.memory_allocated(0)
    step = lambda x: net(x).tanh().square().mean()  # noqa: E731
    compiled = checkmate.compile(step, budget="1 GB", verify=True)
    found = assert_alike(lambda run: torch.autograd.grad(run(x), [*net.parameters()]), compiled, step)
    assert {grad.device for grad in found} == {x.device}
    assert torch.cuda.memory_allocated(0) == held


@pytest.mark.parametrize("share", [0.0, long(0.5), long(1.0)])
def test_a_budget_holds_what_is_asked_for_and_what_the_allocator_adds_is_told(share: float) -> None:
    """Weights of 1.54 MB and activations of 1.64 MB, of whose blocks the allocator keeps up to 1 MiB more."""
    _, x, step = chain(4, lambda: (nn.Linear(600, 600), nn.GELU()), 640, 600)
    budget = between(checkmate.trace(step, x), share, time_limit=SECONDS)
    try:
        report = checkmate.verify(step, x, budget=budget, time_limit=SECONDS)
    except InfeasibleBudget as refusal:  # in blocks of the allocator
        budget = refusal.min_budget
        report = checkmate.verify(step, x, budget=budget, time_limit=SECONDS)
    assert report.measured_peak <= report.predicted_peak <= budget
    assert report.allocated_peak >= report.measured_peak
    assert report.foretold == (report.allocated_peak, report.reserved_peak) or not is_installed()
    assert report.allocated_peak <= budget or not is_installed()
    assert ("above the budget: PYTORCH_ALLOC_CONF" in str(report)) == (report.allocated_peak > budget)


@pytest.mark.long
def test_a_right_step_passes_where_attention_wavers() -> None:
    """Its gradients are summed in no order: on a GPU by atomic additions, on the simulated device by chance."""
    net = Net().cuda()
    loss = loss_of(net, torch.bfloat16)
    wavers = set_waver if is_installed() else lambda on: None
    for seed in range(6):
        torch.manual_seed(seed)
        data = batch()
        wavers(True)
        try:
            checkmate.verify(loss, *data, budget="1 GB")
        finally:
            wavers(False)


class Noisy(nn.Module):
    """Tokens and noise, which the gradient of the product reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.randn_like(x).add(1.0)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(8, 64, 4, 32).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).transpose(1, 2).reshape(512, 128)


@pytest.mark.parametrize(
    ("draw", "target", "host"),
    [
        long(lambda: nn.Dropout(0.3), "native_dropout", None),
        long(lambda: nn.Dropout(0.3), "native_dropout", "10 MB"),
        (Attention, "_scaled_dot_product_efficient_attention", None),
        long(Noisy, "randn_like", None),
    ],
    ids=["dropout", "dropout, host", "attention", "noise"],
)
def test_a_draw_runs_again_with_the_bits_of_plain_pytorch(
    draw: Callable[[], nn.Module], target: str, host: str | None
) -> None:
    """Its seed and offset are kept, and neither its result nor, where the budget is tight, its mask."""
    net, x, step = chain(4, lambda: (nn.Linear(128, 128), nn.GELU(), draw()), 512, 128)
    budget = least(step, x)
    report = checkmate.verify(step, x, budget=budget, host_budget=host, time_limit=SECONDS)
    assert report.measured_peak <= budget
    compiled = checkmate.compile(step, budget=budget, host_budget=host, time_limit=SECONDS, wait="best")

    def left_by(run: Callable[[Tensor], Tensor]) -> Any:
        torch.manual_seed(1)
        return torch.autograd.grad(run(x), [*net.parameters()]), torch.cuda.get_rng_state()

    assert_alike(left_by, compiled, step)
    assert host or f"checkmate.{target}" in run_again(compiled.plans[0])


def test_a_dropout_that_does_not_repeat_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "drawn_again", lambda drawn: drawn)
    monkeypatch.setattr(trial, "_known", {})
    x = torch.randn(512, 128, device="cuda", requires_grad=True)
    problem = checkmate.trace(lambda x: F.dropout(x, 0.25).square().sum(), x)
    assert [op.pinned for op in problem.graph.ops if "dropout.default" in op.target] == ["draws random numbers"]


def test_convolutions_run_before_the_step_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials of cuDNN at the first run of each are not within the budget, even if its cost is known from a file."""
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).cuda(), torch.randn(2, 3, 16, 16, device="cuda")
    checkmate.trace(net, x)
    measured: list[str] = []
    measure_ops = measure.measure_ops

    def noted(nodes: dict[Any, Any], known: Any) -> Any:
        measured.extend(target_name(node) for node in nodes.values())
        return measure_ops(nodes, known)

    monkeypatch.setattr(cost_cache, "_known", {})
    monkeypatch.setattr(measure, "measure_ops", noted)
    for _ in range(2):
        checkmate.trace(net, x)
    assert ["convolution" in name for name in measured] == [True, True]  # once forward, once backward


def test_a_convolutional_network_finds_its_plan_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of a convolution are those that the first process measured, though it runs anew in each."""
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    ticks = itertools.count(1)
    time_call = measure.time_on_accelerator
    monkeypatch.setattr(measure, "time_on_accelerator", lambda *about: time_call(*about) * (1 + next(ticks) / 8))
    _, x, step = chain(3, lambda: (nn.Conv2d(4, 4, 3, padding=1), nn.GELU()), 2, 4, 16, 16)
    monkeypatch.setattr(cost_cache, "_known", {})
    problem = checkmate.trace(step, x)
    budget = between(problem, 0.5)
    origins = []
    for _ in range(2):
        monkeypatch.setattr(cost_cache, "_known", {})  # as in another process
        compiled = checkmate.compile(step, budget=budget, time_limit=5, wait="best")
        compiled(x)
        (plan,) = compiled.plans
        assert plan.problem.seconds.tolist() == problem.seconds.tolist()
        origins.append(plan.origin)
    assert origins[1] == "plan cache" != origins[0]


def test_another_kernel_of_a_convolution_is_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes other bytes than the file of costs says: the seconds there are not its own."""
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_cache, "_known", {})
    net, x = nn.Conv2d(3, 8, 3).cuda(), torch.randn(2, 3, 16, 16, device="cuda")
    before = checkmate.trace(net, x)
    allocated, timed = measure.allocated_bytes, []
    time_call = measure.time_on_accelerator
    monkeypatch.setattr(measure, "allocated_bytes", lambda *about: allocated(*about) + 512)
    monkeypatch.setattr(measure, "time_on_accelerator", lambda *about: timed.append(about) or time_call(*about) * 2)
    monkeypatch.setattr(cost_cache, "_known", {})
    after = checkmate.trace(net, x)
    assert len(timed) == 2  # once forward, once backward
    convolutions = [k for k, op in enumerate(before.graph.ops) if "convolution" in op.target]
    assert (after.seconds[convolutions] > before.seconds[convolutions]).all()
    assert (after.workspace[convolutions] == before.workspace[convolutions] + 512).all()


def test_steps_on_two_streams_of_the_users() -> None:
    """One after the other, with nothing that has the second wait for the first: each has streams and values its own."""
    net, both, step = chain(4, lambda: (nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), 2, 2048, 256)
    xs, wanted = [*both], [*net.parameters()]
    expected = [torch.autograd.grad(step(x), wanted) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs * 2]
    for stream in streams:  # on each, libraries take workspaces and keep them
        with torch.cuda.stream(stream):
            have_libraries_take_workspaces(xs[0].device)
    budget = least(step, xs[0])
    compiled, found = checkmate.compile(step, budget=budget, time_limit=SECONDS, wait="best"), []
    for x, stream in zip(xs * 2, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(torch.autograd.grad(compiled(x), wanted))
    torch.cuda.synchronize()
    assert_same_bits(found, expected * 2)


def test_without_a_budget_a_step_leaves_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 64 GB, most of it held elsewhere, or kept from PyTorch by a fraction for this process."""
    _, x, step = chain(6, lambda: (nn.Linear(600, 600), nn.GELU()), 640, 600)
    room = between(checkmate.trace(step, x), 0.5, time_limit=SECONDS)
    total = 64 * 10**9
    may_have = room + int(SHARE * total)  # with the margin

    def others_hold(nbytes: int, fraction: float) -> None:
        free = total - nbytes
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (free - torch.cuda.memory_reserved(device), total)
        )
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)

    for nbytes, fraction in ((total - may_have, 1.0), (0, may_have / total)):
        others_hold(nbytes, fraction)
        compiled = checkmate.compile(step, reserve=0, time_limit=SECONDS)
        compiled(x)
        (plan,) = compiled.plans
        # a fraction is no whole number of bytes, and a plan has less by what blocks are more than is asked for
        assert 0 <= rounded_down(room) - plan.budget <= 4 * room / STEPS
        assert plan.schedule.recomputed.sum() > 0
        report = checkmate.verify(step, x, reserve=0, time_limit=SECONDS)
        assert plan.budget <= report.budget <= room
        assert report.measured_peak <= room
        assert report.allocated_peak <= room or not is_installed()
    others_hold(total - int(SHARE * total), 1.0)
    with pytest.raises(InfeasibleBudget, match=r"Smallest budget that works.*cuda:0 has 64\.00 GB, .* others"):
        checkmate.compile(step)(x)


def test_a_device_that_nobody_else_holds_runs_nothing_again() -> None:
    net, x, loss = chain(1, lambda: (nn.Linear(64, 64), nn.GELU()), 128, 64)
    free, total = torch.cuda.mem_get_info()
    step = checkmate.training_step(loss, torch.optim.AdamW(net.parameters()))
    step(x)
    assert step.plans[0].schedule.recomputed.sum() == 0
    assert 0.8 * free <= step.plans[0].budget <= total
