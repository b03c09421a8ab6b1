"""The smallest budget: the smallest peak that a known plan reaches, and what no schedule stays below.

    clipped gradients kept, or made twice -> eviction passes -> search backwards: plans from above, refutations from
    below, wider and wider until they meet -> what the plan need not run again is dropped

The two ends mostly meet exactly, or within the grain: values so small that all of them together do not matter are left
out of the search, and counted as if they were always at hand once made, and as if they always could be written over.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.rules import Rules, with_rules
from checkmate.core.schedule import KIND
from checkmate.core.solution import check_problem
from checkmate.solvers.common.fetch_ops import WithFetches, plain_events, sendable, with_fetches
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.made_twice import second_runs
from checkmate.solvers.common.place_transfers import place_transfers
from checkmate.solvers.common.runs import as_matrix, lowered, obeys_limits, on_demand, peak_of
from checkmate.solvers.common.task import Clock, OutOfTime
from checkmate.solvers.search.backward_search import find_plan, refute
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.eviction import Stuck, Weights, run_pass
from checkmate.solvers.search.next_use import GRID
from checkmate.solvers.search.value_sets import ValueSets, grain_of
from checkmate.units import format_bytes

log = logging.getLogger("checkmate.solve")

TIME_LIMIT = 10.0  # seconds
MOST_OPS_EXACT = 24  # up to here the two ends meet
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # of the way from the bound to the peak, to look for a plan at
SHARE_OF_LAST = 0.7  # of the time, for the step split as far as that helps; the rest is for what is split less
SHARE_WITHOUT_HOST = 0.4  # of the time, where there is a second memory
SHARE = 0.85  # of the time to search in; the rest is for `drop_runs`
SHARE_OF_EVICTION, SHARE_OF_PROOFS = 0.2, 0.15  # of what is left of that: eviction passes, proofs of one width
SHARE_OF_TWICE = 0.4  # of what is left of that: plans of one width that make gradients twice
GRAIN = 5e-4  # of the smallest budget: what all values below the grain have together
CLOSE = 1e-3  # a smaller gap is not worth more time
CLOSE_PASSES, CLOSE_PROOFS = 0.01, 0.1 * CLOSE  # the gaps at which bisections end: by eviction passes, by proofs
WIDTHS = (1, 4, 8, 16, 24, 32, 64, 128, 256)  # states that a search pursues at most: more find more, and take longer
WIDTH_TWICE = 4  # of the first searches where gradients can be made twice
REMEMBERED = 32  # problems
NEAR_WIDER = 16  # times as many states are pursued there
NEAR = 10  # stages after one that a search did not get beyond, to look for a proof in first
WIDE_ENOUGH = 2000  # for the smallest problems, where nothing is to be dropped; beyond it comparing them takes too long


@dataclass(frozen=True)
class MinBudget:
    """The smallest budget of a problem, from both sides.

    >>> print(MinBudget(peak=2000, bound=1500))
    2.00 kB (no schedule fits below 1.50 kB: each op once a stage at most, in PyTorch's order)
    """

    peak: int  # bytes: a plan is known that reaches no more
    bound: int  # bytes: no schedule reaches less
    splits: tuple[str, ...] = field(default=(), repr=False)  # what runs in parts there, in words

    @property
    def gap(self) -> float:
        """(peak - bound) / peak: at most by this share could the smallest budget be smaller."""
        return (self.peak - self.bound) / self.peak if self.peak else 0.0

    @property
    def proven(self) -> bool:
        """No schedule fits a smaller budget."""
        return self.peak == self.bound

    def __str__(self) -> str:
        below = "less" if self.proven else f"below {format_bytes(self.bound)}"
        return f"{format_bytes(self.peak)} ({'; '.join((f'no schedule fits {below}: {KIND}', *self.splits))})"


@dataclass
class _Known:
    """What is known of a problem."""

    peak: int
    R: np.ndarray  # (T, T) bool, a schedule of that peak
    bound: int
    op: int  # it stands in the way of less than the bound
    time_limit: float = 0.0  # seconds that were granted for it

    @property
    def is_close(self) -> bool:
        return self.peak - self.bound <= CLOSE * self.peak


Mark = tuple[str, str, int]
_known: OrderedDict[Mark, _Known] = OrderedDict()  # by `_mark`, the last used at the end


def min_budget(problem: Problem, *, time_limit: float = TIME_LIMIT, rules: Rules | None = None) -> MinBudget:
    """The smallest peak of a plan that is found, and a proven lower bound of it; `least_runs` has that plan.

    Both are exact for problems of up to `MOST_OPS_EXACT` ops, unless time runs out, or a rule says how often an op may
    run. What is found is remembered, also for a problem that is equal but for its costs; it is looked for again only
    with more time than before, where that may help. A step of PyTorch that can be split is split as far as that helps.

    Raises:
        TypeError: if the problem is none.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> min_budget(chain)
    MinBudget(peak=3, bound=3)
    """
    check_problem(problem)
    *others, last = (problem if rules is None else with_rules(problem, rules)).and_smaller()
    clock = Clock(time_limit)
    ends = ends_of(last, time_limit=time_limit * (SHARE_OF_LAST if others else 1))
    peak, splits, bound = ends.peak, last.splits, ends.bound
    for other in reversed(others):  # parts of one op may stand in the way of others: what is split less may take less
        floor = int(other.unavoidable_bytes.max())
        bound = min(bound, floor)
        if floor < (1 - CLOSE) * peak:
            found = ends_of(other, time_limit=clock.left / 2)
            if found.peak < peak:
                peak, splits = found.peak, other.splits
    return MinBudget(peak, bound, splits)


def ends_of(problem: Problem, *, time_limit: float = TIME_LIMIT) -> MinBudget:
    """The same of a problem as it is, not split further."""
    if problem.host is not None:
        return _ends_with_host(problem, time_limit)
    known = _find(problem, time_limit)
    return MinBudget(known.peak, known.bound)


def _ends_with_host(problem: Problem, time_limit: float) -> MinBudget:
    """Where all that may be sent is, and comes back for nothing, no budget can be smaller; the plan waits for links."""
    plain = _find(problem.with_host(None), SHARE_WITHOUT_HOST * time_limit)
    most, plan = with_most_sent(problem, time_limit=(1 - SHARE_WITHOUT_HOST) * time_limit)
    bound = _find(most.problem, 0.0).bound
    peak = plain.peak if plan is None else min(plain.peak, simulator.simulate(plan, problem).peak)
    return MinBudget(peak, min(bound, peak))


def with_most_sent(problem: Problem, *, time_limit: float = TIME_LIMIT) -> tuple[WithFetches, Plan | None]:
    """The problem in which all that may be sent is, and the plan of its smallest peak.

    Where the host budget has no room for that, fewer values are sent in the plan, the largest ones.
    """
    assert problem.host is not None
    sent = sorted(sendable(problem), key=lambda v: -int(problem.sizes[v]))
    every = with_fetches(problem, sent)
    fetching = every
    while sent:
        peak, R = least_runs(fetching.problem, time_limit=time_limit)
        plan = place_transfers(problem, peak, *plain_events(fetching, lowered(fetching.problem, R)))
        if plan is not None and simulator.simulate(plan, problem).peak_there <= problem.host.budget:
            return every, plan
        sent, time_limit = sent[: len(sent) // 2], time_limit / 2
        fetching = with_fetches(problem, sent)
    return every, None


def least_runs(problem: Problem, *, time_limit: float = TIME_LIMIT) -> tuple[int, np.ndarray]:
    """The smallest peak that a plan without a second memory was found to reach, and its R (T, T)."""
    known = _find(problem.with_host(None) if problem.host is not None else problem, time_limit)
    return known.peak, known.R


def bottleneck(problem: Problem) -> int:
    """The op that stands in the way of a smaller budget, as far as it is known."""
    return _find(problem, 0.0).op if problem.host is None else int(problem.unavoidable_bytes.argmax())


def _find(problem: Problem, time_limit: float) -> _Known:
    mark = _mark(problem)
    known = _known.get(mark)
    if known is None:
        peak, R = _first_plan(problem)
        op = int(problem.unavoidable_bytes.argmax())
        known = _Known(peak, R, int(problem.unavoidable_bytes[op]), op)
        _known[mark] = known
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(mark)
    exact = len(problem.graph.ops) <= MOST_OPS_EXACT
    done = known.peak == known.bound if exact else known.is_close
    if not done and time_limit > known.time_limit:
        known.time_limit = time_limit
        clock = Clock(time_limit)
        ends = _Ends(problem, known, clock.share(SHARE), exact=exact)
        with contextlib.suppress(OutOfTime):
            ends.close()
        ends.drop_runs(clock)
        log.info("smallest budget: %s, after %.1f s", MinBudget(known.peak, known.bound), clock.elapsed)
    return known


def _first_plan(problem: Problem) -> tuple[int, np.ndarray]:
    """The peak of a plan, and its runs: each op once, where no rule has it run again."""
    if not problem.limits.gone:
        return problem.keep_all_peak, np.eye(len(problem.graph.ops), dtype=bool)
    R = on_demand(problem, {})
    return peak_of(problem, R), R


def _mark(problem: Problem) -> Mark:
    """Equal for problems that differ in their costs only: a step captured again has the same smallest budget."""
    prints = fingerprints(problem)
    return prints.structure, prints.sizes, problem.resident


class _Ends:
    """The two ends, drawn together until they meet or time runs out."""

    def __init__(self, problem: Problem, known: _Known, clock: Clock, *, exact: bool) -> None:
        self.problem, self.known, self.clock, self.exact = problem, known, clock, exact
        grain = -1 if exact else grain_of(problem, int(GRAIN * known.bound))
        self.grain = max(0, grain)
        self.sets = ValueSets(problem, grain=self.grain)
        self.once = self._sets_with_limited_ops_once() if problem.limits.most_runs else self.sets
        self.small = int(problem.sizes[problem.sizes <= grain].sum()) + (self.grain if problem.profile.ways else 0)
        self.homes = () if exact else second_runs(problem)  # of what waits long, as clipped gradients do
        self.stuck: set[int] = set()  # stages that searches for plans did not get beyond
        self.wasteful = False  # the plan makes more again than it needs to

    def close(self) -> None:
        """Plans and refutations, wider and wider."""
        if self.exact:
            before = -1
            while before < self.known.bound < self.known.peak:
                before = self.known.bound
                self._plan(before, WIDE_ENOUGH)
            if self.known.bound == self.known.peak:
                return
        if self.homes:  # shorter searches than all others
            self._refute(WIDTHS[0])
            self._make_twice(WIDTH_TWICE)
        if self._plan(self.known.bound, WIDTHS[0]) and self._is_open:
            self._evict(GRID[:1])
            if self.problem.limits.most_runs:  # searches know not how often an op has run; passes do
                self._evict(GRID)
        for width in WIDTHS:
            if self._is_open:
                self._refute(width)
            if width > WIDTH_TWICE:
                self._make_twice(width)
            if self._is_open:
                self._descend(width)

    @property
    def _is_open(self) -> bool:
        return not self.known.is_close

    def _plan(self, budget: int, width: int) -> bool:
        """Look for a plan within a budget, small values aside; True if there is more to look for."""
        R, search = find_plan(self.sets, budget, width=width, clock=self.clock, exact=self.exact)
        if R is None:
            self.stuck.add(search.reached)
            if search.complete and search.least > self.known.bound:
                self.known.bound, self.known.op = min(search.least, self.known.peak), search.reached
            return True
        if not obeys_limits(self.problem, R):  # it knows not how often an op has run: let those under a rule run once
            R, _ = find_plan(self.once, budget, width=width, clock=self.clock, exact=self.exact)
        if R is None or not obeys_limits(self.problem, R):
            return True
        self._offer(R, budget + self.small)
        return False

    def _sets_with_limited_ops_once(self) -> ValueSets:
        graph, limited = self.problem.graph, self.problem.limits.most_runs
        ops = [replace(op, pinned=op.pinned or "is limited") if k in limited else op for k, op in enumerate(graph.ops)]
        return ValueSets(replace(self.problem, graph=replace(graph, ops=tuple(ops))), grain=self.grain)

    def _offer(self, R: np.ndarray, budget: int) -> None:
        """Take a schedule that fits a budget, if it is better; its peak is simulated once runs are dropped."""
        if budget < self.known.peak:
            self.known.R, self.known.peak, self.wasteful = R, max(budget, self.known.bound), True

    def drop_runs(self, clock: Clock) -> None:
        """Drop what the plan need not run again, and see what its peak is."""
        if self.wasteful:
            self.known.R = drop_runs(self.problem, self.known.peak, self.known.R, clock)
            self.known.peak = peak_of(self.problem, self.known.R)

    def _evict(self, kinds: Sequence[Weights]) -> None:
        """A peak that is easily reached: a bisection with eviction passes of these kinds."""
        tables, low, clock = Tables.of(self.problem), self.known.bound, self.clock.share(SHARE_OF_EVICTION)
        while self.known.peak - low > CLOSE_PASSES * low:
            middle = (low + self.known.peak) // 2
            tried = (run_pass(tables, middle, weights) for weights in kinds)
            stages = next((found for found in tried if not isinstance(found, Stuck)), None)
            if stages is None:
                low = middle
            else:
                self.known.R = as_matrix(stages)
                self.known.peak = max(peak_of(self.problem, self.known.R), self.known.bound)
            if clock.is_over:
                return

    def _refute(self, width: int) -> None:
        """Raise the bound, stage by stage, those first in which most is needed."""
        sets, known = self.sets, self.known
        clock = self.clock.share(SHARE_OF_PROOFS)
        near = dict.fromkeys(t + i for i in range(NEAR) for t in sorted(self.stuck) if t + i < sets.T)
        for t in dict.fromkeys([*near, *sorted(range(sets.T), key=lambda t: -sets.at(t, t, 0))]):
            high = known.peak
            budget = known.bound
            while budget < high and self._is_open:
                try:
                    wide = min(WIDE_ENOUGH // 2, NEAR_WIDER * width) if t in near else width
                    proven = refute(sets, budget, t, width=wide, clock=clock)
                except OutOfTime:
                    return
                if proven is None and budget == known.bound:
                    break
                if proven is None:
                    high = budget
                else:
                    known.bound, known.op = min(proven, known.peak), t
                budget = known.bound if high - known.bound <= CLOSE_PROOFS * high else (known.bound + high) // 2

    def _make_twice(self, width: int) -> None:
        """Lower the peak by plans in which it is said beforehand what stays and what is made a second time."""
        low, clock = self.known.bound, self.clock.share(SHARE_OF_TWICE)
        with contextlib.suppress(OutOfTime):
            while self.homes and self.known.peak - self.small - low > CLOSE * low:
                budget = (low + self.known.peak - self.small) // 2
                found = (find_plan(self.sets, budget, width=width, clock=clock, homes=homes)[0] for homes in self.homes)
                R = next((R for R in found if R is not None and obeys_limits(self.problem, R)), None)
                if R is None:
                    low = budget
                else:
                    self._offer(R, budget + self.small)

    def _descend(self, width: int) -> None:
        """Lower the peak: look for a plan at the bound itself, then from there up to what is known.

        Which states are pursued is a matter of luck, and more room may be bad luck: so all is tried, the least first.
        """
        low, room = self.known.bound, self.known.peak - self.small - self.known.bound
        for share in SHARES:
            if room <= 0 or not self._plan(low + int(share * room), width):
                return
