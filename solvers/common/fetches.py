"""Plan a second memory by a problem without one: a cheap op fetches each value that is sent, and transfers come after.

For a value v that is sent to the second memory when it is made, an op q_v that reads nothing stands behind the op that
makes it: from then on v is q_v's. To run q_v again is to fetch v. It takes no seconds, or few, so that what the solvers
for recomputation find for this problem is what to keep, what to fetch and what to run again at which moment.

A value at home in the second memory is made by an op like that, in front of the first op that reads it, or, if a copy
is kept here from call to call, in front of all; then a last op reads the copy that is to be here in the end. Where an
op overwrites the value, it overwrites a stand-in of no bytes that the fetch and all earlier readers read as well, so
that none of them runs after it. What later ops read is another value of the same bytes, with a fetch op of its own.

When the links carry that is then placed in this order of runs. What is sent is sent when it is made. Where it would be
let go of before it is there, it stays until its transfer ends or its room is needed; only then do ops wait for the
link. What is fetched comes as late as the link allows for it to be there in time, and where there is no room for it so
early, as early as there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from checkmate.core.graph import MAX_BYTES, Graph, Op, Phase, Value
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem, Profile
from checkmate.core.timing import timing

PRICE = 0.01  # of the seconds that a link is busy with it: what a fetch costs, so that none is for nothing
PRICE_BESIDE_HOMES = 0.3  # likewise, where fetching all homes once takes half as long as the ops, or longer
TRIES = 20  # at most, to have a send that holds up others begin later
ROUNDS = 4  # in each of which fetches go by when steps were reached in the one before


@dataclass(frozen=True, eq=False)
class WithFetches:
    """A problem with fetch ops, and the op or value of the plain problem behind each of its ops."""

    problem: Problem
    op: tuple[int | None, ...]  # the plain op of each; None if it fetches a value, or ends the step
    value: tuple[int | None, ...]  # the plain value that it fetches
    plain: tuple[int, ...]  # the plain value of each value
    homes: frozenset[int]  # plain values at home in the second memory
    away: frozenset[int]  # ops whose first run is a fetch, too
    renewed: Mapping[int, int]  # plain values that are read once they are overwritten -> the plain op that does so


@dataclass(frozen=True)
class MustBeBack:
    """The point in a plan by which a value must be back from the second memory."""

    value: int


Event = Run | Free | MustBeBack


def with_fetches(problem: Problem, sent: Collection[int]) -> WithFetches:
    """Translate a problem with a second memory to one without, in which these values are sent once they are made.

    Args:
        problem: with a second memory.
        sent: values, each made by an op and none that a rule has made again in the backward.

    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[4] * 4, forward=3)
    >>> fetching = with_fetches(chain.with_host(Host(100, send=1.0, fetch=1.0)), [0])
    >>> [op.name for op in fetching.problem.graph.ops], fetching.problem.graph.values[0].producer
    (['op0', 'fetch v0', 'op1', 'op2', 'op3'], 1)
    """
    graph, host = problem.graph, problem.host
    assert host is not None

    def inside(k: int) -> int:
        """Bytes that op k makes and fetch ops take over; they count as its workspace."""
        return sum(int(problem.sizes[w]) for w in graph.ops[k].outputs if w in sent)

    # Homes: what stands for one that is overwritten, its second version if anything reads that, its first op.
    values, by = list(graph.values), graph.overwritten_by
    busy = min(1.0, 2 * host.seconds_to_fetch(problem.homes_bytes) / max(problem.keep_all_cost, 1 / MAX_BYTES))
    price = max(PRICE, PRICE_BESIDE_HOMES * busy**6) if problem.homes else PRICE
    stand_in, renewed, first = dict[int, int](), dict[int, int](), defaultdict[int, list[int]](list)
    for v in sorted(problem.homes):
        if v in by:
            stand_in[v] = len(values)
            values.append(Value(f"home of {values[v].name}", 0, None, "parameter"))
        if v in by and (v in problem.kept or graph.users[v][-1] > by[v]):
            renewed[v] = len(values)
            values.append(values[v])
        if v in problem.kept or graph.users[v]:
            first[0 if v in problem.kept else graph.users[v][0]].append(v)
    # Ops: (op, seconds, workspace, plain op, fetched value).
    rows = list[tuple[Op, float, int, int | None, int | None]]()
    place, away = list[int](), set[int]()  # the new index of each plain op; ops that fetch at first, too
    producer = [value.producer for value in values]

    def add_fetch(v: int, makes: int, reads: tuple[int, ...], phase: Phase) -> None:
        """Add an op that fetches a value."""
        assert host is not None
        takes = min(price * host.seconds_to_fetch(int(problem.sizes[v])), MAX_BYTES)
        producer[makes] = len(rows)
        rows.append((Op(f"fetch {graph.values[v].name}", "fetch", reads, (makes,), phase), takes, 0, None, v))

    for k, op in enumerate(graph.ops):
        for v in first[k]:
            away |= {len(rows)} if v not in problem.kept else set()
            add_fetch(v, v, (stand_in[v],) if v in by else (), op.phase)
        reads = [renewed[v] if v in renewed and k > by[v] else v for v in op.inputs]
        reads += [stand_in[v] for v in op.inputs if v in stand_in and k <= by[v]]
        outputs, over = tuple(w for w in op.outputs if w not in sent), tuple(stand_in.get(v, v) for v in op.overwrites)
        for v in op.outputs:
            producer[v] = len(rows)
        place.append(len(rows))
        op = replace(op, inputs=tuple(reads), outputs=outputs, overwrites=over)
        rows.append((op, float(problem.seconds[k]), int(problem.workspace[k]) + inside(k), k, None))
        # Behind it an op for each value that it makes and is sent, and for each that it overwrites and is read again.
        for v in graph.ops[k].outputs:
            if v in sent:
                add_fetch(v, v, (), op.phase)
        for v in graph.ops[k].overwrites:
            if v in renewed:
                add_fetch(v, renewed[v], (), op.phase)
    if problem.kept:
        last = Op("end", "end", tuple(renewed.get(v, v) for v in sorted(problem.kept)), (), op.phase, "ends the step")
        rows.append((last, 0.0, 0, None, None))
    ops, seconds, workspace, plain, fetched = zip(*rows, strict=True)
    # The rest of the problem by the new places of ops.
    new_values = tuple(replace(value, producer=p) for value, p in zip(values, producer, strict=True))
    ways = tuple(
        replace(w, op=place[w.op], makes=None if w.makes in sent else w.makes, workspace=w.workspace + inside(w.op))
        for w in problem.profile.ways
    )
    profile = Profile(np.array(seconds), np.array(workspace), problem.resident, problem.profile.source, ways=ways)
    rules = tuple(
        replace(rule, ops=tuple(place[k] for k in rule.ops), exempt=tuple((place[k], why) for k, why in rule.exempt))
        for rule in problem.rules
    )
    translation = Problem(Graph(ops, new_values, graph.outputs), profile, rules=rules)
    origin = (*range(len(graph.values)), *(v for v in sorted(problem.homes) for new in (stand_in, renewed) if v in new))
    over_by = {v: by[v] for v in renewed}
    return WithFetches(translation, plain, fetched, origin, problem.homes, frozenset(away), over_by)


def sendable(problem: Problem) -> list[int]:
    """The values that may be sent once they are made: not empty, no results, not shared, under no "recompute" rule."""
    graph, out = problem.graph, {*problem.graph.outputs, *problem.graph.only_here, *problem.limits.recomputed}
    out |= problem.homes
    return [v for v in range(len(graph.values)) if problem.sizes[v] and v not in out and graph.users[v]]


def plain_events(fetching: WithFetches, plan: Plan) -> tuple[list[Event], int]:
    """Translate a plan to the plain problem's events, with the index at which the backward begins.

    Fetches are `MustBeBack`. What an op makes again of what is fetched otherwise goes at once.
    """
    events: list[Event] = []
    boundary, ended, ran, products, at_hand = 0, False, set[int](), set[int](), set[int]()
    graph = fetching.problem.graph
    # For each plain op, its outputs that fetch ops take over.
    by_product: list[list[int]] = []
    for v in fetching.value:
        if v is None:
            by_product.append([])
        elif v not in fetching.homes:
            by_product[-1].append(v)
    for position, step in enumerate(plan.steps):
        if position == plan.boundary:
            boundary = len(events)
        # What is read again once it is overwritten stays then, and what is here in the end stays, too.
        if isinstance(step, Free):
            at_hand.discard(step.value)
            stays = ended or fetching.renewed.get(step.value) in ran
            events += [] if stays else [Free(fetching.plain[step.value])]
            continue
        assert isinstance(step, Run)
        k, v = fetching.op[step.op], fetching.value[step.op]
        # The first run of a fetch op is the value made by its op, or kept here, but for homes; any later one a fetch.
        if v is not None:
            (makes,) = graph.ops[step.op].outputs
            if (makes in products or step.op in fetching.away) and makes not in at_hand:
                events.append(MustBeBack(v))
            products.add(makes)
            at_hand.add(makes)
            continue
        if k is None:
            ended = True
            continue
        # A plain op runs; when it runs again, values that are fetched elsewhere go at once.
        events.append(Run(k, step.over))
        at_hand.update(graph.ops[step.op].outputs)
        at_hand.discard(step.over if step.over is not None else -1)
        if k in ran:
            events += [Free(w) for w in by_product[k] if w not in at_hand]
        ran.add(k)
    return events, boundary if plan.boundary < len(plan.steps) else len(events)


def place_transfers(problem: Problem, budget: int, happens: Sequence[Event], boundary: int) -> Plan | None:
    """The faster of two plans with these runs in this order: ops write over sent values in one, and not in the other.

    A write over a value waits for its transfer; with room for both, the op writes elsewhere and nothing waits.

    Args:
        problem: with a second memory.
        budget: bytes.
        happens: runs, values that go, and those that must be back.
        boundary: how many of these belong to the forward.

    Returns:
        None if there is no room even with a wait at each transfer.
    """
    sent = {event.value for event in happens if isinstance(event, MustBeBack)}
    apart: list[list[Event]] = [
        [Run(event.op), Free(event.over)] if isinstance(event, Run) and event.over in sent else [event]
        for event in happens
    ]
    orders = [(happens, boundary)]
    if len(events := [*chain(*apart)]) > len(happens):
        orders.append((events, sum(map(len, apart[:boundary]))))
    plans = [plan for order in orders if (plan := _placed(problem, budget, *order)) is not None]
    plans = [_by_need(problem, plan) for plan in plans]
    return min(plans, key=lambda plan: timing(plan, problem).seconds, default=None)


def _placed(problem: Problem, budget: int, happens: Sequence[Event], boundary: int) -> Plan | None:
    """A plan with these events; the arguments are those of `place_transfers`."""
    out = _sends(problem, budget, happens, boundary)
    if out is None:
        return None
    best, least = None, float("inf")
    for _ in range(ROUNDS):
        plan = _fetches(problem, budget, out)
        when = timing(plan, problem)
        if when.seconds >= least:
            break
        best, least = plan, when.seconds
        # When each step is reached if its fetches are placed elsewhere: waits leave time, and a fetch has its wait's.
        moments = iter([at for step, at in zip(plan.steps, when.at, strict=True) if not isinstance(step, Fetch)])
        times = [0.0 if isinstance(step, Fetch) else next(moments) for step in out.steps]
        out.now = [times[i + 1] if isinstance(step, Fetch) else times[i] for i, step in enumerate(out.steps)]
    return best


def _by_need(problem: Problem, plan: Plan) -> Plan:
    """Move sends behind transfers that they hold up and that are waited for sooner, wherever that saves seconds."""
    assert problem.host is not None
    times = timing(plan, problem)
    stalls, tries = sorted(times.stalls, key=lambda stall: stall[1]), TRIES
    while stalls and tries:
        position, tries = stalls.pop()[0], tries - 1
        # The transfer that is waited for, and the last send before it on its link that is waited for later.
        ends: dict[int, int] = {}  # position of each transfer -> that of its `Wait`
        under_way: dict[int, int] = {}  # value -> position of its transfer
        for i, step in enumerate(plan.steps):
            if isinstance(step, (Send, Fetch)):
                under_way[step.value] = i
            elif isinstance(step, Wait):
                ends[under_way.pop(step.value)] = i
        transfer = next(i for i, end in ends.items() if end == position)
        sends = [i for i, end in ends.items() if i < transfer and end > position and isinstance(plan.steps[i], Send)]
        if not sends or (isinstance(plan.steps[transfer], Fetch) and not problem.host.one_link):
            continue
        first, steps = max(sends), plan.steps
        moved = (*steps[:first], *steps[first + 1 : transfer + 1], steps[first], *steps[transfer + 1 :])
        other = Plan(moved, plan.boundary - (first < plan.boundary <= transfer))
        if (new_times := timing(other, problem)).seconds < times.seconds:
            plan, times = other, new_times
            stalls = sorted(times.stalls, key=lambda stall: stall[1])
    return plan


class Outward:
    """A walk through a plan that tracks the values in memory, in the second memory and on their way there."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget, self.sizes = problem, budget, problem.sizes.tolist()
        self.steps: list[Step] = []
        self.boundary = 0
        self.live: list[int] = []  # bytes at hand at each step, workspace of runs included
        self.now: list[float] = []  # seconds since the step began when each step is reached
        self.bytes_on_device, self.seconds = problem.begin_bytes, 0.0  # after the last
        self.on_device, self.in_host = set(problem.kept), set(problem.homes)
        self.sending: dict[int, float] = {}  # value -> where its transfer ends, in the order of the link
        self.leaving: dict[int, None] = {}  # those freed as soon as they have arrived

    def add(self, step: Step, more: int = 0) -> None:
        """Add the next step, which takes this many bytes beside the values in memory."""
        self.steps.append(step)
        self.live.append(self.bytes_on_device + more)
        self.now.append(self.seconds)

    def run(self, step: Run) -> bool:
        """Run an op after the waits that make room for it; tell whether there is room enough."""
        op = self.problem.graph.ops[step.op]
        saved = 0 if step.over is None else dict(self.problem.savings[step.op]).get(step.over, 0)
        during = sum(self.sizes[v] for v in op.outputs) + int(self.problem.workspace[step.op]) - saved
        fits = self.make_room(during)
        self.add(step, during)
        self.seconds += float(self.problem.seconds[step.op])
        self.bytes_on_device += sum(self.sizes[v] for v in op.outputs if v not in self.on_device)
        self.on_device.update(op.outputs)
        if step.over is not None and step.over in self.on_device:
            self.on_device.discard(step.over)
            self.bytes_on_device -= self.sizes[step.over]
        return fits

    def make_room(self, needed: int) -> bool:
        """Wait for sends until this many bytes are free or no send is left; tell whether they are free."""
        while self.bytes_on_device + needed > self.budget and self.leaving:
            self.arrive(next(iter(self.leaving)))
        return self.bytes_on_device + needed <= self.budget

    def arrive(self, v: int) -> None:
        """Wait for a value's send to end, and free the value if it leaves memory."""
        self.add(Wait(v))
        self.seconds = max(self.seconds, self.sending.pop(v))
        self.in_host.add(v)
        if v in self.leaving:
            del self.leaving[v]
            self.free(v)

    def free(self, v: int) -> None:
        """Free a value."""
        self.add(Free(v))
        self.on_device.discard(v)
        self.bytes_on_device -= self.sizes[v]


