"""The promise: within the budget, and bit for bit the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import functools
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
from checkmate.memory import measure_peak
from checkmate.profiling import cost_cache
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.sampling import long, slow
from tests.support.stepping import Trained, assert_same, train

QUICK = (("mlp", 1.0), ("mlp", 0.0))
SMALLEST = {"unet"}  # the smallest budget is the hard one
BATCH_NORM_AGAIN = {"aten._native_batch_norm_legit_functional": "recompute"}  # whatever that costs
OTHERS = [(name, share) for share in (0.0, 0.4) for name in CASES if name != "mlp"]


@functools.cache
def _expected(name: str) -> Trained:
    return train(*CASES[name].make(0))


@functools.cache
def _problem(name: str) -> checkmate.Problem:
    _, step, batch = CASES[name].make(0)
    return checkmate.trace(step, *batch)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "share"),
    [*QUICK, *((slow if not share and name in SMALLEST else long)(name, share) for name, share in OTHERS)],
)
def test_same_numbers_within_the_budget(name: str, share: float) -> None:
    """At the smallest budget, at one in between and at keep-all; the peak is predicted to the byte."""
    problem = _problem(name)
    smallest = checkmate.min_budget(problem, time_limit=1.0).peak
    budget = int(smallest + share * (problem.keep_all_peak - smallest))
    module, step, batch = CASES[name].make(0)
    compiled = checkmate.compile(step, budget=budget, time_limit=1.0)

    found = train(module, compiled, batch)

    assert_same(found, _expected(name))
    (plan,) = compiled.plans
    assert plan.peak <= budget
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    assert bool(plan.modules.again or plan.problem.splits) == (share < 1.0)


@pytest.mark.parametrize("name", [slow("vgg"), long("resnet18"), long("unet"), long("gpt2-sdpa")])
def test_within_the_budget_on_two_threads(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        module, step, batch = CASES[name].make(0)
        problem = checkmate.trace(step, *batch)
        budget = (checkmate.min_budget(problem, time_limit=1).peak + problem.keep_all_peak) // 2
        compiled = checkmate.compile(step, budget=budget, time_limit=1, wait="best")
        found = train(module, compiled, batch)
        assert_same(found, train(*CASES[name].make(0)))
        (plan,) = compiled.plans
        assert plan.peak <= budget
        assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    finally:
        torch.set_num_threads(threads)


def _net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 5),
    )
    return net, torch.randn(48, 32), torch.randint(5, (48,))


def _half_way(step: object, *batch: Tensor) -> int:
    problem = checkmate.trace(step, *batch)
    return (checkmate.min_budget(problem).peak + problem.keep_all_peak) // 2


def test_emitted_modules_run_what_the_plan_says() -> None:
    """Each op stands in the code as often as in the plan, repeats under names that tell."""
    net, x, y = _net()
    problem = checkmate.trace(lambda x, y: F.cross_entropy(net(x), y), x, y)
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
    net, x, y = _net()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    state = torch.get_rng_state()
    checkmate.trace(lambda x, y: F.cross_entropy(net(x), y), x, y)
    checkmate.trace(net, x)
    assert_same_bits(torch.get_rng_state(), state)
    assert_same_bits(net.state_dict(), before)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.slow
def test_trace_often() -> None:
    """More often than torch.compile allows one function to be compiled again."""
    weight = torch.ones(3, requires_grad=True)
    often = torch._dynamo.config.recompile_limit + 2
    peaks = {checkmate.trace(lambda x: (x * weight).sum(), torch.ones(n, 3)).keep_all_peak for n in range(1, often + 1)}
    assert len(peaks) == often


def test_loss_outside_the_compiled_function() -> None:
    net, x, y = _net()
    plain, _, _ = _net()
    compiled = checkmate.compile(net, budget=_half_way(net, x))
    assert_same(
        train(net, lambda x, y: F.cross_entropy(compiled(x), y), (x, y)),
        train(plain, lambda x, y: F.cross_entropy(plain(x), y), (x, y)),
    )


def test_another_batch_size_gets_its_own_plan() -> None:
    net, x, y = _net()
    compiled = checkmate.compile(lambda x, y: F.cross_entropy(net(x), y), budget="1 MB")
    compiled(x, y)
    compiled(x[:7], y[:7])
    compiled(x, y)
    assert len(compiled.plans) == 2
    assert compiled.plans[0].peak > compiled.plans[1].peak


@pytest.fixture
def _no_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "_no_plans")
def test_the_second_start_trains_with_the_plan_of_the_first() -> None:
    """What a new process would find: costs and plans on disk."""
    module, step, batch = CASES["mlp"].make(0)
    problem = checkmate.trace(step, *batch)
    budget = (checkmate.min_budget(problem).peak + problem.keep_all_peak) // 2
    expected = train(module, step, batch)
    solutions = []
    for cache in (True, True, False):
        module, step, batch = CASES["mlp"].make(0)
        compiled = checkmate.compile(step, budget=budget, time_limit=5, cache=cache)
        found = train(module, compiled, batch)
        assert_same(found, expected)
        assert problem.resident + max(found.peaks) <= budget
        solutions += compiled.plans
    first, second = solutions[:2]
    assert [s.origin for s in solutions] == ["", "plan cache", ""]
    assert (second.cost, second.bound, second.peak) == (first.cost, first.bound, first.peak)
    assert second.seconds < 1


@pytest.mark.usefixtures("one_thread", "_no_plans")
@pytest.mark.parametrize("case", [slow("mlp"), long("gpt2-sdpa")])
def test_a_smaller_last_batch_trains_within_the_budget_with_the_same_numbers(case: str) -> None:
    module, step, batch = CASES[case].make(0)
    problem = checkmate.trace(step, *batch)
    budget = recomputing(problem, 0.25, time_limit=2)
    smaller = tuple(tensor[: int(0.8 * len(tensor))] for tensor in batch)
    compiled = checkmate.compile(step, budget=budget, time_limit=2)
    twin, plain, _ = CASES[case].make(0)
    for some in (batch, smaller, batch):
        assert_same(train(module, compiled, some), train(twin, plain, some))
    whole, rest = compiled.plans
    assert whole.peak <= budget
    assert rest.peak <= budget
    assert whole.cost > problem.keep_all_cost
    assert rest.origin == "another size" or rest.peak == rest.problem.keep_all_peak


@pytest.mark.slow
def test_ctrl_c_while_planning_trains_with_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(256, 32)
    problem = checkmate.trace(lambda x: model(x).sum(), x)
    budget = (checkmate.min_budget(problem).peak + problem.keep_all_peak) // 2
    monkeypatch.setattr("checkmate.solvers.linear.highs.run", interrupted)
    step = checkmate.compile(lambda x: model(x).sum(), budget=budget)
    assert step(x).item() == model(x).sum().item()
    (plan,) = step.plans
    assert plan.message.startswith("interrupted after")


def test_backward_twice_with_retain_graph() -> None:
    net, x, y = _net()
    loss = checkmate.compile(lambda x, y: F.cross_entropy(net(x), y), budget="1 MB")(x, y)
    first = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(net.parameters()))
    assert_same_bits(first, second)


def test_two_forwards_then_two_backwards_and_accumulation() -> None:
    def run(wrap: bool) -> list[Tensor]:
        net, x, y = _net()
        step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
        if wrap:
            step = checkmate.compile(step, budget=_half_way(step, x, y))
        torch.manual_seed(1)
        a, b = step(x, y), step(x.flip(0), y.flip(0))
        b.backward()
        a.backward()
        return [p.grad for p in net.parameters()] + [t.clone() for t in net.buffers()]

    assert_same_bits(run(True), run(False))


def test_without_gradients_nothing_is_planned() -> None:
    net, x, _ = _net()
    compiled = checkmate.compile(net.eval(), budget=1)
    with torch.no_grad():
        assert_same_bits(compiled(x), net(x))
    assert compiled.plans == []


def test_the_budget_may_stand_in_its_place() -> None:
    assert checkmate.compile(lambda x: x, "1 MB")._options.total == 10**6


def test_an_option_that_there_is_none_of_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^checkmate.compile has no option 'methd'. Did you mean 'method'\?$"):
        checkmate.compile(torch.nn.Linear(4, 4), "1 MB", methd="auto")
    optimizer = torch.optim.SGD((model := torch.nn.Linear(4, 4)).parameters())
    other: dict[str, Any] = {"backend": "inductor"}
    with pytest.raises(TypeError, match=r"^checkmate.training_step has no option 'backend' any more. "):
        checkmate.training_step(lambda x: model(x).sum(), optimizer, "1 MB", **other)
    with pytest.raises(TypeError, match=r"^checkmate has no option 'backend' any more. .* torch.compile"):
        checkmate.verify(model, torch.ones(2, 4), budget="1 MB", backend="inductor")
    for ask in (checkmate.trace, checkmate.explain):
        with pytest.raises(TypeError, match=r"^checkmate has no option 'numerics' any more. Every plan has the bits"):
            ask(model, torch.ones(2, 4), numerics="exact")


def test_an_argument_of_the_step_may_have_the_name_of_an_option_of_before() -> None:
    def step(x: Tensor, backend: Tensor) -> Tensor:
        return (x * backend).sum()

    x = torch.ones(2, requires_grad=True)
    assert checkmate.trace(step, x, backend=torch.ones(2)).graph.ops


def test_keyword_arguments_and_results_in_a_dict() -> None:
    net, x, y = _net()

    def step(x: Tensor, *, target: Tensor, scale: float = 1.0, extra: Tensor | None = None) -> dict[str, Tensor]:
        logits = net(x)
        return {"loss": scale * F.cross_entropy(logits, target), "logits": logits}

    compiled = checkmate.compile(step, budget="1 MB")
    torch.manual_seed(0)
    found = compiled(x, target=y, scale=2.0)
    torch.manual_seed(0)
    expected = step(x, target=y, scale=2.0)
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [
        *(slow(dtype, torch.contiguous_format) for dtype in (torch.float32, torch.bfloat16)),
        *(slow(dtype, torch.channels_last) for dtype in (torch.float32, torch.bfloat16)),
        *(long(torch.float64, memory_format) for memory_format in (torch.contiguous_format, torch.channels_last)),
    ],
)
def test_dropout_is_that_of_eager(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """Drawn in the same order, scaled with the same rounding, and replayed from its mask."""
    x = torch.rand(2, 6, 5, 7, dtype=dtype).to(memory_format=memory_format).requires_grad_()

    def step(x: Tensor) -> Tensor:
        for p in (0.1, 0.37, 0.5):
            x = F.dropout(x.sin(), p, training=True)
        return (x * x).sum()

    problem = checkmate.trace(step, x)
    compiled = checkmate.compile(step, budget=checkmate.min_budget(problem).peak)
    torch.manual_seed(3)
    found = torch.autograd.grad(compiled(x), x)[0], torch.get_rng_state()
    torch.manual_seed(3)
    expected = torch.autograd.grad(step(x), x)[0], torch.get_rng_state()
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1])


def test_batch_norm_statistics_are_updated_once() -> None:
    """Where batch norm runs again in the backward, its statistics do not."""
    net, x, y = _net()
    plain, _, _ = _net()
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    problem = checkmate.trace(step, x, y)
    compiled = checkmate.compile(step, budget=problem.keep_all_peak, rules=BATCH_NORM_AGAIN)
    for _ in range(2):
        compiled(x, y).backward()
        F.cross_entropy(plain(x), y).backward()
    assert any("batch_norm" in name for name in compiled.plans[0].modules.again)
    assert net[1].num_batches_tracked == 2
    assert_same_bits(net.buffers(), plain.buffers())


def test_batch_norm_runs_again_after_another_call_has_updated_its_statistics() -> None:
    """Its result does not depend on them, so that autograd need not guard them against being overwritten."""
    torch.manual_seed(0)
    norms = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(2)]
    net = nn.Sequential(*norms, nn.Linear(16, 4))
    x, weights = torch.randn(64, 16), list(net.parameters())
    compiled = checkmate.compile(net, budget="1 MB", rules=BATCH_NORM_AGAIN)
    found, expected = (torch.autograd.grad((run(x) - run(-x)).square().mean(), weights) for run in (compiled, net))
    (plan,) = compiled.plans
    assert any("batch_norm" in name for name in plan.modules.again)
    assert_same_bits(found, expected)


def test_a_step_is_captured_within_a_profiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new shape in the middle of it, too, and a question; what ops take is measured as elsewhere."""
    net, x, y = _net()
    plain = copy.deepcopy(net)

    def loss_of(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: F.cross_entropy(net(x), y) * (2 if x.sum() > 0 else 3)

    def costs() -> list[list[int]]:
        monkeypatch.setattr(cost_cache, "_known", {})
        monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path / str(len([*tmp_path.iterdir()]))))
        problem = checkmate.trace(loss_of(net), x, y)
        return [problem.profile.workspace_bytes.tolist(), [*map(str, problem.profile.ways)]]

    expected = costs()
    step, found = checkmate.compile(loss_of(net), budget="1 MB"), []
    with torch.profiler.profile(profile_memory=True) as profiler:
        inside = costs()
        for rows in (slice(None), slice(3)):
            torch.manual_seed(1)
            step(x[rows], y[rows]).backward()
            found.append([p.grad for p in net.parameters()])
            net.zero_grad()
    for rows, grads in zip((slice(None), slice(3)), found, strict=True):
        plain.zero_grad()
        torch.manual_seed(1)
        loss_of(plain)(x[rows], y[rows]).backward()
        assert_same_bits(grads, [p.grad for p in plain.parameters()])
    assert inside == expected
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


