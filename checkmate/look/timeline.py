"""The timeline of a plan: each copy of a value in memory, from the op that makes it to the one that frees it.

Pictures, explanations and reports read a plan through this module. Its bytes and seconds are those of
`checkmate.core.timing.walk`; the copies that it tells apart add up to these, to the byte, at every op.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, Literal, NamedTuple

import numpy as np

from checkmate.core.graph import CodePlace, Op
from checkmate.core.inplace import InPlace
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Start, Wait
from checkmate.core.problem import Problem
from checkmate.core.timing import Event, walk

RESIDENT = ("parameters", "buffers", "inputs", "optimizer state", "other resident")
ROLES = (
    *RESIDENT,
    "results",  # the loss, gradients of parameters, new statistics: they stay to the end of the step
    "activations",  # first copies of what the forward makes
    "made again",  # later copies of anything but results
    "fetched",  # copies from the second memory, from the begin of their transfer on, or kept since the last call
    "gradients",  # first copies of what the backward makes
    "workspace",  # of the op that runs
)
Ways = dict[tuple[int, int | None], InPlace]  # by op and value that it writes over
OUTSIDE, NOWHERE = "outside modules", CodePlace()
Path = tuple[str, ...]  # of a module: layer1.0.conv2 is ("layer1", "0", "conv2")
GROUPS = 8  # of modules, where nobody says how many


@dataclass(frozen=True)
class Moment:
    """An execution of an op."""

    index: int  # which execution of the plan this is, from 0
    op: int  # index in the graph
    name: str  # of the op
    target: str  # the op's operator, e.g. "aten.mm.default"
    op_phase: str  # which half of the graph the op belongs to: "forward" or "backward"
    phase: str  # when it runs: a forward op that is made again for the backward runs in the "backward"
    time: int  # how often the op has run before; above 0 it is a rematerialization
    begin: float  # seconds from the begin of the step
    seconds: float  # its duration; of an op on a link, the wait for it
    bytes: int  # at hand while it runs: resident, values, workspace; or after it, where more is fetched then
    workspace: int  # bytes that it needs while it runs
    over: str  # name of the value that it writes over, which is gone then; empty where it writes over none
    where: str  # as `Op.where`, empty where not known
    place: CodePlace  # ``where`` in parts
    waited: float  # seconds between it and the next execution, in which a transfer is waited for
    position: int  # of the step in the plan
    tick: int  # of `checkmate.core.timing.Event`


@dataclass(frozen=True)
class Span:
    """Bytes from birth to death: a copy of a value, or a workspace, in memory from execution ``first`` to ``last``.

    A copy that is written over ends before the execution that does so, though this one reads it yet. One that is
    fetched begins with the execution after the begin of its transfer, what a started op makes with the one after its
    start. ``born`` and ``died`` are of a finer clock, which ticks with every execution, start and fetch.
    """

    value: int  # index in the graph; of a workspace -1
    name: str  # of the value, or of the op whose workspace it is
    bytes: int
    role: str  # one of ROLES
    producer: int  # the op that made it; of what is at home in the second memory, the first that reads it
    first: int  # index of the Moment that makes it
    last: int  # index of the last Moment at which it is at hand
    born: int  # the tick from which on it is at hand
    died: int  # the tick from which on it is gone
    copy: int = 0  # how many copies were made before
    ready: int = 0  # index of the first Moment that can read it: the next one, or the one after its transfer's end
    uses: tuple[int, ...] = ()  # indices of the Moments that read this copy, ascending
    continues: int | None = None  # index of the Span in whose storage it is, which ends where this begins; None: none
    over: str = ""  # name of the value of that one; empty where there is none
    where: str = ""  # of the producer
    place: CodePlace = NOWHERE
    offset: int = 0  # bytes from the begin of an arena, where `checkmate.addresses` has placed it

    def next_use(self, index: int) -> int | None:
        """The first Moment after this one that reads the copy; None if there is none."""
        return next((use for use in self.uses if use > index), None)


@dataclass(frozen=True)
class LinkUse:
    """A transfer to or from the second memory, or an op that a link carries; seconds are since the step's begin."""

    lane: str  # "sent" to or "fetched" from the second memory, or the name of the op's link
    item: int  # index in the graph: of the value, or of the op
    name: str  # of the same
    bytes: int  # of the value; of an op 0
    asked: float  # seconds; from then on it may wait for its link
    begin: float
    end: float
    after: int  # index of the execution after which it is asked for, at least 0
    born: int  # the tick from which on it is under way
    died: int  # the tick from which on the plan knows that it has ended
    waited: float = 0.0  # seconds in which no op runs, since it has not ended
    run: int | None = None  # of an op: index of the Moment at which the plan waits for it

    @property
    def stall(self) -> tuple[float, float]:
        """Begin and end of the seconds in which the step waits for it."""
        return self.end - self.waited, self.end


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """A plan as it unfolds. Made by `timeline`; its bytes in memory equal the simulator's."""

    moments: tuple[Moment, ...]  # (N,) in the order in which they run
    spans: tuple[Span, ...]  # in the order in which they are made
    resident: dict[str, int]  # bytes that are there all the time, by role
    boundary: int  # how many of the moments belong to the forward
    seconds: float  # of the whole step, with those in which transfers are waited for
    ticks: np.ndarray  # (N,) int64: of each moment, the tick of its most bytes: its execution's, or a fetch's after it
    workspaces: np.ndarray  # (N,) int64: of these bytes, workspace, of the op that runs and of those on links
    crossings: tuple[LinkUse, ...] = ()  # transfers, in the order in which they are asked for
    carried: tuple[LinkUse, ...] = ()  # executions of ops on links, in the order in which they are waited for
    host_bytes: tuple[int, ...] = ()  # (N,) the most bytes in the second memory from each execution to the next
    levels: tuple[tuple[float, int], ...] = ()  # (seconds, bytes there from then on)

    @cached_property
    def bytes(self) -> np.ndarray:
        """(N,) int64: bytes in memory while each execution runs."""
        return np.array([moment.bytes for moment in self.moments], dtype=np.int64)

    @cached_property
    def begins(self) -> list[float]:
        """(N + 1,) seconds at which each execution begins, and the last one ends."""
        return [*(moment.begin for moment in self.moments), self.seconds]

    @cached_property
    def lanes(self) -> dict[str, list[LinkUse]]:
        """The uses of each link: out to the second memory and back, if used; then the graph's links."""
        lanes: dict[str, list[LinkUse]] = {"sent": [], "fetched": []} if self.crossings else {}
        for use in (*self.crossings, *self.carried):
            lanes.setdefault(use.lane, []).append(use)
        return lanes

    @property
    def peak(self) -> int:
        """The most bytes in memory."""
        return int(self.bytes.max())

    @property
    def peak_moment(self) -> Moment:
        """The first execution with the most bytes in memory."""
        return self.moments[int(self.bytes.argmax())]

    def alive(self, index: int) -> tuple[Span, ...]:
        """The copies in memory while this execution runs, outputs included, the largest first.

        Where more bytes are at hand after it than while it runs, since a fetch begins, the copies that are there then.
        """
        spans = (span for span in self.spans if span.born <= self.ticks[index] < span.died)
        return tuple(sorted(spans, key=lambda span: -span.bytes))

    @property
    def storages(self) -> list[list[Span]]:
        """The spans that share a place, in turn: copies written over each other; then each workspace by itself."""
        of_span = list[list[Span]]()
        for span in self.spans:
            of_span.append([] if span.continues is None else of_span[span.continues])
            of_span[-1].append(span)
        storages = [spans for spans, span in zip(of_span, self.spans, strict=True) if spans[0] is span]
        ops = (m for m in self.moments if m.workspace)
        lives = ((m.name, m.workspace, "workspace", m.op, m.index, m.index, m.tick, m.tick + 1) for m in ops)
        return storages + [[Span(-1, *life)] for life in lives]

    def under_way(self, index: int) -> tuple[LinkUse, ...]:
        """The transfers that were begun and not yet waited for, at the same moment."""
        return tuple(c for c in self.crossings if c.born <= self.ticks[index] < c.died)

    def by_role(self) -> dict[str, np.ndarray]:
        """(N,) int64 bytes over the step for each role that has any, in the order of ROLES. They add up to `bytes`."""
        rows = self._sums(lambda span: span.role)
        rows.update({role: np.full(len(self.moments), size) for role, size in self.resident.items()})
        rows["workspace"] = self.workspaces
        return {role: rows[role] for role in ROLES if role in rows and rows[role].any()}

    def by_module(self, groups: int = GROUPS) -> dict[str, np.ndarray]:
        """(N,) int64 bytes over the step for each group of modules. They add up to `bytes`.

        Modules next to each other are taken together as in `checkmate.look.timeline.fold`, until there are at most
        ``groups`` of them. What belongs to none is "outside modules", what is there all the time "resident".
        """
        held, none = self._sums(lambda span: span.place.module), np.zeros(len(self.moments), dtype=np.int64)
        order = dict.fromkeys(m.place.module for m in sorted(self.moments, key=lambda m: m.op))
        held = {path: held.get(path, none).copy() for path in order}
        for moment in self.moments:
            held[moment.place.module][moment.index] += self.workspaces[moment.index]
        paths, named = [path for path in order if path], {"": OUTSIDE}
        for label, part in fold(paths, groups, [int(held[path].sum()) for path in paths]):
            named.update((paths[i], label) for i in part)
        rows = {"resident": none + sum(self.resident.values()), **dict.fromkeys(named.values(), none)}
        for path, row in held.items():
            rows[named[path]] = rows[named[path]] + row
        return {label: row for label, row in rows.items() if row.any()}

    def by(self, what: Literal["role", "module"]) -> dict[str, np.ndarray]:
        """`by_role` or `by_module`; a ValueError if it is neither."""
        if what not in ("role", "module"):
            raise ValueError(f"Bytes are told apart by 'role' or by 'module', not by {what!r}.")
        return self.by_role() if what == "role" else self.by_module()

    def _sums(self, label: Callable[[Span], str]) -> dict[str, np.ndarray]:
        """(N,) int64 for each label: the bytes of its spans over the step."""
        changes, ticks = dict[str, np.ndarray](), 1 + max(span.died for span in self.spans)
        for span in self.spans:
            row = changes.setdefault(label(span), np.zeros(ticks, dtype=np.int64))
            row[span.born] += span.bytes
            row[span.died] -= span.bytes
        return {name: row.cumsum()[self.ticks] for name, row in changes.items()}


