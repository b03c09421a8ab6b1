"""The smallest budget: the smallest peak of a known plan, and a proven bound for all plans.

    what runs again in any order, straight ahead: plans and proofs -> clipped gradients kept, or made twice -> eviction
    passes -> search backwards: schedules from above, refutations from below, wider and wider until they meet -> what is
    proven of schedules is tried on all plans -> what the plan need not run again is dropped

The two ends mostly meet exactly, or within the grain: values so small that all of them together do not matter are left
out of the search, and counted as if they were always at hand once made, and as if they always could be written over.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.rules import Rules, with_rules
from checkmate.core.solution import check_problem
from checkmate.solvers.common.fetches import WithFetches, place_transfers, plain_events, sendable, with_fetches
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, OutOfTime
from checkmate.solvers.common.schedules import Stages, as_matrix, as_stages, lowered, obeys_limits, on_demand, peak_of
from checkmate.solvers.search.backward_search import ANY, AnyOrder, Homes, far_enough, find_plan, refute
from checkmate.solvers.search.drop_runs import drop_runs
from checkmate.solvers.search.greedy import GRID, DeadEnd, Weights, run_pass
from checkmate.solvers.search.late_gradients import second_runs
from checkmate.solvers.search.value_sets import ValueSets, grain_of
from checkmate.units import format_bytes

log = logging.getLogger("checkmate.solve")

TIME_LIMIT = 10.0  # seconds
MOST_OPS_EXACT = 24  # up to here the two ends meet
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # of the way from the bound to the peak, to look for a plan at
SHARE_OF_LAST = 0.7  # of the time, for the step split as far as that helps; the rest is for what is split less
SHARE_WITHOUT_HOST = 0.4  # of the time, where there is a second memory
SHARE = 0.85  # of the time to search in; the rest is for `drop_runs`
SHARE_OF_ANY_ORDER = 0.8  # of the time that is left once schedules have been searched
SHARE_OF_EVICTION, SHARE_OF_PROOFS = 0.2, 0.15  # of what is left of that: eviction passes, proofs of one width
SHARE_OF_TWICE = 0.4  # of what is left of that: plans of one width that make gradients twice
GRAIN = 5e-4  # of the smallest budget: what all values below the grain have together
CLOSE = 1e-3  # a smaller gap is not worth more time
CLOSE_PASSES, CLOSE_PROOFS = 0.01, 0.1 * CLOSE  # the gaps at which bisections end: by eviction passes, by proofs
WIDTHS = (1, 4, 8, 16, 24, 32, 64, 128, 256)  # states that a search pursues at most: more find more, and take longer
WIDTHS_OF_SMALL = (1, 4, 16, 64)  # states of the search for any plan within a budget
WIDTH_TWICE = 4  # of the first searches where gradients can be made twice
REMEMBERED = 32  # problems
SLOW = 10.0  # times the seconds of keeping everything: from there on a roomier budget is named beside the smallest
TWICE, NEAR_TWICE = 2.0, 0.02  # what it takes less than, and how near, as a share of it, it is found
SECONDS_FOR_TWICE = 2.0
NEAR_WIDER = 16  # times as many states are pursued there
NEAR = 10  # stages after one that a search did not get beyond, to look for a proof in first
MOST_STATES, MOST_STATES_OF_PLAN = 10_000, 3_000  # in any order; plans are found straight ahead, or not at all
WIDE_ENOUGH = 2000  # for the smallest problems, where nothing is to be dropped; beyond it comparing them takes too long


@dataclass(frozen=True)
class SlowBudget:
    """The seconds of the smallest budget's first plan, and a budget with fewer, both times those of keeping everything.

    >>> print(SlowBudget(times=10.0, budget=3000, times_there=1.9))
    a step takes at most 10.0 times as long there, with 3.00 kB 1.9 times
    """

    times: float
    budget: int  # bytes: the smallest for which a first plan takes less than `TWICE`
    times_there: float

    def __str__(self) -> str:
        roomier = f"with {format_bytes(self.budget, up=True)} {self.times_there:.1f} times"
        return f"a step takes at most {self.times:.1f} times as long there, {roomier}"


@dataclass(frozen=True)
class MinBudget:
    """The smallest budget of a problem, from both sides.

    >>> print(MinBudget(peak=2000, bound=1500))
    2.00 kB (no plan fits below 1.50 kB)
    """

    peak: int  # bytes: a plan is known that reaches no more
    bound: int  # bytes: no plan reaches less, in whatever order it runs ops again
    splits: tuple[str, ...] = field(default=(), repr=False)  # the parts that the step runs in there, in words
    slow: SlowBudget | None = field(default=None, repr=False)  # where its plan takes much longer

    @property
    def gap(self) -> float:
        """(peak - bound) / peak: the largest share by which the smallest budget could be smaller."""
        return (self.peak - self.bound) / self.peak if self.peak else 0.0

    @property
    def proven(self) -> bool:
        """Tell whether no plan fits a smaller budget."""
        return self.peak == self.bound

    def __str__(self) -> str:
        below = "less" if self.proven else f"below {format_bytes(self.bound)}"
        slow = () if self.slow is None else (str(self.slow),)
        return f"{format_bytes(self.peak, up=True)} ({'; '.join((f'no plan fits {below}', *self.splits, *slow))})"


@dataclass
class _Known:
    """The best plans and bounds of a problem so far."""

    peak: int
    R: np.ndarray  # (T, T) bool, a schedule of that peak
    bound: int  # no schedule reaches less
    op: int  # it stands in the way of less than the bound
    least: int  # no plan reaches less
    runs: Stages | None = None  # in each stage of a plan whose peak is below that of R
    peak_of_runs: int = 0  # bytes of that
    time_limit: float = 0.0  # seconds that were granted for it

    @property
    def is_close(self) -> bool:
        return self.peak - self.bound <= CLOSE * self.peak

    @property
    def best(self) -> int:
        """The smallest peak of all known plans."""
        return self.peak if self.runs is None else min(self.peak, self.peak_of_runs)

    def is_done(self, *, exact: bool) -> bool:
        """Tell whether a longer search can find nothing more."""
        if exact:
            return self.peak == self.bound and self.best == self.least
        return self.is_close and self.best - self.least <= CLOSE * self.best


_known: OrderedDict[tuple[str, str, int], _Known] = OrderedDict()  # the last used at the end


def min_budget(problem: Problem, *, time_limit: float = TIME_LIMIT, rules: Rules | None = None) -> MinBudget:
    """The smallest peak that a plan is found for, and a proven lower bound; `least_plan` gives the plan.

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
    *earlier, last = (problem if rules is None else with_rules(problem, rules)).splits_in_turn()
    clock = Clock(time_limit)
    ends = ends_of(last, time_limit=time_limit * (SHARE_OF_LAST if earlier else 1))
    peak, splits, bound = ends.peak, last.splits, ends.bound
    for split in reversed(earlier):  # a split holds more beside the rest: the step split less may take less
        floor = int(split.unavoidable_bytes.max())
        bound = min(bound, floor)
        if floor < (1 - CLOSE) * peak:
            split_ends = ends_of(split, time_limit=clock.left / 2)
            if split_ends.peak < peak:
                peak, splits = split_ends.peak, split.splits
    return MinBudget(peak, bound, splits, slow_budget(last, peak) if splits == last.splits else None)


