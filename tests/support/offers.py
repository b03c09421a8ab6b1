"""Plans that are there when a test wants them: from what is known, or in place of what a search beside finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from checkmate import Problem, Solution, min_budget, solve
from checkmate.backends import plan_swap
from checkmate.core.plan import Plan
from checkmate.core.solution import Query, Solver
from checkmate.solvers import plan_cache
from checkmate.solvers.background_search import News, first_plan
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.search.min_budget import least_memory
from checkmate.solvers.solve import attempt, refused

SECONDS = 0.1  # for each plan


class Offers:
    """Stands for a search: a test offers plans, and ends it."""

    def __init__(self, rest: Query) -> None:
        self.query = rest
        self.news, self.better, self.failure, self.goes_on = News(rest.start.cost, 0.0, 0.0), None, "", True
        self._plans = plans_within(rest.problem, rest.budget)
        self.count = 0

    def offer(self) -> None:
        """One more plan, another than the last."""
        self.count += 1
        plan = self._plans[self.count % len(self._plans)]
        self.news = self.better = News(self.query.start.cost, 0.0, float(self.count), plan)

    def start(self) -> None:
        """Nothing runs."""

    def end(self) -> None:
        """No more comes."""
        self.goes_on = False

    def wait(self, timeout: float | None = None) -> bool:
        """Say at once whether it has ended."""
        return not self.goes_on


def plans_within(problem: Problem, budget: int) -> list[Plan]:
    """Three plans of a problem, all within a budget, that differ: one that keeps much first, then less."""
    least = min_budget(problem, time_limit=SECONDS).peak
    within = [budget, (2 * budget + least) // 3, (budget + 2 * least) // 3]
    found = [solve(problem, b, method="next-use", time_limit=SECONDS).plan for b in within]
    plans = [plan for plan in found if plan is not None]
    assert len(set(plans)) == len(within)
    return plans


def left_open(plan: Solution, seconds: float) -> Solution:
    """The plan, with so many seconds left to look for a better one."""
    return replace(plan, rest=Query(plan.problem, plan.budget, seconds=seconds, start=plan, spent=1.0))


def begin_poorly(problem: Problem, budget: int) -> Solution:
    """Begin with the plan of the smallest budget, though there is more room: any search finds a better one."""
    plan = certify(problem, budget, least_memory(problem, time_limit=SECONDS)[1], method="auto")
    return left_open(plan, 10.0)


@contextmanager
def offered() -> Iterator[list[Offers]]:
    """Within the block steps begin with one plan, and go on by those that the test offers; the stand-ins in turn."""
    made: list[Offers] = []

    def begin(problem: Problem, budget: int) -> Solution:
        return left_open(solve(problem, budget, method="next-use", time_limit=SECONDS), 60.0)

    def search(rest: Query) -> Offers:
        made.append(Offers(rest))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        plan_by(patch, begin)
        patch.setattr(plan_swap, "Search", search)
        yield made


def plan_by(patch: pytest.MonkeyPatch, begin: Callable[[Problem, int], Solution]) -> None:
    """Have steps that are compiled planned by a function of the problem and the budget."""
    patch.setattr(plan_cache, "kept", lambda *known: lambda query: begin(query.problem, query.budget))


def plan(
    problem: Problem, budget: int, *, earlier: Sequence[Solution] = (), solver: Solver | None = None, **asked: Any
) -> Solution:
    """Plan by known plans, as compiled steps are; an answer without a plan says why."""
    query = Query(problem, budget, **{"cache": True, **asked})
    solution = plan_cache.kept(first_plan(solver or attempt), earlier)(query)
    return solution if solution.plan is not None else refused(solution, query.seconds)
