"""The promise: within the budget, and bit for bit the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks.networks import CASES
from checkmate.codegen.emit import AGAIN
from checkmate.core.graph import Graph
from checkmate.core.simulator import lower_runs
from checkmate.errors import InfeasibleBudget
from checkmate.memory import measure_peak
from checkmate.profiling import cost_cache
from checkmate.solvers.common.incumbent import certify
from tests.support.bits import assert_same_bits
from tests.support.budgets import between, recomputing
from tests.support.offers import plan_by
from tests.support.plainly import assert_as_plain
from tests.support.sampling import few, in_turn, long, slow
from tests.support.stepping import Trained, assert_same, train
from tests.support.whole_steps import X, Y, classifier, loss_of

BATCH_NORM_AGAIN = {"aten._native_batch_norm_legit_functional": "recompute"}  # whatever that costs
TYPES = torch.float32, torch.bfloat16, torch.float64
LAYOUTS = torch.contiguous_format, torch.channels_last


@functools.cache
def _plain(name: str, threads: int) -> tuple[checkmate.Problem, Trained]:
    module, step, batch = CASES[name].make(0)
    return checkmate.trace(step, *batch), train(module, step, batch)


def _assert_predicted(compiled: Any, found: Trained, budget: int) -> checkmate.Solution:
    """There is one plan, within the budget; and the peak is its own to the byte."""
    (plan,) = compiled.plans
    assert plan.peak <= budget
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    return plan


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "share", "threads"),
    [
        *[("mlp", 1.0, 1), ("mlp", 0.0, 1), slow("unet", 0.0, 1), slow("vgg", 0.5, 2)],
        *(long(name, share, 1) for name, share in itertools.product(CASES, (0.0, 0.4)) if name not in ("mlp", "unet")),
        long("unet", 0.4, 1),
        *(long(name, 0.5, 2) for name in ("resnet18", "unet", "gpt2-sdpa")),
    ],
)
def test_same_numbers_within_the_budget(name: str, share: float, threads: int) -> None:
    """The budget is the smallest, one in between, or keep-all; the peak is predicted to the byte."""
    torch.set_num_threads(threads)
    problem, expected = _plain(name, threads)
    budget = between(problem, share)
    module, step, batch = CASES[name].make(0)
    compiled = checkmate.compile(step, budget=budget, time_limit=1.0)

    found = train(module, compiled, batch)

    assert_same(found, expected)
    plan = _assert_predicted(compiled, found, budget)
    assert bool(plan.modules.again or plan.problem.splits) == (share < 1.0)


def test_emitted_modules_run_what_the_plan_says() -> None:
    """Each op stands in the code as often as in the plan, repeats under names that tell."""
    problem = checkmate.trace(loss_of(classifier()), X, Y)
    solution = checkmate.solve(problem, recomputing(problem))
    assert solution.plan is not None
    modules = solution.modules
    nodes = [n for module in (modules.forward, modules.backward) for n in module.graph.nodes]
    written = [n.name.split(AGAIN)[0] for n in nodes if n.op == "call_function"]
    for k, op in enumerate(problem.graph.ops):
        if op.target != "autograd":
            assert written.count(op.name) == solution.plan.runs.count(k), op.name
    assert len(modules.again) == len(solution.plan.runs) - len(problem.graph.ops)
    assert "_again1" in modules.backward.print_readable(print_output=False)


def test_trace_changes_nothing() -> None:
    net = classifier()
    before = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    checkmate.trace(loss_of(net), X, Y)
    checkmate.trace(net, X)
    assert_same_bits((net.state_dict(), torch.get_rng_state()), before)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.slow
def test_trace_often() -> None:
    """torch.compile does not compile one function so often."""
    weight = torch.ones(3, requires_grad=True)
    often = torch._dynamo.config.recompile_limit + 2
    peaks = {checkmate.trace(lambda x: (x * weight).sum(), torch.ones(n, 3)).keep_all_peak for n in range(1, often + 1)}
    assert len(peaks) == often


@pytest.mark.slow
def test_the_second_start_trains_with_the_plan_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new process finds costs and plans on disk."""
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    _, step, batch = CASES["mlp"].make(0)
    budget = between(checkmate.trace(step, *batch), 0.5)
    starts = [checkmate.compile(step, budget=budget, time_limit=5, cache=cache) for cache in (True, True, False)]
    for compiled in starts:
        compiled(*batch)
    first, second, third = (compiled.plans[0] for compiled in starts)
    assert [first.origin, second.origin, third.origin] == ["", "plan cache", ""]
    assert (second.plan, second.cost, second.bound, second.peak) == (first.plan, first.cost, first.bound, first.peak)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", [long("mlp"), long("gpt2-sdpa")])
