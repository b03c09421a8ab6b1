"""What is in memory while a plan runs: each copy of a value from when it is made to when it goes, op by op.

Pictures, explanations and reports read a plan through this module. It says the same as
`checkmate.core.simulator.simulate`, which counts bytes and nothing else; the two agree to the byte at every op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from checkmate.core.plan import Plan, Run
from checkmate.core.problem import Problem
from checkmate.core.ways import Way
from checkmate.inspection.module_groups import fold

RESIDENT = ("parameters", "buffers", "inputs", "other resident")
ROLES = (
    *RESIDENT,
    "results",  # what the step hands out: the loss, gradients of parameters, new statistics; they stay to its end
    "activations",  # first copies of what the forward makes
    "made again",  # later copies of anything but results
    "gradients",  # first copies of what the backward makes
    "workspace",  # of the op that runs
)
OUTSIDE = "outside modules"
GROUPS = 8  # of modules, where nobody says how many

_WHERE = re.compile(r"(?P<module>[^\s(]+) \((?P<facts>.*)\)")
_LINE = re.compile(r"[^\s,()]+:\d+$")


@dataclass(frozen=True)
class Place:
    """Where in the user's code an op comes from, each part empty where not known."""

    module: str = ""  # path, such as "layer1.0.conv2"
    kind: str = ""  # class of the module, such as "Conv2d"
    line: str = ""  # file and line, such as "resnet.py:31"


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
    bytes: int  # at hand while it runs: resident, values, workspace
    workspace: int  # bytes, of these
    over: str  # name of the value that it writes over, which is gone then; empty where it writes over none
    where: str  # as `Op.where`, empty where not known
    place: Place  # the same in parts


@dataclass(frozen=True)
class Span:
    """One copy of a value: at hand while the executions from ``first`` to ``last`` run, both included.

    A copy that is written over ends before the execution that does so, though this one reads it yet.
    """

    value: int  # index in the graph
    name: str  # of the value
    bytes: int
    role: str  # one of ROLES
    copy: int  # how many copies were made before
    producer: int  # the op that made it
    first: int  # index of the Moment that makes it
    last: int  # index of the last Moment at which it is at hand
    uses: tuple[int, ...]  # indices of the Moments that read this copy, ascending
    continues: int | None  # index of the Span in whose storage it is, which ends where this begins; None: in its own
    where: str  # of the producer
    place: Place

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

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.moments[-1].begin + self.moments[-1].seconds

    def alive(self, index: int) -> tuple[Span, ...]:
        """The copies at hand while this execution runs, its outputs included, the most bytes first."""
        here = (span for span in self.spans if span.first <= index <= span.last)
        return tuple(sorted(here, key=lambda span: -span.bytes))

    def by_role(self) -> dict[str, np.ndarray]:
        """For each role that has any bytes, in the order of ROLES, (N,) int64: its bytes over the step.

        They add up to `bytes`.
        """
        rows = self._sums(lambda span: span.role)
        rows.update({role: np.full(len(self.moments), size) for role, size in self.resident.items()})
        rows["workspace"] = np.array([moment.workspace for moment in self.moments], dtype=np.int64)
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
            held[moment.place.module][moment.index] += moment.workspace
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
        return {name: _held(group, len(self.moments)) for name, group in spans.items()}


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
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Run):
            if step.value in open_:
                made[open_.pop(step.value)].last = len(runs) - 1
            continue
        index, op = len(runs), graph.ops[step.op]
        way = ways.get((step.op, step.over))
        if step.over is not None and (way is None or step.over not in open_):
            over = graph.values[step.over].name
            raise ValueError(f"The plan runs {op.name} over {over}, which no way of it does, or which is not at hand.")
        runs.append(_Run(step.op, position < plan.boundary, way))
        for v in op.inputs:
            if v in open_:
                made[open_[v]].uses.append(index)
        ended = None if way is None else open_.pop(way.over)
        if ended is not None:
            made[ended].last = index - 1
        for v in op.outputs:
            continues = ended if way is not None and way.makes == v else None
            made.append(_Copy(v, copies[v], index, index, continues))  # it goes at once where a copy is still at hand
            copies[v] += 1
            open_.setdefault(v, len(made) - 1)
    if not runs:
        raise ValueError("The plan runs nothing: it has no timeline.")
    for i in open_.values():
        made[i].last = len(runs) - 1
    results = frozenset(graph.outputs)
    spans = tuple(_span(problem, copy, places, results) for copy in made)
    moments = _moments(problem, runs, spans, places)
    return Timeline(moments, spans, _resident(problem), sum(run.forward for run in runs))


@dataclass
class _Copy:
    """What becomes a `Span`, while its end is not known."""

    value: int
    before: int
    first: int
    last: int
    continues: int | None
    uses: list[int] = field(default_factory=list)


class _Run(NamedTuple):
    op: int
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


def place_of(where: str | None) -> Place:
    """The parts of `Op.where`.

    >>> place_of("layer1.0.conv2 (Conv2d, resnet.py:31)")
    Place(module='layer1.0.conv2', kind='Conv2d', line='resnet.py:31')
    >>> place_of("train.py:7").line, place_of(None).line
    ('train.py:7', '')
    """
    match = _WHERE.fullmatch(where or "")
    module, facts = (match["module"], match["facts"]) if match else ("", where or "")
    *kind, last = facts.split(", ")
    line = last if _LINE.fullmatch(last) else ""
    named = ", ".join(kind if line else [*kind, last])
    if not match and not line:  # a bare path, or words such as "generated code"
        return Place(module="" if " " in facts else facts)
    return Place(module, named, line)


def _span(problem: Problem, copy: _Copy, places: list[Place], results: frozenset[int]) -> Span:
    v, before = copy.value, copy.before
    value, size = problem.graph.values[v], int(problem.sizes[v])
    k = value.producer
    assert k is not None  # an op made it
    op = problem.graph.ops[k]
    if v in results:
        role = "results"
    elif before:
        role = "made again"
    else:
        role = "activations" if op.phase == "forward" else "gradients"
    when = (copy.first, copy.last, tuple(copy.uses))
    return Span(v, value.name, size, role, before, k, *when, copy.continues, op.where or "", places[k])


def _held(spans: Iterable[Span], length: int) -> np.ndarray:
    """(length,) int64: bytes of these copies while each execution runs."""
    changes = np.zeros(length + 1, dtype=np.int64)
    for span in spans:
        changes[span.first] += span.bytes
        changes[span.last + 1] -= span.bytes
    return changes.cumsum()[:-1]


def _moments(problem: Problem, runs: list[_Run], spans: tuple[Span, ...], places: list[Place]) -> tuple[Moment, ...]:
    live = problem.resident + _held(spans, len(runs))
    times = [0] * len(problem.graph.ops)
    moments, begin = [], 0.0
    for index, (k, forward, way) in enumerate(runs):
        op, seconds = problem.graph.ops[k], float(problem.seconds[k])
        workspace = int(problem.workspace[k]) if way is None else way.workspace
        over = "" if way is None else problem.graph.values[way.over].name
        phase = "forward" if forward else "backward"
        size = int(live[index]) + workspace
        figures = (times[k], begin, seconds, size, workspace, over)
        moments.append(Moment(index, k, op.name, op.target, op.phase, phase, *figures, op.where or "", places[k]))
        times[k] += 1
        begin += seconds
    return tuple(moments)


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
