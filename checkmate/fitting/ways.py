"""The ways to have a step take less: the smallest budget of each, and a plan for the room or for that budget."""

from __future__ import annotations

import time

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.fitting.answer import NOT_ASKED, Way
from checkmate.fitting.memory_parts import without_parts
from checkmate.fitting.place import Place, written
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import attempt, cheapest_split

PATIENCE = 20.0  # seconds to look for a first plan, which is mostly found in much less
ANY_GAP, GAP = 1.0, 1e-3  # at which to stop
NAMES = ("recomputation", "with its loss in parts", "with a second memory")
RECOMPUTATION, IN_PARTS, WITH_HOST = NAMES
FOR_WANT_OF_TIME = "not looked at, for want of time"


def ways_of(
    problem: Problem,
    place: Place,
    host: Host | None,
    seconds: float,
    deadline: float,
    *,
    fits: bool,
    everything: bool,
) -> list[Way]:
    """Each way to have the step take less, with its smallest budget, and a plan for the room or for that budget.

    Once one ``fits``, as plain PyTorch may, the others are looked at only if ``everything`` is asked for, and then
    none that would go on beyond the deadline if it took as long as the longest before it.
    """
    there = place.host(host)
    ways: list[Way] = []
    known: Way | None = None  # what recomputation has found, with its loss in parts where that was looked at
    longest = 0.0
    for name in NAMES:
        began = time.perf_counter()
        planned_fits = any(way.fits for way in ways)
        if (fits or planned_fits) and not everything:
            way = _left_out(name, NOT_ASKED)
        elif planned_fits and began + longest > deadline:
            way = _left_out(name, FOR_WANT_OF_TIME)
        elif name == RECOMPUTATION:
            way = known = _way(name, without_parts(problem), place, seconds)
        elif name == IN_PARTS and (problem.smaller is None or problem.smaller() is None):
            way = _left_out(name, "no loss that would help")
        elif name == IN_PARTS:
            way = known = _way(name, problem, place, seconds, known=known)
        elif name == WITH_HOST and there is None:
            way = _left_out(name, "give host=checkmate.Host(...)")
        else:
            assert there is not None
            options = {"host_budget": f'"{written(there.budget)}"'}
            way = _way(name, problem.with_host(there), place, seconds, options=options, no_more_than=known)
        ways.append(way)
        longest = max(longest, time.perf_counter() - began)
    return ways


def _left_out(name: str, why: str) -> Way:
    return Way(name, {}, None, None, fits=False, why_not=why)


def _way(
    name: str,
    problem: Problem,
    place: Place,
    seconds: float,
    *,
    options: dict[str, str] | None = None,
    known: Way | None = None,
    no_more_than: Way | None = None,
) -> Way:
    """A way, whose plan is one that is ``known`` already where that is within the room.

    ``no_more_than``: a way that this one may go as well.
    """
    ends = min_budget(problem, time_limit=seconds)
    smallest, bound = ends.peak, ends.bound
    if (other := known or no_more_than) is not None:
        smallest = min(smallest, other.smallest or smallest)
    if not ends.proven:  # a plan at the bound is often found where other searches had no time
        smallest = min(smallest, planned(problem, bound, seconds).peak or smallest)
    if known is not None and known.fits and known.solution is not None:
        solution = known.solution
    else:
        budget = place.budget if bound <= place.budget else smallest
        solution = planned(problem, budget, PATIENCE, improve=seconds)
        if solution.peak is None:
            solution = planned(problem, smallest, PATIENCE)
    smallest = min(smallest, solution.peak or smallest)
    fits_ = solution.peak is not None and solution.peak <= place.budget
    about = solution, place.reserved_for(solution), "" if solution.peak is not None else "no plan found in time"
    return Way(name, options or {}, smallest, bound, fits_, *about)


def planned(problem: Problem, budget: int, patience: float, *, improve: float = 0.0) -> Solution:
    """The first plan within a budget that is found, and if it may be far from the best, a better one.

    Args:
        patience: seconds until there is one.
        improve: seconds more to look for a better one.
    """

    def find(one: Problem, seconds: float, patience: float) -> Solution:
        found = attempt(one, budget, time_limit=seconds, patience=patience, gap=ANY_GAP, progress=False)
        if found.plan is None or found.gap <= GAP or not improve:
            return found
        better = attempt(one, budget, time_limit=improve, gap=GAP, start=found, progress=False)
        return better if better.plan is not None and better.cost <= found.cost else found

    return cheapest_split(problem, find, patience, look_on=bool(improve))