def test_a_smaller_last_batch_trains_within_the_budget_with_the_same_numbers(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    module, step, batch = CASES[case].make(0)
    problem = checkmate.trace(step, *batch)
    budget = recomputing(problem, 0.25, time_limit=2)
    smaller = tuple(tensor[: int(0.8 * len(tensor))] for tensor in batch)
    compiled = checkmate.compile(step, budget=budget, time_limit=2)
    twin, plain, _ = CASES[case].make(0)
    for some in (batch, smaller, batch):
        assert_same(train(module, compiled, some), train(twin, plain, some))
    whole, rest = compiled.plans
    assert max(whole.peak, rest.peak) <= budget
    assert whole.cost > problem.keep_all_cost
    assert rest.origin == "another size" or rest.peak == rest.problem.keep_all_peak


@pytest.mark.slow
def test_ctrl_c_while_planning_trains_with_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(256, 32)
    budget = between(checkmate.trace(lambda x: model(x).sum(), x), 0.5)
    monkeypatch.setattr("checkmate.solvers.linear.highs.run", interrupted)
    step = checkmate.compile(lambda x: model(x).sum(), budget=budget)
    assert step(x).item() == model(x).sum().item()
    (plan,) = step.plans
    assert plan.message.startswith("interrupted after")


def test_an_option_that_there_is_none_of_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^checkmate.compile has no option 'methd'. Did you mean 'method'\?$"):
        checkmate.compile(torch.nn.Linear(4, 4), "1 MB", methd="auto")
    with pytest.raises(TypeError, match=r"^checkmate.compile has no option 'budgett'. Did you mean 'budget'\?$"):
        checkmate.compile(torch.nn.Linear(4, 4), budgett="1 MB")
    optimizer = torch.optim.SGD((model := torch.nn.Linear(4, 4)).parameters())
    other: dict[str, Any] = {"backend": "inductor"}
    with pytest.raises(TypeError, match=r"^checkmate.training_step has no option 'backend' any more. "):
        checkmate.training_step(lambda x: model(x).sum(), optimizer, "1 MB", **other)
    with pytest.raises(TypeError, match=r"^checkmate has no option 'backend' any more. .* kernels="):
        checkmate.verify(model, torch.ones(2, 4), budget="1 MB", backend="inductor")
    for ask in (checkmate.trace, checkmate.explain):
        with pytest.raises(TypeError, match=r"^checkmate has no option 'numerics' any more. Every plan has the bits"):
            ask(model, torch.ones(2, 4), numerics="exact")


def test_an_argument_of_the_step_may_have_the_name_of_an_option_of_before() -> None:
    def step(x: Tensor, backend: Tensor) -> Tensor:
        return (x * backend).sum()

    x = torch.ones(2, requires_grad=True)
    assert checkmate.trace(step, x, backend=torch.ones(2)).graph.ops


@pytest.mark.parametrize(("dtype", "memory_format"), few(3, itertools.product(TYPES, LAYOUTS)))
def test_dropout_is_that_of_eager(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """Masks are drawn in the same order, scaled with the same rounding, and replayed."""
    x = torch.rand(2, 6, 5, 7, dtype=dtype).to(memory_format=memory_format).requires_grad_()

    def step(x: Tensor) -> Tensor:
        for p in (0.1, 0.37, 0.5):
            x = F.dropout(x.sin(), p, training=True)
        return (x * x).sum()

    assert_as_plain(step, x, budget=checkmate.min_budget(checkmate.trace(step, x)).peak, profile="measure")


def test_batch_norm_runs_again_after_another_call_has_updated_its_statistics() -> None:
    """The result does not depend on them, so autograd need not guard them, and the backward updates none again."""
    net, plain = classifier(dropout=0.0), classifier(dropout=0.0)
    compiled = checkmate.compile(net, budget="1 MB", rules=BATCH_NORM_AGAIN)
    for run in (compiled, plain):
        (run(X) - run(-X)).square().mean().backward()
    (plan,) = compiled.plans
    assert any("batch_norm" in name for name in plan.modules.again)
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert_same_bits(net.buffers(), plain.buffers())


def test_a_step_is_captured_within_a_profiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new shape within the profiler, too; costs are measured as elsewhere."""
    net, plain = classifier(), classifier()

    def branching(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: F.cross_entropy(net(x), y) * (2 if x.sum() > 0 else 3)

    def costs() -> list[list[int]]:
        monkeypatch.setattr(cost_cache, "_known", {})
        monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path / str(len([*tmp_path.iterdir()]))))
        problem = checkmate.trace(branching(net), X, Y)
        return [problem.profile.workspace_bytes.tolist(), [*map(str, problem.profile.ways)]]

    expected = costs()
    step = checkmate.compile(branching(net), budget="1 MB")

    def gradients(run: Callable[[Tensor, Tensor], Tensor], module: nn.Module) -> Any:
        for rows in (slice(None), slice(3)):
            torch.manual_seed(1)
            run(X[rows], Y[rows]).backward()
            yield [p.grad for p in module.parameters()]
            module.zero_grad()

    with torch.profiler.profile(profile_memory=True) as profiler:
        inside, found = costs(), [*gradients(step, net)]
    assert_same_bits(found, [*gradients(branching(plain), plain)])
    assert inside == expected
    assert step.plans[0].peak > step.plans[1].peak  # each shape has its own
    assert any("addmm" in event.name for event in profiler.events())


def test_gradient_that_autograd_copies_is_counted() -> None:
    """A gradient in a layout that autograd does not take over costs a copy."""
    weight = nn.Parameter(torch.randn(300, 200))

    def step() -> Tensor:
        return weight.sum()  # its gradient is an expanded scalar

    problem = checkmate.trace(step)
    compiled = checkmate.compile(step, budget=checkmate.min_budget(problem).peak)
    compiled().backward()
    weight.grad = None
    use = measure_peak(lambda: compiled().backward())
    assert problem.resident + use.peak == compiled.plans[0].peak
    assert use.peak >= weight.nbytes


@pytest.mark.slow
def test_the_budget_counts_what_the_step_holds_and_does_not_read() -> None:
    """Parameters, buffers and the batch count, each storage once."""
    net, x, y = classifier(), X.clone(), Y.clone()
    net.register_buffer("table", torch.zeros(128))
    net.register_buffer("part_of_it", net.table[:3], persistent=False)
    net.register_buffer("alias", net[0][0].weight.detach()[0])
    net.unused = nn.Linear(7, 9)
    net.unused.weight.data = net.unused.weight.data.double()
    mask = torch.ones(48, 3)
    held = sum(t.nbytes for t in [*net.parameters(), *net.buffers(), x, y, mask]) - net.part_of_it.nbytes
    held -= net.alias.nbytes

    def step(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(net[:-1](batch["x"]), batch["y"])

    batch = {"x": x, "y": y, "mask": mask}
    problem = checkmate.trace(step, batch)
    assert problem.resident == held
    assert checkmate.trace(net[:-1], x).resident == held - sum(
        t.nbytes for t in [net.table, *net.unused.parameters(), y, mask]
    )
    compiled = checkmate.compile(step, budget=problem.keep_all_peak, time_limit=1)
    compiled(batch).backward()
    net.zero_grad()
    use = measure_peak(lambda: compiled(batch).backward())
    assert held + use.peak == compiled.plans[0].peak == problem.keep_all_peak
    with pytest.raises(InfeasibleBudget):
        checkmate.compile(step, budget=held, time_limit=1)(batch)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_large_gradient_that_can_wait_is_made_last() -> None:
    """The head's weight, and so its gradient, is larger than what the convolutions make."""
    body = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
    module = nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 14 * 14, 200))
    batch, plain = (torch.randn(128, 3, 16, 16), torch.randint(200, (128,))), copy.deepcopy(module)
    problem = checkmate.trace(loss_of(module), *batch)
    assert problem.graph.ops[-1].target == "aten.mm.default"
    budget = between(problem, 0.0)
    compiled = checkmate.compile(loss_of(module), budget=budget, time_limit=1.0)
    found = train(module, compiled, batch)
    assert_same(found, train(plain, loss_of(plain), batch))
    _assert_predicted(compiled, found, budget)


