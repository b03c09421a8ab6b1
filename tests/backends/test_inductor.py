"""Plans that Inductor compiles: close to plain PyTorch, within the budget when measured, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import checkmate
from checkmate.backends import inductor as module_under_test
from checkmate.backends.eager import run_generated_code
from checkmate.backends.inductor import TRIES, Inductor, _decomposed, lower, require_compiler
from checkmate.capture import rewrite
from checkmate.codegen.boxed import takes_one_list
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.memory import measure_peak
from checkmate.solvers.solve import solve
from tests.support.bits import assert_same_bits
from tests.support.sampling import long

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]


def _mlp(blocks: int = 2, batch: int = 256) -> Made:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(blocks)])
    return net, lambda x: net(x).square().mean(), (torch.randn(batch, 64),)


def _large_masks() -> Made:
    """Masks that are worth drawing again: with the budget, once or twice."""
    return _mlp(batch=512)


def _convolutions() -> Made:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        for _ in range(2)
    ]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 256, 4))
    return net, lambda x, y: F.cross_entropy(net(x), y), (torch.randn(4, 8, 16, 16), torch.randint(4, (4,)))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 50)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x))
        q, k, v = self.mix(self.norm(h)).view(*x.shape, 4, 24).transpose(1, 2).split(8, dim=3)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        h = h + F.gelu(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.out(h).flatten(0, 1), x.flatten())


def _attention() -> Made:
    torch.manual_seed(0)
    net = _Attention()
    return net, net.forward, (torch.randint(50, (8, 64)),)


def _train(net: nn.Module, step: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Three steps of Adam. Its eps keeps the noise of gradients that are zero but for rounding from becoming a step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-3)
    torch.manual_seed(7)
    losses, peaks = [], []

    def forward_backward() -> Tensor:
        loss = step(*batch)
        loss.backward()
        return loss.detach().clone()

    for i in range(3):
        if i == 0:
            losses.append(forward_backward())
        else:
            use = measure_peak(forward_backward)
            losses.append(use.result)
            peaks.append(use.peak)
            del use
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return {"close": (losses, state), "random state": torch.get_rng_state(), "peaks": peaks}


def _plain(problem: Problem) -> Problem:
    """Inductor itself decides what it writes over, and splits nothing."""
    return replace(problem, profile=replace(problem.profile, ways=()), smaller=None)


def _share(problem: Problem, share: float) -> int:
    problem = _plain(problem)
    least = checkmate.min_budget(problem).peak
    return int(least + share * (problem.keep_all_peak - least))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("make", "shares"), [(_large_masks, (0.3,)), long(_convolutions, (0.5,)), long(_attention, (0.8,))]
)
def test_close_to_plain_pytorch_within_the_budget(make: Callable[[], Made], shares: tuple[float, ...]) -> None:
    """Recomputation survives: the measured peak falls with the budget. Buffers are updated once, draws are the same."""
    expected = _train(*make())
    net, step, batch = make()
    problem = checkmate.trace(step, *batch)
    measured = []
    for share in shares:
        net, step, batch = make()
        budget = _share(problem, share)
        compiled = checkmate.compile(step, budget=budget, backend="inductor", time_limit=5)
        found = _train(net, compiled, batch)
        assert_close(found["close"], expected["close"])
        assert_same_bits(found["random state"], expected["random state"])
        (plan,) = compiled.plans
        assert {plan.problem.resident + peak for peak in found["peaks"]} == {plan.details["measured_peak"]}
        assert plan.details["measured_peak"] <= budget
        assert plan.modules.again or share == 1.0
        measured.append(plan.details["measured_peak"])
    assert measured[0] < 0.9 * measured[-1] or len(shares) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_gradients_through_pooling_are_those_of_plain_pytorch() -> None:
    """With Inductor's own order of kernels all before a pooling layer were zero, where a plan runs something again."""

    def block(channels: int, made: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, made, 3, padding=1), nn.ReLU()]

    torch.manual_seed(0)
    blocks = [*block(3, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), *block(32, 32), nn.MaxPool2d(2)]
    blocks += [*block(32, 64), nn.MaxPool2d(2), *block(64, 64), nn.MaxPool2d(2)]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    with patch.object(rewrite, "forget_inputs", lambda graph: None):  # for Inductor each op keeps its inputs
        budget = checkmate.min_budget(_plain(checkmate.trace(step, x, y))).peak
    expected = torch.autograd.grad(step(x, y), list(net.parameters()))
    with patch.object(module_under_test, "_peak", lambda run, inputs: 0):  # whatever it takes
        compiled = checkmate.compile(step, budget=budget, backend="inductor")
        found = torch.autograd.grad(compiled(x, y), list(net.parameters()))
    assert compiled.plans[0].overhead > 0
    for mine, plain in zip(found, expected, strict=True):
        assert_close(mine, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.slow
def test_each_way_to_call_it() -> None:
    net, _, (x,) = _mlp()
    plain = deepcopy(net)
    compiled = checkmate.compile(net, budget="1 MB", backend="inductor")
    with torch.no_grad():
        torch.manual_seed(1)
        found = compiled(x)
        torch.manual_seed(1)
        assert_close(found, plain(x))
    assert compiled.plans == []
    assert_close(net.eval()(x), plain.eval()(x))
    assert isinstance(compiled, nn.Sequential)
    assert_close(compiled(x), plain(x))
    for n in (256, 100):  # the last batch is smaller
        loss = compiled(x[:n]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            plain(x[:n]).square().mean().backward()
    assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert len(compiled.plans) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_results_without_a_gradient() -> None:
    """As of the eager backend: what only they reach has no gradient."""
    net, _, (x,) = _mlp()
    other = nn.Linear(64, 64)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = net(x)
        return h.square().mean(), other(h)

    compiled = checkmate.compile(step, budget="1 MB", backend="inductor")
    for run in (compiled, step):
        torch.manual_seed(1)
        run(x)[0].backward()
        assert other.weight.grad is None
    doubled = [p.grad for p in net.parameters()]
    net.zero_grad()
    torch.manual_seed(1)
    step(x)[0].backward()
    assert_close(doubled, [2 * p.grad for p in net.parameters()])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_verify_allows_rounding_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(32, 16)
    step = lambda x: net(x).float().square().mean()  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        report = checkmate.verify(step, x, budget="1 MB", backend="inductor")
    assert 0 < report.off < 1e-2
    assert report.measured_peak <= report.budget == 10**6
    assert "but for rounding" in str(report)
    monkeypatch.setattr(module_under_test, "_compiled", lambda module, inputs: _spoiled(module))
    with pytest.raises(checkmate.VerificationError, match=r"compiled by Inductor differs .* where rounding is allowed"):
        checkmate.verify(step, x, budget="1 MB", backend="inductor")


def _spoiled(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    run = run_generated_code(module, [])

    @takes_one_list
    def spoiled(inputs: list[Any]) -> Any:
        return tuple(r * 1.001 if r is not None and r.is_floating_point() else r for r in run(inputs))

    return spoiled


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_draws_keep_their_order_and_their_values() -> None:
    """Draws of three kinds that do not depend on each other, one of which nobody reads."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        a = F.dropout(x * w, 0.5)  # large enough to be drawn again
        torch.rand(3)
        b = F.dropout(x[:2] * w, 0.5)
        return (a * torch.rand_like(x)).sum() + (a * torch.randn(64)).sum() + b.sum()

    x, w = torch.randn(512, 64), torch.randn(64, requires_grad=True)
    compiled = checkmate.compile(step, budget=_share(checkmate.trace(step, x, w), 0.3), backend="inductor")
    gradients, states = [], []
    for run in (step, compiled):
        torch.manual_seed(3)
        (gradient,) = torch.autograd.grad(run(x, w), [w])
        gradients.append(gradient)
        states.append(torch.get_rng_state())
    assert_close(*gradients, rtol=1e-5, atol=1e-4)  # sums of 512 terms
    assert_same_bits(*states)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_pytorch_finds_it_by_the_name_of_our_backend() -> None:
    net, _, (x,) = _mlp()
    options = {"budget": "1 MB", "backend": "inductor"}
    require_compiler.cache_clear()
    compiled = torch.compile(net, backend="checkmate", options=options, dynamic=False)
    state = torch.get_rng_state()
    expected = net(x)
    torch.set_rng_state(state)
    assert_close(compiled(x), expected)


def _planner(asides: list[int], problems: list[Problem], budget: int) -> Callable[[Problem, int], Solution]:
    def plan(problem: Problem, aside: int) -> Solution:
        asides.append(aside)
        problems.append(problem)
        solution = solve(problem, budget - aside, method="next-use")
        if solution.plan is None:
            assert solution.refusal is not None
            smallest = solution.refusal.min_budget + aside
            raise checkmate.InfeasibleBudget("none fits", budget=budget, min_budget=smallest, op="")
        return solution

    return plan


def _trial(monkeypatch: pytest.MonkeyPatch, beyond: list[int]) -> tuple[Any, Any, list[int], nn.Module]:
    """The MLP with batch norm at 1 MB, whose runs take so many bytes beyond their plans; no compiler is needed."""
    net, step, batch = _mlp(4)
    net.append(nn.BatchNorm1d(64))
    budget = int(0.85 * checkmate.trace(step, *batch).keep_all_peak)
    asides: list[int] = []
    problems: list[Problem] = []
    backend = Inductor(_planner(asides, problems, budget), lower, budget=budget)
    backend.lower = run_generated_code
    measure = module_under_test._peak
    monkeypatch.setattr(module_under_test, "_peak", lambda run, inputs: measure(run, inputs) + beyond[len(asides) - 1])
    run = torch.compile(lambda x: step(x), fullgraph=True, backend=backend, dynamic=False)
    return backend, lambda: run(*batch), asides, net


def test_what_runs_over_the_budget_is_planned_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, run, asides, _ = _trial(monkeypatch, [80_000, 10_000])
    caplog.set_level(logging.INFO, "checkmate.backends.inductor")
    run().backward()
    assert asides == [0, 80_000]
    (plan,) = backend.plans
    assert plan.budget == backend.budget - 80_000
    assert plan.details["measured_peak"] == plan.peak + 10_000
    assert "80.00 kB of the budget set aside" in caplog.text


@pytest.mark.slow
def test_what_stays_over_the_budget_is_refused_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, run, asides, net = _trial(monkeypatch, [90_000, 150_000, 220_000])
    before, state = deepcopy(net.state_dict()), torch.get_rng_state()
    with pytest.raises(Exception, match=r"no plan stays within .* Measured in a run: .* Smallest that was"):
        run()
    assert len(asides) == TRIES
    assert backend.plans == []
    assert_same_bits(net.state_dict(), before)
    assert_same_bits(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.slow
def test_the_lowest_of_all_plans_is_tried_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the first takes beyond its plan none could fit; the lowest takes less beyond it."""
    backend, run, asides, _ = _trial(monkeypatch, [500_000, 0, 10_000])
    run().backward()
    (plan,) = backend.plans
    assert asides == [0, 500_000, backend.budget - plan.budget]
    assert plan.peak == plan.budget < backend.budget
    assert plan.details["measured_peak"] == plan.peak + 10_000


@pytest.mark.slow
def test_a_plan_that_cannot_be_smaller_is_refused_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, run, asides, _ = _trial(monkeypatch, [500_000, 0, 500_000])
    with pytest.raises(Exception, match="Compiled by Inductor, no plan stays") as caught:
        run()
    reason: Any = caught.value.inner_exception
    assert isinstance(reason, checkmate.InfeasibleBudget)
    assert reason.min_budget > reason.budget == backend.budget
    assert asides[:2] == [0, 500_000]
    assert len(asides) == 4  # the lowest plan, and whether any is lower


@pytest.mark.usefixtures("one_thread")
def test_the_trial_measures_what_training_takes() -> None:
    """With the eager backend's code it is the plan's peak, also where autograd copies a gradient to store it."""
    w, b, x = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(9999)), torch.randn(8, 64)
    backend = Inductor(_planner([], [], 10**6), lower, budget=10**6)
    backend.lower = run_generated_code
    torch.compile(lambda x: (x @ w).tanh().sum() + b.sum(), fullgraph=True, backend=backend, dynamic=False)(x)
    (plan,) = backend.plans
    assert any(op.name.endswith("_accumulate") for op in plan.problem.graph.ops)
    assert plan.details["measured_peak"] == plan.peak


def test_the_trial_runs_no_hooks_and_leaves_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run, _, net = _trial(monkeypatch, [0])
    seen: list[Tensor] = []
    weight = net[0][0].weight
    weight.register_hook(lambda grad: seen.append(grad))
    loss = run()
    assert seen == []
    assert weight.grad is None
    assert int(net[-1].num_batches_tracked) == 1
    loss.backward()
    assert len(seen) == 1


def test_without_a_compiler() -> None:
    require_compiler.cache_clear()
    nowhere = torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)})
    with nowhere, pytest.raises(checkmate.Unsupported, match=r"takes g\+\+ or clang.*python3-dev"):
        checkmate.compile(nn.Linear(2, 2), budget="1 MB", backend="inductor")


