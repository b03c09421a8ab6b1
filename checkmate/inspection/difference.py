"""Two plans of one step side by side: what runs more often in one, what is kept in one and not in the other, where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, check_solution
from checkmate.core.table import Printed, Table
from checkmate.inspection.modules import fold, place_of
from checkmate.inspection.timeline import OUTSIDE
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
    seconds: float  # that the second plan spends more on it


@dataclass(frozen=True)
class ValueDifference:
    """A value that one of two plans keeps."""

    value: int  # index in the graph
    name: str
    module: str
    where: str
    bytes: int  # that the second plan keeps more; negative where the first one keeps it


@dataclass(frozen=True)
class ModuleDifference:
    """What differs in neighbouring modules, taken together."""

    module: str
    runs: int  # that the second plan makes more
    seconds: float  # that it spends more
    bytes: int  # that it keeps more


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """How the second of two plans differs from the first. Prints as a summary with tables."""

    a: Solution
    b: Solution
    ops: tuple[OpDifference, ...]  # those that cost or save most seconds first
    values: tuple[ValueDifference, ...]  # most bytes first
    modules: tuple[ModuleDifference, ...]  # in the order of the graph
    kept_at: str  # when a value counts as kept, in words
    sent: tuple[ValueDifference, ...] = ()  # bytes that the second plan sends to the second memory, as for values
    top: int = 10  # how many ops and values are printed

    def __bool__(self) -> bool:
        return bool(self.ops or self.values or self.sent)

    def records(self) -> list[dict[str, Any]]:
        """Each op that runs more often in one of the plans as a dict."""
        return [asdict(row) for row in self.ops]

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
        over_a, over_b = (0 if s.plan is None else s.plan.runs_over for s in (a, b))
        if over_a or over_b:
            yield "in place", f"{over_a} to {over_b} runs write over an input"
        if a.elsewhere is not None or b.elsewhere is not None:
            yield from self._about_sent()
        for word, sign in (("runs more", 1), ("runs less", -1)):
            rows = [row for row in self.ops if (row.runs_b - row.runs_a) * sign > 0]
            times = sum(abs(row.runs_b - row.runs_a) for row in rows)
            spent = signed(sum(row.seconds for row in rows), format_seconds)
            yield word, f"{len(rows)} ops, {times} times in all: {spent}" if rows else "no op"
        for word, sign in (("keeps", 1), ("drops", -1)):
            kept = [row for row in self.values if row.bytes * sign > 0]
            size = signed(sum(row.bytes for row in kept), format_bytes)
            yield word, f"{len(kept)} values {self.kept_at}: {size}" if kept else "no value"

    def _about_sent(self) -> Iterator[tuple[str, str]]:
        for word, sign in (("sends", 1), ("sends no more", -1)):
            sent = [row for row in self.sent if row.bytes * sign > 0]
            size = format_bytes(sum(abs(row.bytes) for row in sent))
            yield word, f"{len(sent)} values, {size}" if sent else "no value"
        waited = [0.0 if s.elsewhere is None else s.elsewhere.waited for s in (self.a, self.b)]
        yield "waits", f"{format_seconds(waited[0])} to {format_seconds(waited[1])} for transfers"

    def _tables(self) -> Iterator[Table]:
        """Those without rows are left out."""
        if len(self.modules) > 1:
            yield Table(_MODULE_HEADS, [*map(_module_cells, self.modules)], _NUMBERS, "by module")
        if self.ops:
            rest = self.ops[self.top :]
            spent = signed(sum(row.seconds for row in rest), format_seconds)
            more = [(f"... and {len(rest)} more", "", "", spent, "")] if rest else []
            yield Table(_OP_HEADS, [*map(_op_cells, self.ops[: self.top]), *more], _NUMBERS, "runs")
        if self.values:
            left = self.values[self.top :]
            size = signed(sum(row.bytes for row in left), format_bytes)
            others = [(f"... and {len(left)} more", "", size, "")] if left else []
            rows = [*map(_value_cells, self.values[: self.top]), *others]
            yield Table(_VALUE_HEADS, rows, _NUMBERS, f"kept {self.kept_at}")
        if self.sent:
            rows = [*map(_value_cells, self.sent[: self.top])]
            if left := self.sent[self.top :]:
                rows.append((f"... and {len(left)} more", "", signed(sum(row.bytes for row in left), format_bytes), ""))
            yield Table(("value", "sent by", "bytes", "where"), rows, _NUMBERS, "sent to the second memory")


_OP_HEADS = ("op", "runs in a", "runs in b", "seconds", "where")
_VALUE_HEADS = ("value", "kept by", "bytes", "where")
_MODULE_HEADS = ("modules", "runs", "seconds", "bytes kept")
_NUMBERS = {"runs in a", "runs in b", "seconds", "bytes", "runs", "bytes kept"}


def _op_cells(row: OpDifference) -> tuple[str, ...]:
    return row.name, str(row.runs_a), str(row.runs_b), signed(row.seconds, format_seconds), row.where


def _value_cells(row: ValueDifference) -> tuple[str, ...]:
    return row.name, "b" if row.bytes > 0 else "a", signed(row.bytes, format_bytes), row.where


def _module_cells(row: ModuleDifference) -> tuple[str, ...]:
    return row.module, f"{row.runs:+d}", signed(row.seconds, format_seconds), signed(row.bytes, format_bytes)


def diff(a: Solution, b: Solution, *, top: int = 10) -> Difference:
    """How plan b differs from plan a of the same step.

    A value is kept if it is at hand when the backward begins; of a problem without a backward, if it is so when the op
    begins at which a plan that keeps everything has its peak.

    Args:
        a: a Solution with a plan.
        b: another, of the same problem.
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
    plan_a, plan_b = _plan_of(a), _plan_of(b)
    sent_a, sent_b = _sent(a), _sent(b)
    _check_same(a.problem, b.problem)
    problem = a.problem
    graph, forward = problem.graph, problem.graph.forward_length
    divided = 0 < forward < len(graph.ops)
    stage = forward if divided else int(problem.live_bytes.argmax())
    kept_at = "between forward and backward" if divided else f"at the beginning of {graph.ops[stage].name}"
    return Difference(
        a=a,
        b=b,
        ops=tuple(sorted(_ops(problem, plan_a, plan_b), key=lambda row: -abs(row.seconds))),
        values=tuple(sorted(_values(problem, plan_a.S[stage], plan_b.S[stage]), key=lambda row: -abs(row.bytes))),
        modules=_modules(problem, plan_a, plan_b, stage, top),
        kept_at=kept_at,
        sent=tuple(sorted(_values(problem, sent_a, sent_b), key=lambda row: -abs(row.bytes))),
        top=top,
    )