def timeline(plan: Plan, problem: Problem) -> Timeline:
    """Make the timeline of a plan that `checkmate.core.simulator.check_plan` accepts.

    Raises:
        ValueError: if the plan runs nothing, or writes over what no way of an op does.

    >>> from checkmate import solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[10, 20, 20, 5])
    >>> line = timeline(solve(problem, "1 kB").plan, problem)
    >>> [(moment.name, moment.bytes) for moment in line.moments]
    [('op0', 10), ('op1', 30), ('op2', 50), ('op3', 35)]
    >>> [(span.name, span.bytes) for span in line.alive(2)], line.spans[0].next_use(2)
    ([('v1', 20), ('v2', 20), ('v0', 10)], 3)
    """
    events = list(walk(plan, problem))
    if not events or events[-1].run < 0:
        raise ValueError("The plan runs nothing: it has no timeline.")
    groups = [list(group) for _, group in groupby(events, key=lambda event: max(0, event.run))]
    # The way that saves the most, by op and value that it may write over.
    ways: Ways = {(way.op, way.over): way for way in sorted(problem.profile.ways, key=lambda way: way.workspace)[::-1]}
    # Workspace of ops on links at each tick, without the op that runs then.
    held, on_links = dict.fromkeys((event.tick for event in events), 0), dict[int, int]()
    for event in events:
        if isinstance(event.step, Start):
            on_links[event.step.op] = int(problem.workspace[event.step.op])
        held[event.tick] = sum(on_links.values())
        if isinstance(event.step, Run):
            held[event.tick] -= on_links.pop(event.step.op, 0)
    # The executions, with the tick of the most bytes from each to the next, and the workspace then.
    moments, ticks, workspaces, times = [], list[int](), list[int](), [0] * len(problem.graph.ops)
    positions = (position for position, step in enumerate(plan.steps) if isinstance(step, Run))
    for position, group in zip(positions, groups, strict=True):
        event = next(e for e in group if isinstance(e.step, Run))
        run = event.step
        assert isinstance(run, Run)
        op, way = problem.graph.ops[run.op], ways.get((run.op, run.over))
        fullest = max((e for e in group if isinstance(e.step, (Run, Start, Fetch))), key=lambda e: e.device_bytes)
        most, tick = fullest.device_bytes, fullest.tick
        if problem.kept and event.run == 0 and problem.begin_bytes > most:  # before the first step
            most, tick = problem.begin_bytes, 0
        waited = sum((e.until - e.at for e in group if isinstance(e.step, Wait) and e.run >= 0), 0.0)
        phase = "forward" if position < plan.boundary else "backward"
        workspace = int(problem.workspace[run.op]) if way is None else way.workspace
        over = "" if run.over is None else problem.graph.values[run.over].name
        seconds = event.until - event.at if op.link else float(problem.seconds[run.op])
        figures = times[run.op], event.at, seconds, most, workspace, over
        where = op.where or "", op.place, waited, position, event.tick
        moments.append(Moment(event.run, run.op, op.name, op.target, op.phase, phase, *figures, *where))
        ticks.append(tick)
        workspaces.append(held.get(tick, 0) + (workspace if tick == event.tick else 0))
        times[run.op] += 1
    levels = ((event.at, event.host_bytes) for event in events if isinstance(event.step, (Send, Drop)))
    return Timeline(
        tuple(moments),
        _spans(problem, events, ways),
        _resident(problem),
        sum(moment.phase == "forward" for moment in moments),
        events[-1].until,
        np.array(ticks, dtype=np.int64),
        np.array(workspaces, dtype=np.int64),
        *_link_uses(problem, events),
        host_bytes=tuple(max(event.host_bytes for event in group) for group in groups),
        levels=((0.0, problem.homes_bytes), *levels),
    )


