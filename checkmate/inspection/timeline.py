"""What is in memory while a plan runs: each copy of a value from when it is made to when it goes, op by op.

Pictures, explanations and reports read a plan through this module. It says the same as
`checkmate.core.simulator.simulate`, which counts bytes and nothing else; the two agree to the byte at every op. Seconds
are those of `checkmate.core.timing`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from checkmate.core.plan import Fetch, Free, Plan, Run, Wait
from checkmate.core.problem import Problem
from checkmate.core.timing import Timing, timing
from checkmate.core.ways import Way
from checkmate.inspection.crossings import Crossing, bytes_there, clock, crossings
from checkmate.inspection.module_groups import fold
from checkmate.inspection.places import Place, place_of

RESIDENT = ("parameters", "buffers", "inputs", "other resident")
ROLES = (
    *RESIDENT,
    "results",  # what the step hands out: the loss, gradients of parameters, new statistics; they stay to its end
    "activations",  # first copies of what the forward makes
    "made again",  # later copies of anything but results
    "fetched",  # copies from the second memory, from the begin of their transfer on
    "gradients",  # first copies of what the backward makes
    "workspace",  # of the op that runs
)
OUTSIDE = "outside modules"
GROUPS = 8  # of modules, where nobody says how many


@dataclass(frozen=True)
class Moment:
    """One execution of an op."""

    index: int  # which execution of the plan this is, from 0
    op: int  # index in the graph
    name: str  # of the op
    target: str  # what it computes, e.g. "aten.mm.default"
    op_phase: str  # which half of the graph the op belongs to: "forward" or "backward"
    phase: str  # when it runs: a forward op that is made again for the backward runs in the "backward"
    time: int  # how often the op has run before; above 0 it is a rematerialization
    begin: float  # seconds from the begin of the step
    seconds: float  # that it takes
    bytes: int  # at hand while it runs: resident, values, workspace; or after it, where more is fetched then
    workspace: int  # bytes that it needs while it runs
    over: str  # name of the value that it writes over, which is gone then; empty where it writes over none
    where: str  # as `Op.where`, empty where not known
    place: Place  # the same in parts
    waited: float  # seconds between it and the next execution, in which a transfer is waited for
    position: int  # of the step in the plan
    tick: int  # of the clock of `checkmate.inspection.crossings.clock`


@dataclass(frozen=True)
class Span:
    """One copy of a value: at hand while the executions from ``first`` to ``last`` run, both included.

    A copy that is written over ends before the execution that does so, though this one reads it yet. One that is
    fetched begins with the execution after the begin of its transfer. What is at hand between two executions say
    ``born`` and ``died``: moments of a finer clock, which ticks with every execution and with every fetch.
    """

    value: int  # index in the graph
    name: str  # of the value
    bytes: int
    role: str  # one of ROLES
    copy: int  # how many copies were made before
    producer: int  # the op that made it
    first: int  # index of the Moment that makes it
    ready: int  # index of the first Moment that can read it: the next one, or the one after the end of its transfer
    last: int  # index of the last Moment at which it is at hand
    uses: tuple[int, ...]  # indices of the Moments that read this copy, ascending
    continues: int | None  # index of the Span in whose storage it is, which ends where this begins; None: in its own
    where: str  # of the producer
    place: Place
    born: int  # the tick from which on it is at hand
    died: int  # the tick from which on it is gone

    def next_use(self, index: int) -> int | None:
        """The first Moment after this one that reads the copy; None: nobody does."""
        return next((use for use in self.uses if use > index), None)


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """A plan as it unfolds. Made by `timeline`; the sum of everything at hand is the simulator's, to the byte."""

    moments: tuple[Moment, ...]  # (N,) in the order in which they run
    spans: tuple[Span, ...]  # in the order in which they are made
    resident: dict[str, int]  # bytes that are there all the time, by role
    boundary: int  # how many of the moments belong to the forward
    seconds: float  # of the whole step, with those in which transfers are waited for
    ticks: np.ndarray  # (N,) int64: of each moment, the tick of its most bytes: its execution's, or a fetch's after it
    crossings: tuple[Crossing, ...] = ()  # in the order in which they are asked for
    there: tuple[int, ...] = ()  # (N,) the most bytes in the second memory from each execution to the next
    levels: tuple[tuple[float, int], ...] = ()  # (seconds, bytes there from then on)

    @cached_property
    def bytes(self) -> np.ndarray:
        """(N,) int64: bytes at hand while each execution runs."""
        return np.array([moment.bytes for moment in self.moments], dtype=np.int64)

    @property
    def peak(self) -> int:
        """The most bytes at hand."""
        return int(self.bytes.max())

    @property
    def peak_moment(self) -> Moment:
        """The first execution at which so many bytes are at hand."""
        return self.moments[int(self.bytes.argmax())]

    def alive(self, index: int) -> tuple[Span, ...]:
        """The copies at hand while this execution runs, its outputs included, the most bytes first.

        Where more bytes are at hand after it than while it runs, since a fetch begins, the copies that are there then.
        """
        here = (span for span in self.spans if span.born <= self.ticks[index] < span.died)
        return tuple(sorted(here, key=lambda span: -span.bytes))

    def under_way(self, index: int) -> tuple[Crossing, ...]:
        """The transfers that the plan has asked for and not yet waited for, at the same moment."""
        return tuple(c for c in self.crossings if c.born <= self.ticks[index] < c.died)

    @cached_property
    def workspaces(self) -> np.ndarray:
        """(N,) int64: of the bytes at hand at each moment, the workspace."""
        of_op = [m.workspace if at == m.tick else 0 for m, at in zip(self.moments, self.ticks.tolist(), strict=True)]
        return np.array(of_op, dtype=np.int64)

    def by_role(self) -> dict[str, np.ndarray]:
        """For each role that has any bytes, in the order of ROLES, (N,) int64: its bytes over the step.

        They add up to `bytes`.
        """
        rows = self._sums(lambda span: span.role)
        rows.update({role: np.full(len(self.moments), size) for role, size in self.resident.items()})
        rows["workspace"] = self.workspaces
        return {role: rows[role] for role in ROLES if role in rows and rows[role].any()}

    def by_module(self, groups: int = GROUPS) -> dict[str, np.ndarray]:
        """For each group of modules, (N,) int64: bytes of what its ops make and need, over the step.

        Modules next to each other are taken together as in `checkmate.inspection.module_groups.fold`, until there are
        at most ``groups`` of them. What belongs to none is under "outside modules", what is there all the time under
        "resident". They add up to `bytes`.
        """
        order = dict.fromkeys(m.place.module for m in sorted(self.moments, key=lambda m: m.op))
        paths = [path for path in order if path]
        held = self._sums(lambda span: span.place.module)
        held = {path: held.get(path, np.zeros(len(self.moments), dtype=np.int64)) for path in order}
        for moment in self.moments:
            held[moment.place.module][moment.index] += self.workspaces[moment.index]
        named = {"": OUTSIDE}
        for group in fold(paths, groups, [int(held[path].sum()) for path in paths]):
            named.update(dict.fromkeys(paths[group.first : group.last + 1], group.label))
        rows = {"resident": np.full(len(self.moments), sum(self.resident.values()), dtype=np.int64)}
        rows.update({label: np.zeros(len(self.moments), dtype=np.int64) for label in dict.fromkeys(named.values())})
        for path, row in held.items():
            rows[named[path]] += row
        return {label: row for label, row in rows.items() if row.any()}

    def by(self, what: Literal["role", "module"]) -> dict[str, np.ndarray]:
        """`by_role` or `by_module`.

        Raises:
            ValueError: if it is neither.
        """
        if what not in ("role", "module"):
            raise ValueError(f"Bytes are told apart by 'role' or by 'module', not by {what!r}.")
        return self.by_role() if what == "role" else self.by_module()

    def _sums(self, label: Callable[[Span], str]) -> dict[str, np.ndarray]:
        """(N,) int64 for each label: the bytes of its spans over the step."""
        spans: dict[str, list[Span]] = {}
        for span in self.spans:
            spans.setdefault(label(span), []).append(span)
        length = max(span.died for span in self.spans)
        return {name: _held(group, length)[self.ticks] for name, group in spans.items()}


