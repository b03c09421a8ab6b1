"""Plans whose values wait in a second memory give the bits of plain PyTorch, and the bytes that they foretell."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.networks import CASES
from checkmate.backends.compilation import Backend
from checkmate.backends.planner import Options
from checkmate.backends.step_problem import joint_of
from checkmate.codegen.emit import emit
from checkmate.codegen.second_memory import SecondMemories, SecondMemory
from checkmate.codegen.transfers import most_there
from checkmate.compiler import CompiledStep
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, lower, simulate
from checkmate.core.solution import Solution
from checkmate.errors import HostError, Unsupported
from checkmate.host.store import Store
from checkmate.profiling.source import source_of
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import solve
from tests.support.bits import assert_same_bits
from tests.support.sampling import long
from tests.support.stepping import assert_same, grads_of, train
from tests.support.transfers import as_run, with_transfers

CPU = torch.device("cpu")
OTHERS = ("gpt2-sdpa", "mobilenet", "unet")  # attention and dropout; batch norm, in place; values with several readers
Plans = Callable[[Problem], Solution]


def sending(seed: int, *, again: bool = False) -> Plans:
    """Make a planner that sends all values it can at random places; with ``again`` some ops run again."""

    def plan(problem: Problem) -> Solution:
        alone = problem.with_host(None)
        found = lower(alone, Schedule.from_runs(alone.graph, np.eye(len(alone.graph.ops), dtype=bool)))
        if again:
            half = (min_budget(alone, time_limit=0.5).peak + problem.keep_all_peak) // 2
            tighter = solve(alone, half, time_limit=0.5).plan
            assert tighter is not None
            found = tighter
        sent = with_transfers(problem, found, np.random.default_rng(seed), share=0.7 if again else 1.0)
        sent = as_run(problem, sent)
        return certify(problem, 10**12, sent, method="by hand")

    return plan


def compiled(
    fn: Any, plans: Plans, *, measured: bool = False, where: str = "file:/dev/shm"
) -> tuple[Any, SecondMemory]:
    """Compile a step with such plans; give it, and where its values wait."""
    second_memories = SecondMemories(where, 10**9, cache=False)
    costs = source_of("measure" if measured else "roofline:laptop", cache=False)
    backend = Backend(plans, profile=costs, second_memories=second_memories)
    return CompiledStep(fn, Options("1 TB"), backend), second_memories.on(CPU)


class Net(nn.Sequential):
    """Batch norm, dropout, an op with several outputs, and values that the backward reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            *(nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.3)),
            *(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out.exp().mean()


def state(model: nn.Module) -> list[Tensor | None]:
    return [*grads_of(model), *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


class Twins:
    """A model, its copy, and a step of the copy whose values wait elsewhere."""

    def __init__(self, seed: int = 0, model: nn.Module | None = None) -> None:
        torch.manual_seed(seed)
        self.model = model or Net()
        self.copy = deepcopy(self.model)
        self.step, self.memory = compiled(self.copy, sending(seed))

    def assert_alike(self, do: Callable[[Any], Any]) -> None:
        """Do something with the plain model, then with the step, and compare all that is left."""
        left = []
        for one, run in ((self.model, self.model), (self.copy, self.step)):
            torch.manual_seed(5)
            do(run)
            left.append(state(one))
        assert_same_bits(*left)

    def assert_goes_on(self) -> None:
        """Go on from the state of the plain model, as if nothing had happened to the copy."""
        for one in (self.model, self.copy):
            one.zero_grad()
        self.copy.load_state_dict(self.model.state_dict())
        self.assert_alike(lambda run: run(batch(0)).backward())


def batch(seed: int, count: int = 6) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "seed"), [("mlp", 0), ("mlp", 1), *(long(name, 0) for name in OTHERS)])
def test_bits_and_bytes_are_those_of_the_plan(name: str, seed: int) -> None:
    module, step, batch = CASES[name].make(0)
    expected = train(module, step, batch)
    module, step, batch = CASES[name].make(0)
    run, memory = compiled(step, sending(seed, again=True), measured=True)

    found = train(module, run, batch)

    assert_same(found, expected)
    (plan,) = run.plans
    assert check_plan(plan.plan, plan.problem) == []
    assert plan.plan.sent
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    assert memory.use.calls == 3
    assert (memory.use.peak, memory.use.pending) == (simulate(plan.plan, plan.problem).host_peak, 0)