def slow_budget(problem: Problem, smallest: int, *, slow: float = SLOW) -> SlowBudget | None:
    """A roomier budget, where the plan of the smallest takes ``slow`` times the seconds of keeping everything.

    None if it does not, or with a second memory, whose waits are known only once it is planned.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> slow_budget(chain, min_budget(chain).peak) is None
    True
    """
    once = problem.keep_all_cost
    if problem.host is not None or problem.limits.recomputed or not once:
        return None
    times = Tables.of(problem).seconds_of(least_plan(problem, smallest, Clock(0.0))) / once
    if times < slow:
        return None
    budget, seconds = smallest_within(problem, TWICE * once, smallest, Clock(SECONDS_FOR_TWICE))
    return SlowBudget(times, budget, seconds / once)


def smallest_within(problem: Problem, seconds: float, least: int, clock: Clock) -> tuple[int, float]:
    """The smallest budget whose first plan takes fewer than these seconds, and what that takes.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> smallest_within(chain, 5.0, 1, Clock())
    (3, 4.0)
    """
    low, high, high_cost = least, problem.keep_all_peak, problem.keep_all_cost
    while high - low > max(1, NEAR_TWICE * high) and not clock.is_over:
        middle = (low + high) // 2
        cost = _first_seconds(problem, middle, clock)
        if cost < seconds:
            high, high_cost = middle, cost
        else:
            low = middle
    return high, high_cost


