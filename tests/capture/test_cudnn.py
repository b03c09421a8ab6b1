"""Batch norm by cuDNN, with a stand-in for cuDNN on the CPU: the same sums as there, called as cuDNN is called."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from checkmate.capture import cudnn
from checkmate.core.rules import with_rules
from checkmate.memory import measure_peak
from checkmate.profiling import trial
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.plainly import assert_as_plain, at_smallest_budget, train_as_plain
from tests.support.sampling import long
from tests.support.simulated_cuda.install import is_installed, set_waver

RESERVE = 24  # bytes
CONVOLUTION_WAVERS = "leaves other bits when it runs again"


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, training: bool, *rest: float
) -> tuple[Tensor, ...]:
    """Writes the running statistics and does not say so, as cuDNN does."""
    results = torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, training, *rest)
    return (*results, torch.full((RESERVE,), 7, dtype=torch.uint8))


def _backward(
    x: Tensor, grad: Tensor, weight: Tensor, _: None, __: None, mean: Tensor, rstd: Tensor, eps: float, reserve: Tensor
) -> tuple[Tensor, ...]:
    """Spoils its reserve, as cuDNN may; one that was spoiled spoils the gradient."""
    grad = grad * (reserve[0] / 7)
    reserve.zero_()
    return torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, mean, rstd, True, eps, [True] * 3)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = {name: getattr(torch.ops.aten, name) for name in dir(cudnn.aten) if "batch_norm" in name}
    ops |= {"cudnn_batch_norm": _forward, "cudnn_batch_norm_backward": _backward}
    monkeypatch.setattr(cudnn, "aten", types.SimpleNamespace(**ops))
    monkeypatch.setattr(cudnn, "is_for_cudnn", lambda tensors, training, eps: True)
    monkeypatch.setattr(cudnn, "reserve_bytes", lambda x: RESERVE)


def _net(track: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=track), nn.ReLU()) for _ in "123"]
    return nn.Sequential(*(layer for group in layers for layer in group), nn.Flatten(), nn.Linear(4 * 64, 3))


def _loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "stand_in")
@pytest.mark.parametrize(
    ("track", "frozen", "share"), [(True, False, 0.0), (True, False, 0.5), (False, False, 0.0), (True, True, 0.0)]
)
def test_trains_as_eager_does(track: bool, frozen: bool, share: float) -> None:
    """Training, also where the op runs again, and where a gradient that cuDNN computes is unused."""
    net, x, y = _net(track), torch.randn(16, 4, 8, 8), torch.randint(3, (16,))
    net[1].weight.requires_grad_(not frozen)
    problem = checkmate.trace(lambda x, y: _loss(net, x, y), x, y)
    targets = [op.target for op in problem.graph.ops]
    assert targets.count("checkmate.batch_norm") == targets.count("checkmate.batch_norm_backward") == 3
    assert not [target for target in targets if "native_batch_norm" in target]
    rules: dict[str, str | int] = {} if share else {"checkmate.batch_norm": "recompute"}
    budget = recomputing(with_rules(problem, rules), share, time_limit=1)
    plan, peaks = train_as_plain(net, _loss, x, y, budget=budget, rules=rules)
    assert set(peaks) == {plan.peak}
    assert plan.peak <= budget
    assert share or any("batch_norm" in name for name in plan.modules.again)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "stand_in")
def test_evaluates_as_eager_does() -> None:
    net, x = _net().eval(), torch.randn(16, 4, 8, 8)
    run = at_smallest_budget(lambda x: net(x).square().sum(), x)
    assert_as_plain(lambda x: net(x).square().sum(), x, run=run, leaves=[*net.parameters()])
    targets = [op.target for op in run.plans[0].problem.graph.ops]
    assert targets.count("checkmate.evaluate") == 3
    assert len([target for target in targets if "native_batch_norm_backward" in target]) == 3


def test_on_the_cpu_no_batch_norm_is_for_cudnn() -> None:
    net = _net()
    graph = checkmate.trace(lambda x: net(x).sum(), torch.randn(2, 4, 8, 8)).graph
    assert [op.target for op in graph.ops].count("aten._native_batch_norm_legit_functional.default") == 3


def test_pytorch_is_asked_who_does_it() -> None:
    """The installed PyTorch may have no cuDNN; then it names its own kernel on CUDA too."""
    graph = torch.fx.Graph()
    x, *others = nodes = [graph.placeholder(f"primals_{i}") for i in range(5)]
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 4, 8, 8, device="cuda:0")
        for node in others:
            node.meta["val"] = torch.empty(4, device="cuda:0")
    here = torch.backends.cudnn.is_available()
    for tensors, training, expected in (
        (nodes, True, here),
        ([*nodes[:3], None, None], True, here),
        ([*nodes[:3], None, None], False, False),
        ([x, None, None, *nodes[3:]], True, False),
    ):
        assert cudnn.is_for_cudnn(tensors, training, 1e-5) == expected


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("training", "memory_format"),
    [
        (True, torch.contiguous_format),
        (False, torch.channels_last),
        long(True, torch.channels_last),
        long(False, torch.contiguous_format),
    ],
)
def test_on_cuda_the_bits_are_those_of_eager(training: bool, memory_format: torch.memory_format) -> None:
    net = nn.BatchNorm2d(16).cuda().train(training)
    x = torch.randn(8, 16, 9, 9, device="cuda").to(memory_format=memory_format).requires_grad_()
    run = checkmate.compile(lambda x: net(x).square().sum(), budget="1 GB", verify=True)
    assert_as_plain(lambda x: net(x).square().sum(), x, run=run, leaves=[*net.parameters()])


def _convolutions() -> tuple[Callable[[Tensor], Tensor], nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(8, 8, 1))]
    net, x = nn.Sequential(*layers).cuda(), torch.randn(4, 8, 20, 20, device="cuda")
    return lambda x: net(x).square().mean(), net, x


def _pinned(problem: checkmate.Problem) -> set[str | None]:
    """Why convolutions of the forward run once."""
    return {op.pinned for op in problem.graph.ops if op.target == "aten.convolution.default"}


@pytest.mark.cuda
@pytest.mark.parametrize("benchmark", [False, True])
def test_a_convolution_runs_again_where_both_threads_have_the_same_kernel(
    benchmark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of cuDNN at the first run in each thread is in no step; gradients are those of plain PyTorch."""
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # so that plain PyTorch repeats its gradients
    step, net, x = _convolutions()
    problem = checkmate.trace(step, x)
    if is_installed():  # a GPU may find the same kernel fastest twice
        assert _pinned(problem) == ({CONVOLUTION_WAVERS} if benchmark else {None})
    least = checkmate.min_budget(problem, time_limit=1).peak
    compiled = checkmate.compile(step, budget=least, time_limit=1, wait="best")
    loss = compiled(x)
    if is_installed() and not benchmark:
        assert any(name.startswith("convolution") for name in compiled.plans[0].modules.again)
    use = measure_peak(loss.backward, device="cuda")
    assert use.before + use.peak <= compiled.plans[0].peak
    found = [p.grad for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    step(x).backward()
    assert_same_bits(found, [p.grad for p in net.parameters()])


@pytest.mark.cuda
@pytest.mark.skipif(not is_installed(), reason="only the simulated device has convolutions waver")
def test_a_convolution_that_wavers_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_known", {})
    set_waver(True, what="convolutions")
    try:
        step, _, x = _convolutions()
        assert _pinned(checkmate.trace(step, x)) == {CONVOLUTION_WAVERS}
    finally:
        set_waver(False, what="convolutions")