def _late_first(graph: Graph, ops: list[int]) -> list[int]:
    """These ops in another order that can be: each right after what it reads, those of the last ones first."""
    order: list[int] = []

    def visit(k: int) -> None:
        if k in ops and k not in order:
            for d in reversed(graph.deps[k]):
                visit(d)
            order.append(k)

    for k in reversed(ops):
        visit(k)
    return order


def test_ops_that_run_again_in_another_order_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[checkmate.Solution] = []

    def begin(problem: checkmate.Problem, budget: int) -> checkmate.Solution:
        graph = problem.graph
        first = graph.forward_length
        free = [k for k, op in enumerate(graph.ops[:first]) if op.pinned is None]
        again = _late_first(graph, free)
        assert again != free
        before = {first: again + free, first + 1: again}
        stages = [[*before.get(t, ()), t] for t in range(len(graph.ops))]
        plans.append(certify(problem, budget, lower_runs(problem, stages), method="auto"))
        return plans[-1]

    plan_by(monkeypatch, begin)
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.GELU()) for _ in range(4)]

    def step(x: Tensor) -> Tensor:
        for one, other in (branches[:2], branches[2:]):  # which read the same, and do not know of each other
            x = torch.cat([one(x), other(x)], 1)
        return x.square().mean()

    report = checkmate.verify(step, torch.randn(64, 16), budget="1 GB")
    (found,) = plans
    assert found.plan is not None
    assert not found.plan.is_a_schedule
    assert report.measured_peak == report.predicted_peak


