"""Problems at many sizes: how many traces there are, and a plan under a cap on its seconds: against brute force."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from benchmarks.networks.dags import unet
from checkmate import Problem
from checkmate.backends.planner import Options
from checkmate.core.problem import Profile
from checkmate.sizes import sized_steps
from checkmate.sizes.search import ONE_FORWARD, check_overhead, is_beyond, is_within, most_seconds, plan_within
from checkmate.sizes.sized_steps import SizedProblems, SizedSteps, arguments_of
from tests.support.oracle import interesting_budgets, optimum, outcomes, random_problem
from tests.support.sampling import in_turn


def grown(problem: Problem, size: int, block: int = 1) -> Problem:
    """The problem with bytes and seconds that grow with the size; sizes rounded up to a block, as allocators do."""
    values = tuple(replace(v, size_bytes=-(-v.size_bytes * size // block) * block) for v in problem.graph.values)
    seconds = problem.seconds * size + 0.5
    ways = tuple(replace(way, workspace=way.workspace * size) for way in problem.profile.ways)
    profile = Profile(seconds, problem.workspace * size, problem.resident + 10, ways=ways)
    return Problem(replace(problem.graph, values=values), profile)


def _sized(make_step: Callable[[int], Any], make_batch: Callable[[int], Any]) -> SizedSteps:
    return SizedSteps(make_step, lambda n: arguments_of(make_batch(n)), Options(profile="roofline:h100"))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The traces that are made: with a fixed size, or an open one."""
    made: list[str] = []

    def noted(kind: str) -> Callable[..., Any]:
        plain = getattr(sized_steps, kind)
        return lambda *args: made.append(kind) or plain(*args)  # type: ignore[func-returns-value]

    for kind in ("traced", "OpenTrace"):
        monkeypatch.setattr(sized_steps, kind, noted(kind))
    return made


def test_sizes_are_put_into_a_second_trace(traces: list[str]) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 3)
        problems = SizedProblems(_sized(lambda n: model, lambda n: torch.ones(n, 8)))
        peaks = [problems(n).keep_all_peak for n in (6, 20, 3, 500)]
        assert traces == ["traced", "OpenTrace"]
        assert problems(20) is problems(20)
        assert peaks == [
            checkmate.trace(model, torch.ones(n, 8), profile="roofline:h100").keep_all_peak for n in (6, 20, 3, 500)
        ]
        problems(1)  # a size of 1 is broadcast
        assert traces == ["traced", "OpenTrace", "traced"]


def test_from_a_batch_of_one_an_open_trace_is_held_against_one_of_its_own_size(traces: list[str]) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 3)
        problems = SizedProblems(_sized(lambda n: model, lambda n: torch.ones(n, 8)))
        for n in (1, 16, 30, 40):
            problems(n)
    assert traces == ["traced", "OpenTrace", "traced"]


def test_each_size_is_traced_where_its_step_is_made_for_it_or_its_sizes_are_fixed(
    traces: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"), caplog.at_level(logging.INFO, "checkmate.sizes"):
        problems = SizedProblems(_sized(lambda n: nn.Linear(64, n), lambda n: torch.ones(4, 64)))
        assert [problems(n).graph.values[0].size_bytes for n in (8, 16, 32)] == [64 * n * 4 for n in (8, 16, 32)]
        assert traces == ["traced"] * 3
        assert "each size has a step of its own" in caplog.text
        model = nn.Linear(8, 3)
        step = lambda x: (model(x) * torch.linspace(0.0, 1.0, len(x), device=x.device)[:, None]).sum()  # noqa: E731
        problems = SizedProblems(_sized(lambda n: step, lambda n: torch.ones(n, 8)))
        for n in (8, 16, 32, 64):
            problems(n)
    assert traces[3:].count("traced") == 4
    assert "PyTorch traces it for one size only" in caplog.text


def test_open_sizes_of_another_step_than_with_fixed_ones_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 3)
        other = checkmate.trace(nn.Linear(8, 4), torch.ones(9, 8), profile="roofline:h100")
        monkeypatch.setattr(sized_steps.OpenTrace, "problem", lambda self, batch: other)
        problems = SizedProblems(_sized(lambda n: model, lambda n: torch.ones(n, 8)))
        expected = [checkmate.trace(model, torch.ones(n, 8), profile="roofline:h100").keep_all_peak for n in (4, 9)]
        assert [problems(n).keep_all_peak for n in (4, 9)] == expected


@in_turn(wrong=[True, -0.1, math.inf, math.nan, "two-forwards", [1]])
def test_a_cap_that_makes_no_sense_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="one-forward"):
        check_overhead(wrong)


@in_turn(seed=range(25))
def test_a_plan_under_a_cap_is_found_where_there_is_one_and_else_refuted(seed: int) -> None:
    problem = random_problem(seed, most_ops=4)
    found = outcomes(problem)
    for budget in interesting_budgets(found):
        best = optimum(found, max(1, budget))
        for overhead in (None, ONE_FORWARD, 0.0, 0.2, 1.0):
            cap = most_seconds(problem, overhead)
            solution = plan_within(problem, max(1, budget), cap, time_limit=5.0)
            if best <= cap and best < math.inf:
                assert is_within(solution, cap), (budget, overhead)
                assert solution.cost <= cap * (1 + 1e-9)
            else:
                assert not is_within(solution, cap)
                assert is_beyond(solution, cap), (budget, overhead)


@pytest.mark.slow
def test_it_stops_at_the_first_plan_under_the_cap() -> None:
    """Proving the least recomputation of this step takes far longer."""
    problem = unet()
    budget = problem.keep_all_peak // 2
    solution = plan_within(problem, budget, most_seconds(problem, ONE_FORWARD), time_limit=30.0)
    assert is_within(solution, most_seconds(problem, ONE_FORWARD))
    assert solution.seconds < 5
