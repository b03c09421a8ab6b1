"""Plans that are there when a test wants them: from what is known, or in place of what a search beside finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from checkmate import Problem, Solution, min_budget, solve
from checkmate.backends import plan_swap
from checkmate.core.plan import Plan
from checkmate.solvers import plan_cache
from checkmate.solvers.background_search import News
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.plan_cache import UnfinishedSearch
from checkmate.solvers.search.min_budget import least_runs
from checkmate.solvers.solve import refused

SECONDS = 0.1  # for each plan


class Offers:
    """Stands for a search: a test offers plans, and ends it."""

    def __init__(self, unfinished: UnfinishedSearch) -> None:
        self.unfinished = unfinished
        self.news, self.better, self.failure, self.goes_on = News(unfinished.start.cost, 0.0, 0.0), None, "", True
        self._plans = plans_within(unfinished.problem, unfinished.budget)
        self.count = 0

    def offer(self) -> None:
        """One more plan, another than the last."""
        self.count += 1
        plan = self._plans[self.count % len(self._plans)]
        self.news = self.better = News(self.unfinished.start.cost, 0.0, float(self.count), plan)

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


def begin_poorly(problem: Problem, budget: int, **options: object) -> tuple[Solution, UnfinishedSearch]:
    """Begin with the plan of the smallest budget, though there is more room: any search finds a better one."""
    plan = certify(problem, budget, least_runs(problem, time_limit=SECONDS)[1], method="auto")
    return plan, UnfinishedSearch(problem, budget, plan, seconds=10.0, gap=1e-4, spent=1.0, cache=False)


@contextmanager
def offered() -> Iterator[list[Offers]]:
    """Within the block steps begin with one plan, and go on by those that the test offers; the stand-ins in turn."""
    made: list[Offers] = []

    def begin(problem: Problem, budget: int, **options: object) -> tuple[Solution, UnfinishedSearch]:
        plan = solve(problem, budget, method="next-use", time_limit=SECONDS)
        return plan, UnfinishedSearch(problem, budget, plan, seconds=60.0, gap=1e-4, spent=1.0, cache=False)

    def search(unfinished: UnfinishedSearch) -> Offers:
        made.append(Offers(unfinished))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache, "begin", begin)
        patch.setattr(plan_swap, "Search", search)
        yield made


def plan(problem: Problem, budget: int, *, time_limit: float = 60.0, **options: Any) -> Solution:
    """Plan by `checkmate.solvers.plan_cache.begin`; an answer without a plan says why."""
    solution, _ = plan_cache.begin(problem, budget, time_limit=time_limit, **options)
    return solution if solution.plan is not None else refused(solution, time_limit=time_limit)