def timeline(plan: Plan, problem: Problem) -> Timeline:
    """What is at hand at each execution of a plan that `checkmate.core.simulator.verify` accepts.

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
    graph = problem.graph
    places = [place_of(op.where) for op in graph.ops]
    ways = _best_ways(problem)
    made: list[_Copy] = []
    open_: dict[int, int] = {}  # by value, which copy is at hand
    copies = [0] * len(graph.values)
    runs: list[_Run] = []
    ticks, seen = clock(plan), timing(plan, problem)
    for position, (step, tick) in enumerate(zip(plan.steps, ticks, strict=True)):
        if isinstance(step, Free):
            if step.value in open_:
                made[open_.pop(step.value)].end(len(runs) - 1, tick + 1)
        elif isinstance(step, Fetch):
            open_[step.value] = len(made)
            made.append(_Copy(step.value, copies[step.value], len(runs), tick, fetched=True))
            copies[step.value] += 1
        elif isinstance(step, Wait):
            if step.value in open_ and made[open_[step.value]].ready is None:
                made[open_[step.value]].ready = len(runs)
        elif isinstance(step, Run):
            index, op = len(runs), graph.ops[step.op]
            way = ways.get((step.op, step.over))
            if step.over is not None and (way is None or step.over not in open_):
                what = f"{op.name} over {graph.values[step.over].name}"
                raise ValueError(f"The plan runs {what}, which no way of it does, or which is not at hand.")
            runs.append(_Run(step.op, position, tick, position < plan.boundary, way))
            for v in op.inputs:
                if v in open_:
                    made[open_[v]].uses.append(index)
            ended = None if way is None else open_.pop(way.over)
            if ended is not None:
                made[ended].end(index - 1, tick)
            for v in op.outputs:
                continues = ended if way is not None and way.makes == v else None
                copy = _Copy(v, copies[v], index, tick, continues, ready=index + 1)
                copy.end(index, tick + 1)  # it goes at once where a copy is still at hand
                made.append(copy)
                copies[v] += 1
                open_.setdefault(v, len(made) - 1)
    if not runs:
        raise ValueError("The plan runs nothing: it has no timeline.")
    for i in open_.values():
        made[i].end(len(runs) - 1, ticks[-1] + 1)
    results = frozenset(graph.outputs)
    spans = tuple(_span(problem, copy, places, results, len(runs) - 1) for copy in made)
    at, most = _fullest(problem, runs, spans, ticks[-1] + 1)
    moments = _moments(problem, runs, most, places, seen)
    crossed = crossings(plan, problem, seen) if plan.sent else ()
    there, levels = bytes_there(plan, problem, seen)
    forward = sum(run.forward for run in runs)
    return Timeline(moments, spans, _resident(problem), forward, seen.seconds, at, crossed, there, levels)


@dataclass
class _Copy:
    """What becomes a `Span`, while its end is not known."""

    value: int
    before: int
    first: int
    born: int
    continues: int | None = None
    ready: int | None = None  # None: its transfer has not ended
    fetched: bool = False
    last: int = -1
    died: int = -1
    uses: list[int] = field(default_factory=list)

    def end(self, last: int, died: int) -> None:
        """Say when it goes."""
        self.last, self.died = last, died


class _Run(NamedTuple):
    op: int
    position: int
    tick: int
    forward: bool  # whether it runs in the forward
    way: Way | None  # None: plainly


def _best_ways(problem: Problem) -> dict[tuple[int, int | None], Way]:
    """For an op and a value that it may write over, the way that saves the most."""
    best: dict[tuple[int, int | None], Way] = {}
    for way in problem.profile.ways:
        known = best.setdefault((way.op, way.over), way)
        if way.workspace < known.workspace:
            best[way.op, way.over] = way
    return best


def _span(problem: Problem, copy: _Copy, places: list[Place], results: frozenset[int], final: int) -> Span:
    v, before = copy.value, copy.before
    value, size = problem.graph.values[v], int(problem.sizes[v])
    k = value.producer
    assert k is not None  # an op made it
    op = problem.graph.ops[k]
    if v in results:
        role = "results"
    elif copy.fetched:
        role = "fetched"
    elif before:
        role = "made again"
    else:
        role = "activations" if op.phase == "forward" else "gradients"
    first = min(copy.first, final)
    when = (first, first + 1 if copy.ready is None else copy.ready, max(first, copy.last), tuple(copy.uses))
    at = op.where or "", places[k], copy.born, copy.died
    return Span(v, value.name, size, role, before, k, *when, copy.continues, *at)


def _held(spans: Iterable[Span], length: int) -> np.ndarray:
    """(length,) int64: bytes of these copies at each tick."""
    changes = np.zeros(length + 1, dtype=np.int64)
    for span in spans:
        changes[span.born] += span.bytes
        changes[span.died] -= span.bytes
    return changes.cumsum()[:-1]


def _fullest(problem: Problem, runs: list[_Run], spans: tuple[Span, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(N,) int64 each: the tick from each execution to the next at which most bytes are at hand, and these bytes."""
    live = problem.resident + _held(spans, length)
    begins = np.array([run.tick for run in runs])
    live[begins] += [int(problem.workspace[run.op]) if run.way is None else run.way.workspace for run in runs]
    ticks = np.array([a + live[a:b].argmax() for a, b in pairwise([*begins.tolist(), length])], dtype=np.int64)
    return ticks, live[ticks]