def test_calls_that_wait_for_their_backwards_know_nothing_of_each_other() -> None:
    twins = Twins()

    def twice(run: Any) -> None:
        first, second, third = run(batch(0)), run(batch(1)), run(batch(2, count=3))
        second.backward()
        (2 * first + third).backward()

    twins.assert_alike(twice)
    use = twins.memory.use
    assert (use.calls, use.pending) == (3, 0)
    twins.assert_alike(twice)
    assert twins.memory.use.taken == use.taken  # of the stores that there were


def test_what_nobody_can_ask_for_is_let_go_of() -> None:
    twins = Twins()
    for _ in range(3):
        twins.step(batch(0))
    (plan,) = twins.step.plans
    assert twins.memory.use.pending == 1
    assert twins.memory.use.taken == most_there(plan.plan, plan.problem.graph)  # one store
    twins.assert_goes_on()


def test_a_second_backward_of_a_call_is_refused() -> None:
    twins = Twins()
    loss = twins.step(batch(0))
    loss.backward(retain_graph=True)
    before = state(twins.copy)
    with pytest.raises(Unsupported, match="differentiated once for each call"):
        loss.backward()
    assert_same_bits(state(twins.copy), before)
    twins.assert_goes_on()


@pytest.mark.parametrize("broken", [HostError("read error"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_step_that_fails_leaves_nothing_behind(
    at: int, broken: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins()
    twins.assert_goes_on()
    twins.copy.zero_grad()
    before, really, waits = state(twins.copy), Store.wait, itertools.count()

    def wait(store: Store, key: int) -> None:
        if next(waits) == at:
            raise broken
        really(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "wait", wait)
        with pytest.raises(type(broken)) as caught:
            twins.step(batch(0)).backward()
    assert twins.memory.use.pending == 0
    assert all(p.grad is None for p in twins.copy.parameters())
    if at == 0:  # in the forward
        assert_same_bits(state(twins.copy)[:-1], before[:-1])
    twins.assert_goes_on()
    del caught


@pytest.mark.slow
def test_threads_each_have_a_store() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
    inputs = [torch.randn(4, 8, dtype=torch.double) for _ in range(4)]
    plain = lambda x: model(x).square().sum()  # noqa: E731
    step, memory = compiled(plain, sending(1))
    together = threading.Barrier(len(inputs))

    def gradients(run: Any, x: Tensor) -> Any:
        return torch.autograd.grad(run(x), [*model.parameters()])

    def often(x: Tensor) -> Any:
        together.wait()
        return [gradients(step, x) for _ in range(5)]

    gradients(step, inputs[0])
    with ThreadPoolExecutor(len(inputs)) as pool:
        found = [*pool.map(often, inputs)]
    assert_same_bits(found, [[gradients(plain, x)] * 5 for x in inputs])
    assert memory.use.pending == 0


def test_a_part_of_the_backward() -> None:
    """Where results have no gradient, what only their gradients need is neither made nor sent."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

        def forward(self, x: Tensor) -> list[Tensor]:
            hidden = self.body(x).tanh()
            return [head(hidden).tanh().exp().tanh().sum() for head in self.heads]

    for seed in range(3):
        twins = Twins(seed, Two())
        for which in (0, 1):
            twins.assert_alike(lambda run: run(batch(0))[which].backward())  # noqa: B023
            twins.assert_alike(lambda run: sum(run(batch(1))).backward())
            assert twins.memory.use.pending == 0


def test_within_a_checkpoint() -> None:
    Twins().assert_alike(lambda run: checkpoint(run, batch(0), use_reentrant=False).backward())


def test_hooks_that_put_copies_in_place_are_refused() -> None:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        loss = Twins().step(batch(0))
    with pytest.raises(Unsupported, match="hooks have put copies"):
        loss.backward()


def test_a_plan_of_no_step_has_no_second_memory() -> None:
    step, _ = compiled(Net(), sending(0))
    step(batch(0))
    (plan,) = step.plans
    forward = emit(joint_of(plan.problem), plan.plan).forward
    with pytest.raises(HostError, match="was made for a problem"):
        forward([torch.zeros(()) for _ in forward.graph.find_nodes(op="placeholder")])