def test_backends_have_names() -> None:
    with pytest.raises(ValueError, match="the backends are eager, inductor"):
        checkmate.compile(nn.Linear(2, 2), budget="1 MB", backend="triton")


def test_on_a_gpu_it_is_refused() -> None:
    backend = Inductor(_planner([], [], 10**6), lower, budget=10**6)
    with pytest.raises(checkmate.Unsupported, match="on the CPU so far, not on meta"):
        backend(torch.fx.symbolic_trace(nn.Identity()), [torch.ones(2, device="meta")])


def test_types_of_results_stay_where_a_decomposition_has_others() -> None:
    """Batch norm in bfloat16 with a weight in float32 saves its statistics in float32; decomposed, in bfloat16."""
    net, x = nn.BatchNorm1d(8), torch.randn(16, 8, dtype=torch.bfloat16)
    kinds = []

    def lower(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nodes = module.graph.output_node().args[0]
        made = _decomposed(module, inputs).graph.output_node().args[0]
        kinds.extend((a.meta["val"].dtype, b.meta["val"].dtype) for a, b in zip(nodes, made, strict=True) if a)
        return run_generated_code(module, inputs)

    backend = Inductor(_planner([], [], 10**6), lower, budget=10**6)
    backend.lower = lower
    torch.compile(lambda x: net(x).float().sum(), fullgraph=True, backend=backend, dynamic=False)(x).backward()
    assert torch.float32 in {a for a, _ in kinds}
    assert all(a == b for a, b in kinds)