def _spans(problem: Problem, events: list[Event], ways: Ways) -> tuple[Span, ...]:
    """List the copies of all values."""
    graph, sizes = problem.graph, problem.sizes.tolist()
    rows: list[dict[str, Any]] = []  # fields of each `Span` so far
    open_: dict[int, int] = {}  # by value, which copy is at hand
    copies = [0] * len(graph.values)
    final, results = events[-1].run, frozenset(graph.outputs)
    started: set[int] = set()

    def begin(v: int, first: int, tick: int, role: str, ready: int | None, continues: int | None = None) -> None:
        k, role = graph.first_op(v), "results" if v in results else role
        fields = {"value": v, "name": graph.values[v].name, "bytes": sizes[v], "role": role, "copy": copies[v]}
        when = {"first": first, "ready": ready, "uses": (), "continues": continues, "born": tick}
        op, over = graph.ops[k], "" if continues is None else rows[continues]["name"]
        rows.append({**fields, **when, "over": over, "producer": k, "where": op.where or "", "place": op.place})
        copies[v] += 1

    def role_of(v: int, op: Op) -> str:
        return "made again" if copies[v] else "activations" if op.phase == "forward" else "gradients"

    def end(i: int, last: int, tick: int) -> None:
        rows[i].update(last=max(rows[i]["first"], last), died=tick)

    for v in sorted(problem.kept):
        open_[v] = len(rows)
        begin(v, 0, 0, "fetched", 0)
    for event in events:
        step, index, tick = event.step, event.run, event.tick
        if isinstance(step, Run):
            # Its inputs are used; the one it overwrites ends here.
            op, way, ended = graph.ops[step.op], ways.get((step.op, step.over)), None
            for v in op.inputs:
                if v in open_:
                    rows[open_[v]]["uses"] += (index,)
            if step.over is not None:
                if way is None or step.over not in open_:
                    run = f"{op.name} over {graph.values[step.over].name}"
                    raise ValueError(f"The plan runs {run}, which no way of it does, or which is not at hand.")
                ended = open_.pop(step.over)
                end(ended, index - 1, tick)
            for v in op.outputs:
                # Those of an op on a link are there since its start, and ready now.
                if step.op in started:
                    rows[open_[v]]["ready"] = index + 1
                    continue
                # Others begin; a second copy of a value at hand ends at once.
                begin(v, index, tick, role_of(v, op), index + 1, ended if way is not None and way.makes == v else None)
                end(len(rows) - 1, index, tick + 1)
                open_.setdefault(v, len(rows) - 1)
            started.discard(step.op)
        elif isinstance(step, Start):
            started.add(step.op)
            for v in graph.ops[step.op].outputs:
                open_[v] = len(rows)
                begin(v, min(index + 1, final), tick, role_of(v, graph.ops[step.op]), None)
        elif isinstance(step, Free) and step.value in open_:
            end(open_.pop(step.value), index, tick + 1)
        elif isinstance(step, Fetch):
            open_[step.value] = len(rows)
            begin(step.value, min(index + 1, final), tick, "fetched", None)
        elif isinstance(step, Wait) and step.value in open_ and rows[open_[step.value]]["ready"] is None:
            rows[open_[step.value]]["ready"] = index + 1
    # Values still in memory end with the step.
    for i in open_.values():
        end(i, final, events[-1].tick + 1)
    for copy in rows:
        copy["ready"] = copy["first"] + 1 if copy["ready"] is None else copy["ready"]
    return tuple(Span(**copy) for copy in rows)