def _sends(problem: Problem, budget: int, happens: Sequence[Event], boundary: int) -> Outward | None:
    """Place sends. Fetches take no time here: each `Fetch` stands where its value is needed, a `Wait` behind it."""
    host, plan, busy = problem.host, Outward(problem, budget), 0.0
    assert host is not None
    last_back = {event.value: i for i, event in enumerate(happens) if isinstance(event, MustBeBack)}
    for i, event in enumerate(happens):
        if i == boundary:
            plan.boundary = len(plan.steps)
        # A value goes when nobody needs it, if its copy has arrived; else as soon as that has.
        if isinstance(event, Free):
            v = event.value
            if v not in plan.on_device or v in plan.leaving:
                continue
            if v not in plan.sending:
                plan.free(v)
                continue
            plan.leaving[v] = None
            if plan.sending[v] <= plan.seconds:
                plan.arrive(v)
            continue
        # Copies that have arrived meanwhile.
        for v in [v for v, end in plan.sending.items() if end <= plan.seconds and v in plan.leaving]:
            plan.arrive(v)
        # A value is needed again: it has not gone yet, or it is fetched at no time here.
        if isinstance(event, MustBeBack):
            v = event.value
            if v in plan.leaving:
                del plan.leaving[v]
                continue
            if v in plan.on_device:
                continue
            if v in plan.sending:
                plan.arrive(v)
            plan.make_room(plan.sizes[v])
            plan.bytes_on_device += plan.sizes[v]
            plan.on_device.add(v)
            plan.add(Fetch(v))
            plan.add(Wait(v))
            if last_back[v] == i and v not in problem.homes:
                plan.add(Drop(v))
                plan.in_host.discard(v)
            continue
        # An op runs, once the old copies of what it writes have arrived and there is room.
        outputs = problem.graph.ops[event.op].outputs
        for v in (*outputs, *(() if event.over is None else (event.over,))):
            if v in plan.sending:
                plan.arrive(v)
        if not plan.run(event):
            return None
        # Send what it overwrote and is at home there, and what it made and is needed again later.
        overwritten = problem.homes.intersection(problem.graph.ops[event.op].overwrites)
        plan.in_host -= overwritten
        for v in (*sorted(overwritten), *outputs):
            needed = v in overwritten or last_back.get(v, -1) > i
            if needed and v not in plan.in_host and v not in plan.sending:
                plan.sending[v] = busy = max(busy, plan.seconds) + host.seconds_to_send(plan.sizes[v])
                plan.add(Send(v))
    # At the end of the step everything has arrived, and no copy stays.
    if boundary >= len(happens):
        plan.boundary = len(plan.steps)
    for v in list(plan.sending):
        plan.arrive(v)
    for v in sorted(plan.in_host - problem.homes):  # needed again before it had gone
        plan.add(Drop(v))
    return plan