def _plan_of(solution: Solution) -> Schedule:
    check_solution(solution)
    if solution.schedule is None:
        raise ValueError(f"There is no plan to compare: {solution.message or solution.status.meaning}")
    return solution.schedule


def _sent(solution: Solution) -> np.ndarray:
    """(V,) bool: the plan sends the value."""
    sent = np.zeros(len(solution.problem.graph.values), dtype=bool)
    if solution.plan is not None:
        sent[[*solution.plan.sent]] = True
    return sent


def _check_same(a: Problem, b: Problem) -> None:
    if a is not b and (a.graph != b.graph or not np.array_equal(a.seconds, b.seconds)):
        raise ValueError(f"The plans are of different problems: {a!r} and {b!r}.")


def _ops(problem: Problem, a: Schedule, b: Schedule) -> Iterator[OpDifference]:
    runs_a, runs_b = a.R.sum(axis=0), b.R.sum(axis=0)
    for k in np.flatnonzero(runs_a != runs_b):
        op, here, there = problem.graph.ops[k], int(runs_a[k]), int(runs_b[k])
        module, spent = place_of(op.where).module, float((there - here) * problem.seconds[k])
        yield OpDifference(int(k), op.name, op.target, op.phase, module, op.where or "", here, there, spent)


def _values(problem: Problem, a: np.ndarray, b: np.ndarray) -> Iterator[ValueDifference]:
    for v in np.flatnonzero(a != b):
        value = problem.graph.values[v]
        assert value.producer is not None  # S is of what ops make
        where, size = problem.graph.ops[value.producer].where or "", int(problem.sizes[v])
        yield ValueDifference(int(v), value.name, place_of(where).module, where, size if b[v] else -size)


def _modules(problem: Problem, a: Schedule, b: Schedule, stage: int, most: int) -> tuple[ModuleDifference, ...]:
    """What differs, by groups of the modules of the forward in their order; modules in which nothing does left out."""
    ops, values = list(_ops(problem, a, b)), list(_values(problem, a.S[stage], b.S[stage]))
    touched = {row.module for row in ops} | {row.module for row in values}
    order = [path for path in dict.fromkeys(place_of(op.where).module for op in problem.graph.ops) if path in touched]
    paths = [path for path in order if path]
    groups: list[tuple[str, Sequence[str]]] = [
        (group.label, paths[group.first : group.last + 1]) for group in fold(paths, max(1, most))
    ]
    if "" in touched:
        groups.append((OUTSIDE, [""]))
    return tuple(
        ModuleDifference(
            label,
            sum(row.runs_b - row.runs_a for row in ops if row.module in inside),
            sum(row.seconds for row in ops if row.module in inside),
            sum(row.bytes for row in values if row.module in inside),
        )
        for label, inside in groups
    )