def test_reserve_is_left_free() -> None:
    net, x, y = _net()
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    problem = checkmate.trace(step, x, y)
    compiled = checkmate.compile(step, budget=problem.keep_all_peak, reserve=10_000)
    compiled(x, y)
    assert compiled.plans[0].peak <= problem.keep_all_peak - 10_000


@pytest.mark.slow
def test_the_budget_counts_what_the_step_holds_and_does_not_read() -> None:
    """Parameters, buffers and the batch are what the person paid for, each storage once."""
    net, x, y = _net()
    net.register_buffer("table", torch.zeros(128))
    net.register_buffer("part_of_it", net.table[:3], persistent=False)
    net.register_buffer("alias", net[0].weight.detach()[0])
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
    with pytest.raises(checkmate.InfeasibleBudget):
        checkmate.compile(step, budget=held, time_limit=1)(batch)


class _Wide(nn.Module):
    """The head's weight, and so its gradient, is larger than what the convolutions make."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        self.head = nn.Linear(16 * 14 * 14, 200)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).flatten(1)), y)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_large_gradient_that_can_wait_is_made_last() -> None:
    torch.manual_seed(0)
    module, batch = _Wide(), (torch.randn(128, 3, 16, 16), torch.randint(200, (128,)))
    plain = copy.deepcopy(module)
    problem = checkmate.trace(module, *batch)
    assert problem.graph.ops[-1].target == "aten.mm.default"
    compiled = checkmate.compile(module, budget=checkmate.min_budget(problem, time_limit=1).peak, time_limit=1.0)
    found = train(module, compiled, batch)
    assert_same(found, train(plain, plain, batch))
    (plan,) = compiled.plans
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