def _first_seconds(problem: Problem, budget: int, clock: Clock) -> float:
    """Seconds of the cheapest of a few eviction passes, or of a plan of a small peak; infinite if there is none."""
    tables = Tables.of(problem)
    passes = (run_pass(tables, budget, weights, clock) for weights in GRID[:6])
    costs = [tables.seconds_of(stages) for stages in passes if not isinstance(stages, DeadEnd)]
    if not costs and (runs := small_plan(problem, budget, clock)) is not None:
        costs = [tables.seconds_of(drop_runs(problem, budget, runs, Clock(0.0)))]
    return min(costs, default=float("inf"))


def ends_of(problem: Problem, *, time_limit: float = TIME_LIMIT) -> MinBudget:
    """The smallest budget of a problem without further splits."""
    if problem.host is None:
        record = _find(problem, time_limit)
        return MinBudget(record.best, record.least)
    if problem.homes:
        plan = with_most_sent(problem, time_limit=time_limit)[1]
        peak = problem.keep_all_peak if plan is None else simulator.simulate(plan, problem).peak
        return MinBudget(peak, int(problem.unavoidable_bytes.max()))
    # With a second memory, sending everything for free gives the bound; the plan waits for links.
    plain = _find(problem.with_host(None), SHARE_WITHOUT_HOST * time_limit)
    most, plan = with_most_sent(problem, time_limit=(1 - SHARE_WITHOUT_HOST) * time_limit)
    bound = _find(most.problem, 0.0).least
    peak = plain.peak if plan is None else min(plain.peak, simulator.simulate(plan, problem).peak)
    return MinBudget(peak, min(bound, peak))