def test_an_instance_norm_lets_go_of_its_copies_of_statistics() -> None:
    """Its running statistics are repeated for each sample, which the norm reads when it runs again in the backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, track_running_stats=True), nn.ReLU())
    x = torch.randn(4, 3, 6, 6)

    def step(x: Tensor) -> Tensor:
        return net(x).square().mean()

    problem = checkmate.trace(step, x)
    compiled = checkmate.compile(step, budget=checkmate.min_budget(problem).peak, wait="best", verify=False)
    compiled(x).backward()
    net.zero_grad()
    use = measure_peak(lambda: compiled(x).backward())
    assert any("batch_norm" in name for name in compiled.plans[0].modules.again)
    assert problem.resident + use.peak == compiled.plans[0].peak


# ---------------------------------------------------------------- by the name that `torch.compile` knows

BY_NAME = pytest.mark.usefixtures("found_by_name", "one_thread")


def _by_name(step: Any, **options: Any) -> Any:
    return torch.compile(step, backend="checkmate", options=options, dynamic=False)


@BY_NAME
@pytest.mark.slow
def test_trains_within_the_budget_in_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    net, twin = classifier(), classifier()
    problem = checkmate.trace(loss_of(net), X, Y)
    smallest = recomputing(problem)
    compiled = _by_name(loss_of(net), budget=smallest, time_limit=1)
    with caplog.at_level(logging.INFO, logger="checkmate.dynamo"):
        found = train(net, compiled, (X, Y))
    assert_same(found, train(twin, loss_of(twin), (X, Y)))
    assert all(problem.resident + peak <= smallest for peak in found.peaks)
    assert "runs again" in caplog.text


@BY_NAME
@pytest.mark.slow
def test_another_shape_gets_its_own_plan() -> None:
    net = classifier().eval()
    compiled = _by_name(net, budget="1 MB")
    for size in (64, 7, 5):
        assert_same_bits(compiled(X[:size]), net(X[:size]))


@BY_NAME
@in_turn(
    case=[
        ({"options": {"budget": "fits"}}, "Cannot read the budget 'fits'"),
        ({"options": {"budget": "170%"}}, "100% at most"),
        ({"options": {"budget": "1 kB"}}, "Smallest budget that works"),
        ({"options": {"budget": "1 MB", "speed": 3}}, "no option 'speed'. Its options are budget, method, time_limit,"),
        ({"options": {"budgt": "1 MB"}}, "has no option 'budgt'. Did you mean 'budget'?"),
        ({"options": {"budget": "1 MB", "time_limit": "60s"}}, "time_limit is a positive number of .*, not '60s'."),
        ({"options": {"budget": "1 MB", "rules": {"nothing": "keep"}}}, "names nothing in this step"),
        ({"options": {"budget": "1 MB", "verify": True}}, "verify=True"),
        ({"options": {"budget": "1 MB"}, "dynamic": True}, "dynamic=False"),
        ({"mode": "reduce-overhead"}, "no modes"),
    ]
)
def test_what_is_wrong_is_said(case: tuple[dict[str, Any], str]) -> None:
    about, words = case
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        torch.compile(classifier(), backend="checkmate", **{"dynamic": False, **about})(X)


@BY_NAME
def test_a_step_that_breaks_in_two_is_refused() -> None:
    net = classifier()

    def breaking(x: Tensor) -> Tensor:
        y = net(x)
        torch._dynamo.graph_break()
        return y.square().sum()

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="fullgraph=True"):
        _by_name(breaking, budget="1 MB")(X)
