"""Explain a plan's peak: the values alive there, the price of dropping each, and of other budgets."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any, ClassVar

from checkmate.core.answer import Column, Listed, Table, table
from checkmate.core.plan import Drop, Fetch, Free, Plan, Send, Step, Wait
from checkmate.core.simulator import simulate
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status, require_plan
from checkmate.core.timing import timing
from checkmate.look.timeline import Moment, Span, Timeline, timeline
from checkmate.solvers.common.incumbent import again
from checkmate.solvers.host.kept import RoomBound, bounds_with_more
from checkmate.solvers.solve import solve
from checkmate.units import format_bytes, format_seconds, parse_bytes, signed

STEP = 100_000_000  # bytes more or less whose price is asked for
PARTS = 100  # of the peak, of which the step is one at most
TIME_LIMIT = 5.0  # seconds for each price


@dataclass(frozen=True)
class Held:
    """A value in memory at the peak."""

    value: int  # index in the graph
    name: str
    bytes: int
    role: str  # one of `checkmate.look.timeline.ROLES`
    made_by: str  # name of the op
    module: str  # path, empty where not known
    line: str  # of the source, such as "resnet.py:31", empty where not known
    where: str  # both, with the module's class
    next_op: str  # name of the op that reads it next; empty where none does
    next_in: float | None  # seconds from the end of the peak's op until that one begins
    drop_seconds: float | None  # to make it again for that op, from what is kept then; None: it cannot be dropped
    why_not: str  # why it cannot be dropped, in words; empty where it can
    moving: str = ""  # "being sent" to the second memory, "on its way back", or neither
    send_seconds: float | None = None  # by which the step is longer if it is in the second memory here; None: see there


@dataclass(frozen=True)
class Price:
    """The step within another budget. Changes are relative to the explained plan; negative is faster."""

    change_bytes: int  # less or more than this plan may have
    budget: int  # bytes
    status: Status
    cost: float  # seconds of the best plan found, infinite where none was
    bound: float  # seconds that every schedule within this budget takes, proven; infinite where there is none
    found_change: float  # seconds by which the plan found differs
    proven_change: float  # no schedule within this budget differs by less, proven


@dataclass(frozen=True, repr=False)
class PeakExplanation(Listed[Held]):
    """The answer of `explain_peak`. Iterates over the values held, the largest first; prints as tables."""

    held: tuple[Held, ...]
    prices: tuple[Price, ...]  # of less memory, then of more; empty where not asked for
    peak: int  # bytes
    budget: int  # bytes
    moment: Moment  # the op that runs at the peak
    resident: dict[str, int]  # bytes that are there all the time, by role
    seconds: float  # of the plan's step
    top: int = 10  # how many values are printed
    not_over: str = ""  # the input that the op could write over if it were not kept, in words
    better: Solution | None = None  # a faster plan within the same budget, if the prices came upon one
    host_bytes: int | None = None  # the most bytes in the second memory about then; None: there is none
    room_bounds: tuple[RoomBound, ...] = ()  # as it is, with more here, with more there; empty: no homes, or not asked

    listed: ClassVar = "held"  # for `records`

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the table of values held."""
        sending = Column("sending costs", lambda row: _told(row.send_seconds), sort="send_seconds")
        return (*HELD, *([] if self.host_bytes is None else [sending]), Column("where", "where"))

    def _title(self) -> str:
        again = f", run for the {nth(self.moment.time + 1)} time" if self.moment.time else ""
        where = f" ({self.moment.where}{again})" if self.moment.where else again
        return f"The peak of {format_bytes(self.peak)} is at {self.moment.name}{where}, in the {self.moment.phase}."

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "budget", f"{format_bytes(self.budget)}, of which {format_bytes(self.budget - self.peak)} are left"
        held = sum(row.bytes for row in self.held)
        yield "values", f"{format_bytes(held)} in {len(self.held)} values"
        for moving, note in _MOVING.values():
            if on_link := [row for row in self.held if row.moving == moving]:
                count = f"{len(on_link)} value{'s' * (len(on_link) != 1)}"
                yield moving, f"{format_bytes(sum(row.bytes for row in on_link))} of these in {count}, {note}"
        if self.host_bytes is not None:
            yield "second memory", format_bytes(self.host_bytes)
        if self.room_bounds and all(row.bound for row in self.room_bounds):
            base, more_here, more_there = self.room_bounds
            less = [f"{max(0.0, 1 - row.bound / base.bound):.1%} less" for row in (more_here, more_there)]
            more = f"{less[0]} with {format_bytes(more_here.here)} more here, {less[1]} with"
            bound = f"the linear bound of {format_seconds(base.bound)} would be {more}"
            yield "with more", f"{bound} {format_bytes(more_there.there)} more there"
        if self.resident:
            parts = ", ".join(f"{role} {format_bytes(size)}" for role, size in self.resident.items())
            yield "resident", f"{format_bytes(sum(self.resident.values()))}: {parts}"
        if self.moment.over:
            yield "in place", f"{self.moment.name} is written over {self.moment.over}, which is not counted any more"
        if self.not_over:
            yield "not over", self.not_over
        if self.moment.workspace:
            yield "workspace", f"{format_bytes(self.moment.workspace)} of {self.moment.target}"

    def _tables(self) -> Iterator[Table]:
        yield table(self.columns, self.held, top=self.top)
        if self.prices:
            title = f"What less or more memory would change of this step of {format_seconds(self.seconds)}:"
            yield table(PRICES, self.prices, title=title)
        if self.better is not None:
            saved, step = (format_seconds(s) for s in (self.seconds - self.better.cost, self.better.cost))
            found = f"On the way a better plan for the same budget was found: a step of {step}, {saved} less."
            yield Table((f"{found} It is in .better; given more time, solve finds such a plan itself.",))