def with_most_sent(problem: Problem, *, time_limit: float = TIME_LIMIT) -> tuple[WithFetches, Plan | None]:
    """The problem in which every sendable value is sent, and its plan of the smallest peak.

    Where the host budget has no room for that, fewer values are sent in the plan, the largest ones.
    """
    assert problem.host is not None
    sent = sorted(sendable(problem), key=lambda v: -int(problem.sizes[v]))
    every = fetching = with_fetches(problem, sent)
    while sent or fetching.homes:
        peak, R = least_memory(fetching.problem, time_limit=time_limit)
        plan = place_transfers(problem, peak, *plain_events(fetching, lowered(fetching.problem, R)))
        if plan is not None and simulator.simulate(plan, problem).host_peak <= problem.host.budget:
            return every, plan
        if not sent:
            break
        sent, time_limit = sent[: len(sent) // 2], time_limit / 2
        fetching = with_fetches(problem, sent)
    return every, None


def least_memory(problem: Problem, *, time_limit: float = TIME_LIMIT) -> tuple[int, np.ndarray]:
    """The smallest peak that a schedule without a second memory is known to reach, and its R (T, T)."""
    record = _find(problem.with_host(None) if problem.host is not None else problem, time_limit)
    return record.peak, record.R


def least_plan(problem: Problem, budget: int, clock: Clock) -> Stages:
    """The ops that run in each stage of the plan of the smallest known peak; fewer if the budget has room.

    It is one without a second memory.

    >>> five = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])
    >>> min_budget(five)  # the least of a schedule is 10 bytes
    MinBudget(peak=8, bound=8)
    >>> least_plan(five, 8, Clock())
    [[0], [1], [2], [0, 3], [0, 1, 2, 0, 4]]
    """
    problem = problem.with_host(None) if problem.host is not None else problem
    record = _find(problem, 0.0)
    runs = record.runs
    if runs is None or max(budget, record.peak_of_runs) >= record.peak:
        runs = as_stages(record.R)
    return drop_runs(problem, max(budget, record.best), runs, clock)


def small_plan(
    problem: Problem, budget: int, clock: Clock, *, far: int | None = None, homes: Homes | None = None
) -> Stages | None:
    """The ops that run in each stage of a plan within the budget that makes much again; None if none is found.

    It needs fewer values at hand than the plan of the smallest peak, where that keeps them for a small peak's sake.

    Args:
        far: stages after which an op of the backward may run again; by default as `find_plan` has it.
        homes: where given, ops of the backward that run again if they are needed, no others, and in which stages.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> small_plan(chain, 3, Clock()), small_plan(chain, 2, Clock())
    ([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], None)
    """
    sets = ValueSets(problem)
    with contextlib.suppress(OutOfTime):
        for width in WIDTHS_OF_SMALL[far is not None :]:
            R, _ = find_plan(sets, budget, width=width, clock=clock, homes=homes, far=far)
            if R is not None and obeys_limits(problem, R):
                return as_stages(R)
    return None


def ops_above(problem: Problem, budget: int, *, time_limit: float = TIME_LIMIT) -> dict[int, int]:
    """The ops at which the plan of the smallest known peak takes more than a budget, and the bytes that it takes there.

    >>> five = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])
    >>> ops_above(five, 8), ops_above(five, 7)
    ({}, {1: 8, 3: 8})
    """
    problem = problem.with_host(None) if problem.host is not None else problem
    ends_of(problem, time_limit=time_limit)
    usage = simulator.simulate(simulator.lower_runs(problem, least_plan(problem, budget, Clock(0.0))), problem)
    most_bytes = dict[int, int]()
    for op, count in zip(usage.ops, usage.bytes_at, strict=True):
        most_bytes[op] = max(count, most_bytes.get(op, 0))
    return {op: count for op, count in most_bytes.items() if count > budget}


def bottleneck(problem: Problem) -> int:
    """The op that stands in the way of a smaller budget."""
    return _find(problem, 0.0).op if problem.host is None else int(problem.unavoidable_bytes.argmax())


def _find(problem: Problem, time_limit: float) -> _Known:
    # Problems that differ in their costs only have one mark: a step captured again has the same smallest budget.
    prints = fingerprints(problem)
    mark = prints.structure, prints.sizes, problem.resident
    record = _known.get(mark)
    if record is None:
        # A first plan runs each op once, where no rule has it run again.
        peak, R = problem.keep_all_peak, np.eye(len(problem.graph.ops), dtype=bool)
        if problem.limits.recomputed:
            R = on_demand(problem, {})
            peak = peak_of(problem, R)
        op = int(problem.unavoidable_bytes.argmax())
        floor = int(problem.unavoidable_bytes[op])
        record = _Known(peak, R, floor, op, floor)
        _known[mark] = record
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(mark)
    exact = len(problem.graph.ops) <= MOST_OPS_EXACT
    if not record.is_done(exact=exact) and time_limit > record.time_limit:
        record.time_limit = time_limit
        clock = Clock(time_limit)
        ends = _Ends(problem, record, clock.share(SHARE), exact=exact)
        with contextlib.suppress(OutOfTime):
            ends.close()
        if not exact:
            ends.refute_in_any_order(record.bound - 1, record.op, 1, clock)
        if not record.is_done(exact=exact):
            ends.run_in_any_order(clock.share(SHARE_OF_ANY_ORDER))
        # Drop what the plans need not run again, and see what their peaks are.
        if ends.wasteful:
            record.R = as_matrix(drop_runs(problem, record.peak, as_stages(record.R), clock))
            record.peak = peak_of(problem, record.R)
        if record.runs is not None and record.peak_of_runs < record.peak:
            record.runs = drop_runs(problem, record.peak_of_runs, record.runs, clock)
            record.peak_of_runs = simulator.simulate(simulator.lower_runs(problem, record.runs), problem).peak
        log.info("smallest budget: %s, after %.1f s", MinBudget(record.best, record.least), clock.elapsed)
    return record


class _Ends:
    """Both ends of the smallest budget, drawn together until they meet or time is over: schedules, then all plans."""

    def __init__(self, problem: Problem, record: _Known, clock: Clock, *, exact: bool) -> None:
        self.problem, self.known, self.clock, self.exact = problem, record, clock, exact
        grain = -1 if exact else grain_of(problem, int(GRAIN * record.bound))
        self.grain = max(0, grain)
        self.sets = ValueSets(problem, grain=self.grain)
        self.once = self.sets  # or those of a step in which ops under a limit of runs run once
        if limited := problem.limits.max_runs:
            ops = enumerate(problem.graph.ops)
            once = tuple(replace(op, pinned=op.pinned or "is limited") if k in limited else op for k, op in ops)
            self.once = ValueSets(replace(problem, graph=replace(problem.graph, ops=once)), grain=self.grain)
        self.small = int(problem.sizes[problem.sizes <= grain].sum()) + (self.grain if problem.profile.ways else 0)
        self.homes = () if exact else second_runs(problem)  # of what waits long, as clipped gradients do
        self.stuck: set[int] = set()  # stages that searches for plans did not get beyond
        self.wasteful = False  # the plan makes more again than it needs to

    def close(self) -> None:
        """Search for plans and refutations with growing widths."""
        record = self.known
        if self.exact:
            before = -1
            while before < record.bound < record.peak:
                before = record.bound
                self._plan(before, WIDE_ENOUGH)
            if record.bound == record.peak:
                return
        if self.homes:  # shorter searches than all others
            self._refute(WIDTHS[0])
            self._make_twice(WIDTH_TWICE)
        if self._plan(record.bound, WIDTHS[0]) and not record.is_close:
            self._evict(GRID[:1])
            if self.problem.limits.max_runs:  # searches know not how often an op has run; passes do
                self._evict(GRID)
        for width in WIDTHS:
            if not record.is_close:
                self._refute(width)
            if width > WIDTH_TWICE:
                self._make_twice(width)
            # Look for a plan at the bound itself, then from there up to the best known. Which states are pursued is a
            # matter of luck, and more room may be bad luck: so all is tried, the least first.
            low, room = record.bound, record.peak - self.small - record.bound
            for share in SHARES if room > 0 and not record.is_close else ():
                if not self._plan(low + int(share * room), width):
                    break

    def _plan(self, budget: int, width: int) -> bool:
        """Search for a plan within a budget, small values aside; True if a search may still find one."""
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

    def _offer(self, R: np.ndarray, budget: int) -> None:
        """Take a schedule that fits a budget, if it is better; its peak is simulated after runs are dropped."""
        if budget < self.known.peak:
            self.known.R, self.known.peak, self.wasteful = R, max(budget, self.known.bound), True

    def run_in_any_order(self, clock: Clock) -> None:
        """Draw the ends of all plans together by bisection, until neither a plan nor a proof is found."""
        record = self.known
        far, states, close = ANY, MOST_STATES, 0
        if not self.exact:
            far, states, close = far_enough(self.sets), MOST_STATES_OF_PLAN, int(CLOSE * record.peak)
        low, high = record.least, record.best - self.small
        budget = low
        while high - low > close and not clock.is_over:
            search = AnyOrder(self.sets, budget, clock, far, states)
            runs = search.runs()
            times = Counter(chain.from_iterable(runs or ()))
            if runs is not None and all(times[k] <= most for k, most in self.problem.limits.max_runs.items()):
                # The plan's peak is simulated once runs are dropped.
                record.runs, record.peak_of_runs = runs, max(budget + self.small, record.least)
                high = budget
            elif runs is None and (search.complete or self.refute_in_any_order(budget, search.reached, NEAR, clock)):
                record.least = low = max(record.least, min(search.least, record.best) if search.complete else 0)
            else:
                break
            budget = (low + high) // 2
        record.bound = max(record.bound, record.least)

    def refute_in_any_order(self, budget: int, at: int, near: int, clock: Clock) -> bool:
        """Raise the bound of all plans if none fits a budget, as proven at a stage or near it; tell whether."""
        around = range(max(0, at - 1), min(at + near + 1, self.sets.T))
        for t in sorted(around, key=lambda t: abs(t - at)):
            search = AnyOrder(self.sets, budget, clock, far_enough(self.sets), MOST_STATES, loose=True)
            if search.refutes(t):
                self.known.least = max(self.known.least, min(search.least, self.known.best))
                return True
            if clock.is_over:
                break
        return False

    def _evict(self, kinds: Sequence[Weights]) -> None:
        """Reach a lower peak quickly: bisection with eviction passes of these kinds."""
        tables, low, clock = Tables.of(self.problem), self.known.bound, self.clock.share(SHARE_OF_EVICTION)
        while self.known.peak - low > CLOSE_PASSES * low:
            middle = (low + self.known.peak) // 2
            passes = (run_pass(tables, middle, weights) for weights in kinds)
            stages = next((result for result in passes if not isinstance(result, DeadEnd)), None)
            if stages is None:
                low = middle
            else:
                self.known.R = as_matrix(stages)
                self.known.peak = max(peak_of(self.problem, self.known.R), self.known.bound)
            if clock.is_over:
                return

    def _refute(self, width: int) -> None:
        """Raise the bound stage by stage, beginning where most bytes are needed."""
        sets, record = self.sets, self.known
        clock = self.clock.share(SHARE_OF_PROOFS)
        near = dict.fromkeys(t + i for i in range(NEAR) for t in sorted(self.stuck) if t + i < sets.T)
        with contextlib.suppress(OutOfTime):
            for t in dict.fromkeys([*near, *sorted(range(sets.T), key=lambda t: -sets.at(t, t, 0))]):
                wide = min(WIDE_ENOUGH // 2, NEAR_WIDER * width) if t in near else width
                high, budget = record.peak, record.bound
                while budget < high and not record.is_close:
                    proven = refute(sets, budget, t, width=wide, clock=clock)
                    if proven is not None:
                        record.bound, record.op = min(proven, record.peak), t
                    elif budget == record.bound:
                        break
                    else:
                        high = budget
                    budget = record.bound if high - record.bound <= CLOSE_PROOFS * high else (record.bound + high) // 2

    def _make_twice(self, width: int) -> None:
        """Lower the peak by plans whose kept and remade values are chosen beforehand."""
        low, clock = self.known.bound, self.clock.share(SHARE_OF_TWICE)
        with contextlib.suppress(OutOfTime):
            while self.homes and self.known.peak - self.small - low > CLOSE * low:
                budget = (low + self.known.peak - self.small) // 2
                plans = (find_plan(self.sets, budget, width=width, clock=clock, homes=homes)[0] for homes in self.homes)
                R = next((R for R in plans if R is not None and obeys_limits(self.problem, R)), None)
                if R is None:
                    low = budget
                else:
                    self._offer(R, budget + self.small)
