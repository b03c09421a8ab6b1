"""Plans whose values wait in a second memory give the bits of plain PyTorch, and the bytes that they foretell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.networks import CASES
from checkmate.backends.eager import Backend
from checkmate.backends.planner import Options
from checkmate.codegen.second_memory import SecondMemories, SecondMemory
from checkmate.compiler import CompiledStep
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import simulate, verify
from checkmate.core.solution import Solution
from checkmate.solvers.common.certify import certify_plan
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import solve
from tests.support.sampling import slow
from tests.support.sent import with_transfers
from tests.support.stepping import assert_same, train

CPU = torch.device("cpu")
NETWORKS = ("mlp", "gpt2-sdpa")


def sending(seed: int, share_of_budget: float = 0.5) -> Callable[[Problem], Solution]:
    """A planner that sends values at random places of a plan that runs some ops again."""

    def plan(problem: Problem) -> Solution:
        alone = problem.with_host(None)
        least = min_budget(alone, time_limit=1.0).peak
        budget = int(least + share_of_budget * (problem.keep_all_peak - least))
        found = solve(alone, budget, time_limit=1.0).plan
        assert found is not None
        sent = with_transfers(problem, found, random.Random(seed))
        assert sent.sent
        return certify_plan(problem, 10**12, sent, Schedule.of_plan(problem.graph, sent), method="by hand")

    return plan


def compiled(fn: Any, planner: Callable[[Problem], Solution], **options: Any) -> tuple[Any, SecondMemory]:
    """A step with such plans, and where its values wait."""
    elsewhere = SecondMemories("file:/dev/shm", 10**9, cache=False)
    backend = Backend(planner, elsewhere=elsewhere, **options)
    return CompiledStep(fn, Options("1 TB"), backend), elsewhere.on(CPU)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mlp", "gpt2-sdpa", *(slow(n) for n in CASES if n not in ("mlp", "gpt2-sdpa"))])
def test_bits_and_bytes_are_those_of_the_plan(name: str, seed: int) -> None:
    module, step, batch = CASES[name].make(0)
    expected = train(module, step, batch)
    module, step, batch = CASES[name].make(0)
    run, memory = compiled(step, sending(seed))

    found = train(module, run, batch)

    assert_same(found, expected)
    (plan,) = run.plans
    assert verify(plan.plan, plan.problem) == []
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    assert memory.calls == 3
    assert memory.last.there == simulate(plan.plan, plan.problem).peak_there
    assert memory.pending == 0
