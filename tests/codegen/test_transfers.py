"""Plans whose values wait in a second memory give the bits of plain PyTorch, and the bytes that they foretell."""

from __future__ import annotations

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
from checkmate.backends.step_problem import Write
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
from tests.support.stepping import assert_same, train
from tests.support.transfers import as_run, with_transfers

CPU = torch.device("cpu")
OTHERS = ("gpt2-sdpa", "mobilenet", "unet")  # attention and dropout; batch norm, in place; values with several readers
Plans = Callable[[Problem], Solution]


def sending(seed: int, *, again: bool = False) -> Plans:
    """A planner that sends all values it can at random places; with ``again`` of a plan that runs some ops again."""

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
    """A step with such plans, and where its values wait."""
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
        """A loss."""
        out: Tensor = super().forward(x)
        return out.exp().mean()


def state(model: nn.Module) -> list[Tensor | None]:
    """All that a step leaves."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*grads, *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


def pair(seed: int = 0, model: nn.Module | None = None) -> tuple[nn.Module, nn.Module, Any, SecondMemory]:
    """A model, its copy, and a step of the copy whose values wait elsewhere."""
    torch.manual_seed(seed)
    model = model or Net()
    other = deepcopy(model)
    step, memory = compiled(other, sending(seed))
    return model, other, step, memory


def batch(seed: int, count: int = 6) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def both_left(do: Callable[[Any], Any], model: nn.Module, other: nn.Module, step: Any) -> None:
    """Do something with the plain model, and with the step: bits are the same after it."""
    left = []
    for one, run in ((model, model), (other, step)):
        torch.manual_seed(5)
        do(run)
        left.append(state(one))
    assert_same_bits(*left)


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
    model, other, step, memory = pair()

    def twice(run: Any) -> None:
        first, second, third = run(batch(0)), run(batch(1)), run(batch(2, count=3))
        second.backward()
        (2 * first + third).backward()

    both_left(twice, model, other, step)
    assert memory.use.calls == 3
    assert memory.use.pending == 0
    taken = memory.use.taken
    both_left(twice, model, other, step)
    assert memory.use.taken == taken  # of the stores that there were


def test_what_nobody_can_ask_for_is_let_go_of() -> None:
    model, other, step, memory = pair()
    for _ in range(3):
        step(batch(0))
    assert memory.use.pending == 1
    assert memory.use.taken == most_there(step.plans[0].plan, step.plans[0].problem.graph)  # one store
    other.load_state_dict(model.state_dict())
    both_left(lambda run: run(batch(0)).backward(), model, other, step)


def test_a_second_backward_of_a_call_is_refused() -> None:
    model, other, step, _ = pair()
    loss = step(batch(0))
    loss.backward(retain_graph=True)
    before = state(other)
    with pytest.raises(Unsupported, match="differentiated once for each call"):
        loss.backward()
    assert_same_bits(state(other), before)
    model.zero_grad()
    other.zero_grad()
    other.load_state_dict(model.state_dict())
    both_left(lambda run: run(batch(0)).backward(), model, other, step)


@pytest.mark.parametrize("broken", [HostError("read error"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_step_that_fails_leaves_nothing_behind(
    at: int, broken: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other, step, memory = pair()
    step(batch(0)).backward()
    other.zero_grad()
    other.load_state_dict(model.state_dict())
    before, really, waits = state(other), Store.wait, iter(range(10**6))

    def wait(store: Store, key: int) -> None:
        if next(waits) == at:
            raise broken
        really(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "wait", wait)
        with pytest.raises(type(broken)) as caught:
            step(batch(0)).backward()
    assert memory.use.pending == 0
    assert [p.grad for p in other.parameters()] == [None] * len([*other.parameters()])
    if at == 0:  # in the forward
        assert_same_bits(state(other)[:-1], before[:-1])
    other.load_state_dict(model.state_dict())
    both_left(lambda run: run(batch(0)).backward(), model, other, step)
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
        model, other, step, memory = pair(seed, Two())
        for which in (0, 1):
            both_left(lambda run: run(batch(0))[which].backward(), model, other, step)  # noqa: B023
            both_left(lambda run: sum(run(batch(1))).backward(), model, other, step)
            assert memory.use.pending == 0


def test_within_a_checkpoint() -> None:
    model, other, step, _ = pair()
    both_left(lambda run: checkpoint(run, batch(0), use_reentrant=False).backward(), model, other, step)


def test_hooks_that_put_copies_in_place_are_refused() -> None:
    _, _, step, _ = pair()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        loss = step(batch(0))
    with pytest.raises(Unsupported, match="hooks have put copies"):
        loss.backward()


def test_a_plan_of_no_step_has_no_second_memory() -> None:
    step, _ = compiled(Net(), sending(0))
    step(batch(0))
    (plan,) = step.plans
    forward = Write(plan.problem.codegen.joint, plan.problem.codegen.over)(plan.plan).forward
    with pytest.raises(HostError, match="was made for a problem"):
        forward([torch.zeros(()) for _ in forward.graph.find_nodes(op="placeholder")])