def _moments(
    problem: Problem, runs: list[_Run], most: np.ndarray, places: list[Place], seen: Timing
) -> tuple[Moment, ...]:
    times = [0] * len(problem.graph.ops)
    waited = _waited(runs, seen)
    moments = []
    for index, (k, position, tick, forward, way) in enumerate(runs):
        op, seconds = problem.graph.ops[k], float(problem.seconds[k])
        workspace = int(problem.workspace[k]) if way is None else way.workspace
        over = "" if way is None else problem.graph.values[way.over].name
        phase = "forward" if forward else "backward"
        figures = (times[k], seen.at[position], seconds, int(most[index]), workspace, over)
        where = op.where or "", places[k], waited[index], position, tick
        moments.append(Moment(index, k, op.name, op.target, op.phase, phase, *figures, *where))
        times[k] += 1
    return tuple(moments)


def _waited(runs: list[_Run], seen: Timing) -> list[float]:
    """For each execution the seconds between it and the next one in which nothing runs."""
    positions, waited = [run.position for run in runs], [0.0] * len(runs)
    for position, seconds in seen.stalls:
        waited[bisect_right(positions, position) - 1] += seconds
    return waited


def _resident(problem: Problem) -> dict[str, int]:
    """Bytes that are there all the time, by role; what no value accounts for is "other resident"."""
    words = {"parameter": "parameters", "buffer": "buffers", "input": "inputs"}
    sizes = dict.fromkeys(RESIDENT, 0)
    for value in problem.graph.values:
        if value.producer is None:
            sizes[words.get(value.role, "other resident")] += value.size_bytes
    rest = problem.resident - sum(sizes.values())
    if rest < 0:  # values that share bytes: no telling them apart
        return {"other resident": problem.resident}
    sizes["other resident"] += rest
    return {role: size for role, size in sizes.items() if size}