def _link_uses(problem: Problem, events: list[Event]) -> tuple[tuple[LinkUse, ...], tuple[LinkUse, ...]]:
    """The transfers in the order in which they begin, and ops on links in the order in which they are waited for."""
    graph, crossings, carried = problem.graph, list[LinkUse](), list[LinkUse]()
    last: dict[int, int] = {}  # by value, the number of its last transfer
    starts: dict[int, Event] = {}  # starts of ops that go on
    never = events[-1].tick + 1
    for event in events:
        step, waited = event.step, event.until - event.at
        # Transfers: begun here, ended and waited for at their `Wait`.
        if isinstance(step, (Send, Fetch)):
            v, back = step.value, isinstance(step, Fetch)
            last[v] = len(crossings)
            name, size = graph.values[v].name, int(problem.sizes[v])
            when = event.at, event.begin, event.end, max(0, event.run), event.tick + (not back), never
            crossings.append(LinkUse("fetched" if back else "sent", v, name, size, *when))
        elif isinstance(step, Wait):
            crossings[last[step.value]] = replace(crossings[last[step.value]], waited=waited, died=event.tick + 1)
        # Ops on links: begun at their start, or when they run.
        elif isinstance(step, Start):
            starts[step.op] = event
        elif isinstance(step, Run) and (op := graph.ops[step.op]).link:
            start = starts.pop(step.op, event)  # it may be waited for at once
            after = max(0, start.run - (start is event))
            when = start.at, event.begin, event.end, after, start.tick, event.tick + 1
            carried.append(LinkUse(op.link, step.op, op.name, 0, *when, waited, event.run))
    return tuple(crossings), tuple(carried)