def _told(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


_MOVING = {  # by lane
    "sent": ("being sent", "whose copy is not complete"),
    "fetched": ("on its way back", "which cannot be read yet"),
}
HELD = (
    Column("value", "name"),
    Column("bytes", "bytes", format_bytes, total=True),
    Column("role", "role"),
    Column(
        "needed next by",
        lambda row: row.next_op + {None: "", 0: ", the next op"}.get(row.next_in, f" in {_told(row.next_in)}"),
        sort="next_in",
    ),
    Column("dropping costs", lambda row: row.why_not or _told(row.drop_seconds), sort="drop_seconds"),
)
PRICES = (
    Column("memory", "change_bytes", partial(signed, form=format_bytes)),
    Column("budget", "budget", format_bytes),
    Column("step", "cost", format_seconds),
    Column("plan found", "found_change", partial(signed, form=format_seconds)),
    Column(
        "any schedule, proven",
        lambda price: "none fits" if math.isinf(price.bound) else price.proven_change,
        lambda seconds: f"at least {signed(seconds, format_seconds)}",
    ),
    Column("status", lambda price: price.status.label),
)


def nth(n: int) -> str:
    """1st, 2nd, 3rd, 4th, ..."""
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def explain_peak(
    solution: Solution,
    *,
    step: int | str | None = None,
    prices: bool = True,
    time_limit: float = TIME_LIMIT,
    top: int = 10,
) -> PeakExplanation:
    """List the values in memory at the peak of a plan, with the price of dropping each there.

    The cost of dropping a value is the seconds of the ops that make it again, right before the op that needs it next,
    from what the plan has at hand then; of this value alone, and whether there is room for it is not asked. Prices say
    what fewer or more bytes would really cost: for each, the problem is solved again, beginning with this plan.

    Args:
        step: bytes less than the peak, and more than the budget, to ask the price of; by default 100 MB, or a hundredth
            of the peak if that is less.
        prices: whether to ask for prices at all; it takes two solves. Where values are at home in the second memory, it
            also asks the linear bound what a third of the budget more here would buy, and twice that there.
        time_limit: seconds for each of the two solves.
        top: how many values are printed.

    Raises:
        ValueError: if the solution has no plan, or a limit is out of range.
        BudgetError: if the step is no positive number of bytes.

    >>> from checkmate import Problem
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[10, 20, 20, 5])
    >>> peak = explain_peak(solve(chain, 50), step=10)
    >>> [(row.name, row.bytes, row.next_op, row.drop_seconds, row.why_not) for row in peak][-1]
    ('v0', 10, 'op3', 1.0, '')
    >>> [(price.budget, price.found_change, price.proven_change) for price in peak.prices]
    [(40, 1.0, 1.0), (60, 0.0, 0.0)]
    """
    plan, _ = require_plan(solution, "explain")
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise ValueError(f"top is a number of rows, not {top!r}.")
    problem, peak = solution.problem, solution.peak or 0
    size = max(1, min(STEP, peak // PARTS)) if step is None else parse_bytes(step)
    line = timeline(plan, problem)
    moment, remake = line.peak_moment, Remaking(solution, line)
    alive = line.alive(moment.index)
    sending = [seconds_to_send(solution, line, moment, span) for span in alive[:top]]
    moving = {crossing.item: _MOVING[crossing.lane][0] for crossing in line.under_way(moment.index)}
    rows = zip_longest(alive, sending)
    held = tuple(_held(solution, line, span, remake, moving.get(span.value, ""), costs) for span, costs in rows)
    # The input that the op at the peak could write over, and the op that still reads it.
    not_over = ""
    for v, saved in problem.savings[moment.op]:
        name = problem.graph.values[v].name
        if name == moment.over:
            break
        span = next(span for span in alive if span.value == v)
        use = span.next_use(moment.index)
        if use is None and span.last == moment.index:  # it goes, and yet nothing is written over it
            continue
        keeps = "is kept" if use is None else f"{line.moments[use].name} reads later"
        not_over = f"{name}, which {keeps}: {moment.name} could be written over it, and take {format_bytes(saved)} less"
        break
    # Less memory than the peak, if that is possible, and more than the budget.
    changes = ((peak - size, -size), (solution.budget + size, size)) if prices else ()
    pairs = [_price(solution, budget, change, time_limit) for budget, change in changes if budget > 0]
    third, more = solution.budget // 3, tuple[RoomBound, ...]()
    if prices and problem.homes:
        more = bounds_with_more(problem, solution.budget, third, 2 * third, time_limit)
    figures = line.peak, solution.budget, moment, line.resident, solution.cost, top, not_over
    better = _better(solution, [answer for _, answer in pairs])
    host_bytes = None if problem.host is None else line.host_bytes[moment.index]
    return PeakExplanation(held, tuple(price for price, _ in pairs), *figures, better, host_bytes, more)


class Remaking:
    """The ops needed to remake a value at a moment from the values in memory then."""

    def __init__(self, solution: Solution, line: Timeline) -> None:
        self.graph = solution.problem.graph
        self.spans: dict[int, list[tuple[int, int]]] = {}  # by value, when its copies are made or back, and gone
        for span in line.spans:
            last = max((span.last, *span.uses))  # an overwritten value is there while the op runs
            self.spans.setdefault(span.value, []).append((span.ready - 1, last))

    def at_hand(self, value: int, index: int) -> bool:
        """Tell whether a copy made before this execution is still in memory."""
        copies = self.spans.get(value, [])
        i = bisect_left(copies, (index, -1)) - 1  # the last copy made before
        return i >= 0 and copies[i][1] >= index

    def ops(self, value: int, index: int) -> set[int]:
        """The ops that remake the value just before this execution, if its copy there were gone."""
        producer = self.graph.values[value].producer
        assert producer is not None  # values that no op makes are resident
        needed, ask = {producer}, [producer]
        while ask:
            for v in self.graph.ops[ask.pop()].inputs:
                made_by = self.graph.values[v].producer
                if made_by is not None and made_by not in needed and (v == value or not self.at_hand(v, index)):
                    needed.add(made_by)
                    ask.append(made_by)
        return needed


def _held(
    solution: Solution, line: Timeline, span: Span, remake: Remaking, moving: str, send_seconds: float | None
) -> Held:
    graph, moment = solution.problem.graph, line.peak_moment
    use, at_home, why_not = span.next_use(moment.index), span.value in solution.problem.homes, moving
    reader = None if use is None else line.moments[use]
    needed = set() if use is None or at_home else remake.ops(span.value, use)
    if moving:
        pass
    elif span.first == moment.index and span.role != "fetched":
        why_not = "made here" if span.continues is None else f"made here, over {moment.over}"
    elif moment.index in span.uses:
        why_not = "read here"
    elif span.role == "results":
        why_not = "a result of the step"
    elif at_home:
        ran = {other.op for other in line.moments[: moment.index]}
        sent = any(use.item == span.value and use.lane == "sent" for use in line.crossings if use.after < moment.index)
        is_old = graph.overwritten_by.get(span.value) in ran and not sent
        why_not = "its copy at home is old" if is_old else "at home in the second memory"
    elif use is not None:
        # The first of the ops that cannot run again just before the next use.
        ran = {other.op for other in line.moments[:use]}
        for op, by in ((graph.ops[k], solution.problem.limits.last_stage.get(k)) for k in sorted(needed)):
            if op.pinned:
                why_not = f"{op.name} {op.pinned}"
            elif by in ran:
                why_not = f"{op.name} reads what {graph.ops[by].name} has overwritten by then"
            if why_not:
                break
    place = graph.ops[span.producer].name, span.place.module, span.place.line, span.where
    next_in = None if reader is None else reader.begin - line.moments[moment.index + 1].begin + moment.waited
    drop_seconds = None if why_not else float(sum(solution.problem.seconds[k] for k in sorted(needed)))
    next_op = "" if reader is None else reader.name
    costs: Any = next_op, next_in, drop_seconds, why_not, moving, send_seconds
    return Held(span.value, span.name, span.bytes, span.role, *place, *costs)


def _better(solution: Solution, answers: list[Solution]) -> Solution | None:
    """The fastest plan of the same ops that also fits the budget, if one of the answers is faster."""
    splits, within = solution.problem.splits, (s for s in answers if s.peak is not None and s.peak <= solution.budget)
    best = min((s for s in within if s.problem.splits == splits), key=lambda s: s.cost, default=solution)
    if best.cost >= solution.cost * (1 - OPTIMAL_GAP):
        return None
    return again(best, solution.problem, solution.budget, bound=min(solution.bound, best.cost))


def _price(solution: Solution, budget: int, change: int, time_limit: float) -> tuple[Price, Solution]:
    answer = solve(solution.problem, budget, time_limit=time_limit, start=solution, progress=False)
    cost, bound = answer.cost, answer.bound
    if change < 0:  # fewer bytes: what is proven of this plan's budget holds there as well
        bound = max(bound, min(solution.bound, cost))
    else:  # this plan fits there
        cost = min(cost, solution.cost)
        bound = min(bound, cost)
    return Price(change, budget, answer.status, cost, bound, cost - solution.cost, bound - solution.cost), answer


def seconds_to_send(solution: Solution, line: Timeline, moment: Moment, span: Span) -> float | None:
    """Seconds by which the step grows if this value is away at this moment; None if it cannot be.

    It would be sent when it is made and fetched right after the moment, and be waited for right before it and where it
    is read next. The rest of the plan stays as it is, though its transfers may have to wait for these. Whether there is
    room here for the copy that comes back is not asked; there must be there.
    """
    plan, problem, index = solution.plan, solution.problem, moment.index
    use, v = span.next_use(index), span.value
    assert plan is not None
    rests = span.first < index and index not in span.uses and span.ready <= index
    graph = problem.graph
    barred = v in plan.moved.union(problem.homes, graph.outputs, problem.limits.recomputed)
    if problem.host is None or use is None or not rests or barred:
        return None
    start, away, back, read = (line.moments[i].position for i in (span.first, index, index + 1, use))
    added: dict[int, list[Step]] = {}
    for position, step in ((start + 1, Send(v)), (away, Wait(v)), (away, Free(v)), (back, Fetch(v)), (read, Wait(v))):
        added.setdefault(position, []).append(step)
    added[read].append(Drop(v))
    steps = chain.from_iterable((*added.get(p, ()), step) for p, step in enumerate(plan.steps))
    longer = Plan(tuple(steps), plan.boundary + sum(len(more) for p, more in added.items() if p < plan.boundary))
    if simulate(longer, problem).host_peak > problem.host.budget:
        return None
    return timing(longer, problem).seconds - line.seconds
