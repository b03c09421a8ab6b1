"""The ways to have a step take less: the smallest budget of each, and a plan for the room or for that budget."""

from __future__ import annotations

import time
from collections.abc import Iterator

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.fitting.answer import Way
from checkmate.fitting.memory_parts import without_parts, without_rounding
from checkmate.fitting.place import Place, written
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import attempt, cheapest_split

PATIENCE = 20.0  # seconds to look for a first plan, which is mostly found in much less
ANY_GAP, GAP = 1.0, 1e-3  # at which to stop
FOR_WANT_OF_TIME = "not looked at, for want of time"


def ways_of(problem: Problem, place: Place, host: Host | None, seconds: float, deadline: float) -> Iterator[Way]:
    """Each way to have the step take less, with its smallest budget, and a plan for the room or for that budget.

    Where one fits, no other is looked at that would go on beyond the deadline if it took as long as those before.
    """
    exact, longest, began = without_rounding(problem), 0.0, time.perf_counter()
    plain = _way("recomputation", without_parts(problem), place, seconds)
    yield plain

    def late() -> bool:
        nonlocal longest, began
        now = time.perf_counter()
        longest, began = max(longest, now - began), now
        return in_parts.fits and now + longest > deadline

    in_parts = plain
    if late():
        yield _left_out("with ops in parts", FOR_WANT_OF_TIME)
    elif exact.smaller is not None and exact.smaller() is not None:
        in_parts = _way("with ops in parts", exact, place, seconds, known=plain)
        yield in_parts
    else:
        yield _left_out("with ops in parts", "no op that would help")
    there = place.host(host)
    if there is None:
        yield _left_out("with a second memory", "give host=checkmate.Host(...)")
    elif late():
        yield _left_out("with a second memory", FOR_WANT_OF_TIME)
    else:
        options = {"host_budget": f'"{written(there.budget)}"'}
        yield _way(
            "with a second memory", exact.with_host(there), place, seconds, options=options, no_more_than=in_parts
        )
    if late():
        yield _left_out("with rounding", FOR_WANT_OF_TIME)
    elif not any(one.rounding for one in problem.and_smaller()):
        yield _left_out("with rounding", "no sum that would help")
    else:
        yield _way("with rounding", problem, place, seconds, options={"numerics": '"rounding"'}, known=in_parts)


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

    def find(one: Problem, seconds: float) -> Solution:
        found = attempt(one, budget, time_limit=seconds, gap=ANY_GAP, progress=False)
        if found.plan is None or found.gap <= GAP or not improve:
            return found
        better = attempt(one, budget, time_limit=improve, gap=GAP, start=found, progress=False)
        return better if better.plan is not None and better.cost <= found.cost else found

    return cheapest_split(problem, find, patience, look_on=bool(improve))