def _fetches(problem: Problem, budget: int, plan: Outward) -> Plan:
    """Move each fetch up to where it ends in time, or as far up as there is room."""
    host, sizes, steps = problem.host, problem.sizes, plan.steps
    assert host is not None
    live = np.array(plan.live, dtype=np.int64)
    since: dict[int, int] = {}  # value -> the step after which its copy is there and itself gone
    needs: list[tuple[int, int]] = []  # (position of the fetch, first position that it may have)
    for position, step in enumerate(steps):
        gone = step.value if isinstance(step, Free) else step.over if isinstance(step, Run) else None
        if gone is not None:
            since[gone] = position + 1
        elif isinstance(step, Fetch):
            needs.append((position, since.get(step.value, 0)))
    # From the last fetch to the first: each ends when it is needed, or when the next one begins.
    begins: dict[int, list[Step]] = {}
    busy = float("inf")
    for position, first in reversed(needs):
        step = steps[position]
        assert isinstance(step, Fetch)
        size = int(sizes[step.value])
        busy = min(busy, plan.now[position]) - host.seconds_to_fetch(size)
        target = min(position, max(first, bisect_right(plan.now, busy) - 1))
        # It begins after the last step at which there is no room for it.
        full = np.flatnonzero(live[target:position] + size > budget)
        begin = target + int(full[-1]) + 1 if len(full) else target
        # Frees take no time: it begins behind them.
        begin = next((i for i in range(begin, position) if not isinstance(steps[i], Free)), position)
        live[begin:position] += size
        begins.setdefault(begin, []).insert(0, step)
    # The steps with each fetch at its new place.
    moved: list[Step] = []
    boundary = 0
    for position, step in enumerate(steps):
        if position == plan.boundary:
            boundary = len(moved)
        moved += begins.get(position, [])
        if not isinstance(step, Fetch):
            moved.append(step)
    return Plan(tuple(moved), boundary if plan.boundary < len(steps) else len(moved))
