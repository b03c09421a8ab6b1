"""Two plans of one step side by side: ops that run more often in one, values that only one keeps, by module."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from checkmate.core.answer import Column, Printed, Table, table
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, require_plan
from checkmate.look.timeline import OUTSIDE, fold
from checkmate.units import format_bytes, format_seconds, signed


@dataclass(frozen=True)
class OpDifference:
    """An op that runs more often in one of two plans."""

    op: int  # index in the graph
    name: str
    target: str
    phase: str
    module: str  # path, empty where not known
    where: str  # module and line of the source
    runs_a: int
    runs_b: int
    seconds: float  # more in the second plan


@dataclass(frozen=True)
class ValueDifference:
    """A value that one of two plans keeps."""

    value: int  # index in the graph
    name: str
    module: str
    where: str
    bytes: int  # kept more by the second plan; negative if by the first


@dataclass(frozen=True)
class ModuleDifference:
    """The difference within neighbouring modules, summed up."""

    module: str
    runs: int  # more in the second plan
    seconds: float  # more in the second plan
    bytes: int  # kept more by the second plan


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """The difference of the second of two plans from the first."""

    a: Solution
    b: Solution
    ops: tuple[OpDifference, ...]  # sorted by seconds cost or saved, the most first
    values: tuple[ValueDifference, ...]  # most bytes first
    modules: tuple[ModuleDifference, ...]  # in the order of the graph
    kept_at: str  # when a value counts as kept, in words
    sent: tuple[ValueDifference, ...] = ()  # bytes that the second plan moves there or back, as for values
    top: int = 10  # how many ops and values are printed

    listed: ClassVar = "ops"  # for `records`

    def __bool__(self) -> bool:
        return bool(self.ops or self.values or self.sent)

    def _title(self) -> str:
        a, b = (f"{s.method} within {format_bytes(s.budget)}" for s in (self.a, self.b))
        return f"From a ({a}) to b ({b}):"

    def _facts(self) -> Iterator[tuple[str, str]]:
        a, b = self.a, self.b
        share = f", {(b.cost - a.cost) / a.cost:+.2%}" if a.cost else ""
        seconds = f"{signed(b.cost - a.cost, format_seconds)}{share}"
        yield "step", f"{format_seconds(a.cost)} to {format_seconds(b.cost)} ({seconds})"
        low, high = a.peak or 0, b.peak or 0
        yield "peak", f"{format_bytes(low)} to {format_bytes(high)} ({signed(high - low, format_bytes)})"
        if a.runs_over or b.runs_over:
            yield "in place", f"{a.runs_over} to {b.runs_over} runs write over an input"
        if a.second_memory is not None or b.second_memory is not None:
            for word, sign in (("sends", 1), ("sends no more", -1)):
                sent = [row for row in self.sent if row.bytes * sign > 0]
                size = format_bytes(sum(abs(row.bytes) for row in sent))
                yield word, f"{len(sent)} values, {size}" if sent else "no value"
            yield "waits", f"{format_seconds(a.waited)} to {format_seconds(b.waited)} for transfers"
        for word, sign in (("runs more", 1), ("runs less", -1)):
            rows = [row for row in self.ops if (row.runs_b - row.runs_a) * sign > 0]
            times, spent = sum(abs(row.runs_b - row.runs_a) for row in rows), sum(row.seconds for row in rows)
            yield word, f"{len(rows)} ops, {times} times in all: {_more_seconds(spent)}" if rows else "no op"
        for word, sign in (("keeps", 1), ("drops", -1)):
            values = [row for row in self.values if row.bytes * sign > 0]
            size = _more_bytes(sum(row.bytes for row in values))
            yield word, f"{len(values)} values {self.kept_at}: {size}" if values else "no value"

    def _tables(self) -> Iterator[Table]:
        if len(self.modules) > 1:
            yield table(_MODULES, self.modules, title="by module")
        if self.ops:
            yield table(_OPS, self.ops, top=self.top, title="runs")
        if self.values:
            yield table(_values_by("kept"), self.values, top=self.top, title=f"kept {self.kept_at}")
        if self.sent:
            yield table(_values_by("sent"), self.sent, top=self.top, title="sent to the second memory")


_more_seconds, _more_bytes = partial(signed, form=format_seconds), partial(signed, form=format_bytes)
_OPS = (
    Column("op", "name"),
    Column("runs in a", "runs_a", str),
    Column("runs in b", "runs_b", str),
    Column("seconds", "seconds", _more_seconds, total=True),
    Column("where", "where"),
)
_MODULES = (
    Column("modules", "module"),
    Column("runs", "runs", "{:+d}".format),
    Column("seconds", "seconds", _more_seconds),
    Column("bytes kept", "bytes", _more_bytes),
)


def _values_by(verb: str) -> tuple[Column, ...]:
    by = Column(f"{verb} by", lambda row: "b" if row.bytes > 0 else "a")
    return Column("value", "name"), by, Column("bytes", "bytes", _more_bytes, total=True), Column("where", "where")


def diff(a: Solution, b: Solution, *, top: int = 10) -> Difference:
    """Compare plan b with plan a of the same step.

    A value is kept if it is at hand when the backward begins; of a problem without a backward, if it is so when the op
    begins at which a plan that keeps everything has its peak.

    Args:
        top: how many ops and values are printed.

    Raises:
        ValueError: if one has no plan, or they are of different problems.

    >>> from checkmate import solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[10] * 5, forward=3)
    >>> difference = diff(solve(chain, 40), solve(chain, 30))
    >>> [(row.name, row.runs_a, row.runs_b, row.seconds) for row in difference.ops]
    [('op0', 1, 2, 1.0)]
    >>> [(row.name, row.bytes) for row in difference.values]
    [('v0', -10)]
    """
    (plan_a, schedule_a), (plan_b, schedule_b) = (require_plan(solution, "compare") for solution in (a, b))
    if not same_problem(a.problem, b.problem):
        raise ValueError(f"The plans are of different problems: {a.problem!r} and {b.problem!r}.")
    problem, graph = a.problem, a.problem.graph
    divided = 0 < graph.forward_length < len(graph.ops)
    stage = graph.forward_length if divided else int(problem.live_bytes.argmax())
    kept_a, kept_b = (set(np.flatnonzero(schedule.S[stage]).tolist()) for schedule in (schedule_a, schedule_b))
    # The ops that run more often in one plan.
    runs_a, runs_b = schedule_a.R.sum(axis=0), schedule_b.R.sum(axis=0)
    ops = []
    for k in np.flatnonzero(runs_a != runs_b).tolist():
        op, times_a, times_b = graph.ops[k], int(runs_a[k]), int(runs_b[k])
        module, spent = op.place.module, float((times_b - times_a) * problem.seconds[k])
        ops.append(OpDifference(k, op.name, op.target, op.phase, module, op.where or "", times_a, times_b, spent))
    values = _values(problem, kept_a, kept_b)
    # The differences by groups of modules, in the order of the forward; groups without any are left out.
    touched = {row.module for row in ops} | {row.module for row in values}
    paths = [path for path in dict.fromkeys(op.place.module for op in graph.ops) if path and path in touched]
    groups, modules = [(label, [paths[i] for i in part]) for label, part in fold(paths, max(1, top))], []
    for label, inside in [*groups, (OUTSIDE, [""])] if "" in touched else groups:
        within = [row for row in ops if row.module in inside]
        runs, spent = sum(row.runs_b - row.runs_a for row in within), sum(row.seconds for row in within)
        kept_bytes = sum(row.bytes for row in values if row.module in inside)
        modules.append(ModuleDifference(label, runs, spent, kept_bytes))
    by_seconds = tuple(sorted(ops, key=lambda row: -abs(row.seconds)))
    kept_at = "between forward and backward" if divided else f"at the beginning of {graph.ops[stage].name}"
    sent = _values(problem, plan_a.moved, plan_b.moved)
    return Difference(a, b, by_seconds, values, tuple(modules), kept_at, sent, top)


def same_problem(a: Problem, b: Problem) -> bool:
    """Tell whether two problems have the same graph and the same seconds."""
    return a is b or (a.graph == b.graph and np.array_equal(a.seconds, b.seconds))


def _values(problem: Problem, a: Set[int], b: Set[int]) -> tuple[ValueDifference, ...]:
    """The values in one of two sets only, the largest first."""
    rows = []
    for v in sorted(a ^ b):
        value = problem.graph.values[v]
        op, size = problem.graph.ops[problem.graph.first_op(v)], int(problem.sizes[v])
        rows.append(ValueDifference(v, value.name, op.place.module, op.where or "", size if v in b else -size))
    return tuple(sorted(rows, key=lambda row: -abs(row.bytes)))