def _resident(problem: Problem) -> dict[str, int]:
    """Bytes resident throughout the step, by role; bytes of no value are "other resident"."""
    words = {"parameter": "parameters", "buffer": "buffers", "input": "inputs"}
    sizes = {**dict.fromkeys(RESIDENT, 0), "optimizer state": problem.profile.state_bytes}
    for v, value in enumerate(problem.graph.values):  # states are in the profile's bytes of these
        if value.producer is None and value.role != "state" and v not in problem.homes:
            sizes[words.get(value.role, "other resident")] += value.size_bytes
    remainder = problem.resident - sum(sizes.values())
    if remainder < 0:  # values that share bytes: no telling them apart
        return {"other resident": problem.resident}
    sizes["other resident"] += remainder
    return {role: size for role, size in sizes.items() if size}


class _Group(NamedTuple):
    """Neighbouring rows from ``first`` to ``last``, both included."""

    first: int
    last: int
    begin: Path  # module of the first of them that has one
    end: Path  # and of the last; the same where they are all of one
    weight: int

    def joined(self, other: _Group) -> _Group:
        begin, end = self.begin or other.begin, other.end or self.end
        return _Group(self.first, other.last, begin, end, self.weight + other.weight)


def fold(paths: Sequence[str], most: int, weights: Sequence[int] | None = None) -> list[tuple[str, range]]:
    """Group neighbours of one module, the innermost modules first, until few enough groups are left.

    Where one module would hold more than half of the weight, as with the many equal blocks of a transformer, it stays
    apart: then neighbours are taken together so that the heaviest group is as light as it can be; or, where this would
    leave no more than half of ``most``, the lightest neighbours first.

    Args:
        paths: of modules, such as ``layer1.0.conv2``, empty where there is none, in order of execution.
        most: how many groups may be left.
        weights: of each path, whole numbers; by default 1.

    Returns:
        Of each group its module, or the first and the last of its modules, empty where there is none; and its paths.

    Raises:
        ValueError: if ``most`` is less than 1.

    >>> blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    >>> [label for label, _ in fold(["embed", *blocks, "head"], most=8)]
    ['embed', 'h.0', 'h.1', 'h.2', 'h.3', 'h.4', 'h.5', 'head']
    >>> fold([*blocks, "head"], most=4)
    [('h.0-1', range(0, 4)), ('h.2-3', range(4, 8)), ('h.4-5', range(8, 12)), ('head', range(12, 13))]
    """
    if most < 1:
        raise ValueError(f"most is a number of groups, at least 1, not {most!r}.")
    split = [tuple(path.split(".")) if path else () for path in paths]
    weights = [1] * len(split) if weights is None else weights
    groups = [_Group(i, i, path, path, weights[i]) for i, path in enumerate(split)]
    half = sum(weights) / 2
    deepest = max(map(len, split), default=0)
    for depth in range(deepest, 0, -1):
        if len(groups) <= most:
            break
        # Each run of neighbours that share the first names of their module, as many as the depth, is one group.
        folded: list[_Group] = []
        for module, same in groupby(groups, key=lambda g: g.begin[:depth] or g.first):
            run = list(same)
            whole = len(run) > 1 and isinstance(module, tuple)
            weight = sum(group.weight for group in run)
            folded.append(_Group(run[0].first, run[-1].last, module, module, weight) if whole else run[0])
        if depth < deepest and max(group.weight for group in folded) > max(half, *(g.weight for g in groups)):
            break
        groups = folded

    def packed(capacity: int) -> list[_Group]:
        evenly = groups[:1]
        for group in groups[1:]:
            fits = evenly[-1].weight + group.weight <= capacity
            evenly[-1:] = [evenly[-1].joined(group)] if fits else [evenly[-1], group]
        return evenly

    if len(groups) > most:
        # Group neighbours evenly, so that the heaviest group is as light as it can be.
        weighs = [group.weight for group in groups]
        capacity = bisect_left(range(sum(weighs)), True, max(weighs), key=lambda c: len(packed(c)) <= most)
        evenly = packed(capacity)
        groups = evenly if 2 * len(evenly) > most else groups
    # A few are far heavier: take the lightest neighbours together.
    while len(groups) > most:
        i = min(range(len(groups) - 1), key=lambda i: groups[i].weight + groups[i + 1].weight)
        groups[i : i + 2] = [groups[i].joined(groups[i + 1])]
    return [(_label(group, split), range(group.first, group.last + 1)) for group in groups]


def _label(group: _Group, paths: list[Path]) -> str:
    """``h`` for a whole module, ``h.0-3`` for some neighbours within it, ``embed - h.3`` for others."""
    inside = [path for path in paths[group.first : group.last + 1] if path]
    # Names at the front that all of them have in common.
    pairs = zip(min(inside, default=()), max(inside, default=()), strict=False)
    shared = tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    outside = (*paths[: group.first], *paths[group.last + 1 :])
    if shared and (len(set(inside)) == 1 or all(path[: len(shared)] != shared for path in outside)):
        return ".".join(shared)
    begin, end = group.begin, group.end
    if begin == end:  # some of a module, the rest of which is elsewhere
        begin, end = (path[: len(shared) + 1] for path in (inside[0], inside[-1])) if inside else ((), ())
    n = len(shared)
    if n and begin != end and min(len(begin), len(end)) > n and begin[n + 1 :] == end[n + 1 :]:
        return f"{'.'.join(begin[: n + 1])}-{end[n]}"
    return " - ".join(dict.fromkeys(filter(None, map(".".join, (begin, end)))))
