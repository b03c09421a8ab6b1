"""The ways to make a step take less memory: the smallest budget of each, and a plan for the room or that budget."""

from __future__ import annotations

import time

from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Query, Solution
from checkmate.fitting.answer import NOT_ASKED, MemoryOption
from checkmate.fitting.memory_parts import without_parts
from checkmate.fitting.target_device import TargetDevice, written
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import attempt, cheapest_split

PATIENCE = 20.0  # seconds to look for a first plan, which is mostly found in much less
ANY_GAP, GAP = 1.0, 1e-3  # at which to stop
NAMES = ("recomputation", "with its loss in parts", "with a second memory")
RECOMPUTATION, IN_PARTS, WITH_HOST = NAMES


def ways_of(
    problem: Problem,
    place: TargetDevice,
    host: Host | None,
    seconds: float,
    deadline: float,
    *,
    fits: bool,
    everything: bool,
) -> list[MemoryOption]:
    """The ways to make the step take less, each with its smallest budget, and a plan for that or for the room.

    Once one ``fits``, as plain PyTorch may, the others are looked at only if ``everything`` is asked for, and then
    none that would go on beyond the deadline if it took as long as the longest before it.
    """
    there = place.host(host)
    ways: list[MemoryOption] = []
    known: MemoryOption | None = None  # the last way that was looked at
    longest = 0.0
    for name in NAMES:
        began, why_not = time.perf_counter(), ""
        planned_fits = any(way.fits for way in ways)
        if (fits or planned_fits) and not everything:
            why_not = NOT_ASKED
        elif planned_fits and began + longest > deadline:
            why_not = "not looked at, for want of time"
        elif name == IN_PARTS and (problem.next_split is None or problem.next_split() is None):
            why_not = "no loss that would help"
        elif name == WITH_HOST and there is None:
            why_not = "give host=checkmate.Host(...)"
        if why_not:
            ways.append(MemoryOption(name, {}, None, None, fits=False, why_not=why_not))
            continue
        one, options = without_parts(problem) if name == RECOMPUTATION else problem, {}
        if name == WITH_HOST and there is not None:
            one, options = problem.with_host(there), {"host_budget": f'"{written(there.budget)}"'}
        # The smallest budget: that of an earlier way will do, and a plan at the bound is often found where other
        # searches had no time.
        ends = min_budget(one, time_limit=seconds)
        smallest = ends.peak if known is None else min(ends.peak, known.smallest or ends.peak)
        if not ends.proven:
            smallest = min(smallest, planned(one, ends.bound, seconds).peak or smallest)
        # The plan, for the room or that budget; without a host that of an earlier way will do.
        if known is not None and known.fits and known.solution is not None and one.host is None:
            solution = known.solution
        else:
            budget = place.budget if ends.bound <= place.budget else smallest
            solution = planned(one, budget, PATIENCE, improve=seconds)
            if solution.peak is None:
                solution = planned(one, smallest, PATIENCE)
        smallest = min(smallest, solution.peak or smallest)
        fits_here = solution.peak is not None and solution.peak <= place.budget
        why_not = "" if solution.peak is not None else "no plan found in time"
        reserved = place.reserved_for(solution)
        known = MemoryOption(name, options, smallest, ends.bound, fits_here, solution, reserved, why_not)
        ways.append(known)
        longest = max(longest, time.perf_counter() - began)
    return ways


def planned(problem: Problem, budget: int, patience: float, *, improve: float = 0.0) -> Solution:
    """The first plan found within a budget, and a better one if it may be far from the best.

    Args:
        patience: seconds until there is one.
        improve: seconds more to look for a better one.
    """

    def improved(query: Query) -> Solution:
        first = attempt(query, progress=False)
        if first.plan is None or first.gap <= GAP or not improve:
            return first
        better = attempt(Query(query.problem, budget, seconds=improve, gap=GAP, start=first), progress=False)
        return better if better.plan is not None and better.cost <= first.cost else first

    solver = cheapest_split(improved, look_on=bool(improve))
    return solver(Query(problem, budget, seconds=patience, gap=ANY_GAP))
