"""A step before it is planned: the costs of each op, ops that must run once, graph breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from checkmate.core.answer import Column, Listed, Notes, Printed, Table, table
from checkmate.core.problem import Problem
from checkmate.solvers.search.min_budget import MinBudget
from checkmate.units import format_bytes, format_seconds


@dataclass(frozen=True)
class OpCosts:
    """The costs of one op in a step that runs each op once and frees each value after its last use."""

    op: int  # position in the order of execution
    name: str
    target: str
    phase: str
    where: str  # module path and line of the user's code; empty where not known
    seconds: float
    share: float  # of the step's seconds
    output_bytes: int
    workspace_bytes: int  # while it runs, beyond inputs and outputs
    byte_seconds: float  # sum over its outputs: bytes times the seconds that they stay
    estimated: bool  # not measured
    over: tuple[str, ...] = ()  # values that it can be written over where they are not needed any more, the best first
    saves_bytes: int = 0  # less while it runs, where it is written over the best of them


@dataclass(frozen=True, repr=False)
class Costs(Listed[OpCosts]):
    """The costs of each op, in order of execution. Prints the most expensive by time, bytes and bytes x lifetime."""

    rows: tuple[OpCosts, ...]
    source: str  # where the costs come from
    seconds: float  # of the step
    peak: int  # bytes, nothing running twice
    top: int = 10  # how many ops each printed table shows

    def by_time(self) -> list[OpCosts]:
        """The rows sorted by seconds, the largest first."""
        return sorted(self.rows, key=lambda row: -row.seconds)

    def by_bytes(self) -> list[OpCosts]:
        """The rows sorted by the bytes of an op while it runs, beyond its inputs: outputs and workspace."""
        return sorted(self.rows, key=lambda row: -(row.output_bytes + row.workspace_bytes))

    def by_lifetime(self) -> list[OpCosts]:
        """The rows sorted by bytes times seconds alive, from which rematerialization gains most."""
        return sorted(self.rows, key=lambda row: -row.byte_seconds)

    def _title(self) -> str:
        most = f"{format_seconds(self.seconds)} and at most {format_bytes(self.peak)} a step"
        return f"{len(self.rows)} ops, {most} ({self.source})"

    def _facts(self) -> Iterator[tuple[str, str]]:
        if over := sum(bool(row.over) for row in self.rows):
            yield "in place", f"{over} ops can write over an input that is not needed any more"

    def _tables(self) -> Iterator[Table]:
        most = {"time": self.by_time(), "bytes": self.by_bytes(), "bytes x lifetime": self.by_lifetime()}
        for name, rows in most.items():
            yield table(COLUMNS, rows[: self.top], title=f"most {name}")


COLUMNS = (
    Column("op", "target"),
    Column("time", "seconds", format_seconds),
    Column("share", "share", "{:.1%}".format),
    Column("outputs", "output_bytes", format_bytes),
    Column("workspace", "workspace_bytes", format_bytes),
    Column("bytes x lifetime", "byte_seconds", lambda bytes_: f"{format_bytes(bytes_)} s"),
    Column("phase", "phase"),
    Column("cost", lambda row: "estimated" if row.estimated else ""),
    Column("where", "where"),
)


def costs_of(problem: Problem, top: int = 10) -> Costs:
    """The costs of each op of a problem, as a table that prints the ``top`` most expensive."""
    graph, seconds, sizes, step = problem.graph, problem.seconds, problem.sizes, problem.keep_all_cost
    estimated, results, ends = {*problem.profile.estimated}, {*graph.outputs}, np.cumsum(seconds)  # each op run once

    def lifetime(v: int, k: int) -> float:
        """Seconds from the begin of the op that makes a value to the end of its last use."""
        last = len(graph.ops) - 1 if v in results else max((k, *graph.users[v]))
        return float(ends[last] - ends[k] + seconds[k])

    rows = [
        OpCosts(
            op=k,
            name=op.name,
            target=op.target,
            phase=op.phase,
            where=op.where or "",
            seconds=float(seconds[k]),
            share=float(seconds[k]) / step if step else 0.0,
            output_bytes=sum(int(sizes[v]) for v in op.outputs),
            workspace_bytes=int(problem.workspace[k]),
            byte_seconds=sum(int(sizes[v]) * lifetime(v, k) for v in op.outputs),
            estimated=k in estimated,
            over=tuple(graph.values[v].name for v, _ in problem.savings[k]),
            saves_bytes=max((saved for _, saved in problem.savings[k]), default=0),
        )
        for k, op in enumerate(graph.ops)
    ]
    return Costs(tuple(rows), problem.profile.source, step, problem.keep_all_peak, top)


@dataclass(frozen=True)
class Pinned:
    """An op that runs exactly once in every plan."""

    name: str
    target: str
    where: str  # module path and line of the user's code
    why: str
    phase: str
    output_bytes: int
    held_bytes: int  # the part that the backward reads: no plan frees it before


@dataclass(frozen=True)
class Break:
    """A place in the user's code where `torch.compile` cannot continue one graph."""

    where: str
    why: str


@dataclass(frozen=True, repr=False)
class Explanation(Printed):
    """The answer of `explain`. ``problem`` is None if the step cannot be planned; ``reason`` says why."""

    pinned: tuple[Pinned, ...]  # most bytes first
    breaks: tuple[Break, ...]
    reason: str
    problem: Problem | None
    smallest: MinBudget | None
    top: int = 10  # how many rows the printed table shows

    listed: ClassVar = "pinned"  # for `records`

    @property
    def can_be_planned(self) -> bool:
        """Tell whether the whole step was captured."""
        return self.problem is not None

    @property
    def held_bytes(self) -> int:
        """Bytes that every plan holds between forward and backward, as their ops run once."""
        return sum(row.held_bytes for row in self.pinned)

    def _facts(self) -> Iterator[tuple[str, str]]:
        if self.problem is None or self.smallest is None:
            return
        graph, smallest = self.problem.graph, self.smallest
        phases = Counter(op.phase for op in graph.ops)
        yield "ops", f"{phases['forward']} in the forward, {phases['backward']} in the backward"
        yield "keep all", format_bytes(self.problem.keep_all_peak)
        proven = f"proven: no schedule below {format_bytes(smallest.bound)}"
        yield "smallest", f"{format_bytes(smallest.peak, up=True)} ({proven})"
        yield from (("in parts", text) for text in smallest.splits)
        yield "resident", f"{format_bytes(self.problem.resident)} of parameters, buffers and inputs"
        if self.problem.homes:
            homes = f"{format_bytes(self.problem.homes_bytes)} in the second memory"
            yield "at home", f"{homes}, here only while in use; keeping all, they are here all the time"
        if over := sum(map(bool, self.problem.savings)):
            plain = replace(self.problem, profile=replace(self.problem.profile, ways=()))
            saved = plain.keep_all_peak - self.problem.keep_all_peak
            worth = f"they take {format_bytes(saved)} off it" if saved else "they leave it as it is"
            yield "in place", f"{over} ops can write over an input that is not needed any more; keeping all, {worth}"
        waiting = format_bytes(self.held_bytes)
        yield "pinned", f"{len(self.pinned)} ops run once; {waiting} of what they make wait for the backward"

    def _title(self) -> str:
        return "This step can be planned." if self.can_be_planned else f"This step cannot be planned. {self.reason}"

    def _tables(self) -> Iterator[Table]:
        if self.pinned:
            yield table(_PINNED, self.pinned, top=self.top)
        if self.problem is not None and self.problem.rules:
            sizes, rows = self.problem.sizes, []
            for rule in self.problem.rules:
                output_bytes = sum(int(sizes[v]) for k in rule.ops for v in self.problem.graph.ops[k].outputs)
                reasons = Counter(why for _, why in rule.exempt).items()
                cannot = "; ".join(f"{count}: it {why}" for why, count in reasons)
                rows.append((rule.pattern, str(rule.asks), str(len(rule.ops)), format_bytes(output_bytes), cannot))
            yield Table(("pattern", "rule", "ops", "makes", "cannot obey"), rows, {"ops", "makes"}, title="rules")
        if self.breaks:
            yield Notes(("graph break", "why"), [(b.where, b.why) for b in self.breaks], title="graph breaks")


_PINNED = (
    Column("op", "target"),
    Column("runs once: it", "why"),
    Column("phase", "phase"),
    Column("makes", "output_bytes", format_bytes),
    Column("held", "held_bytes", format_bytes),
    Column("where", "where"),
)


def pinned_ops(problem: Problem) -> tuple[Pinned, ...]:
    """The ops that run once in every plan, those with the most bytes first."""
    graph, sizes, rows = problem.graph, problem.sizes.tolist(), []
    in_backward = {v for op in graph.ops if op.phase == "backward" for v in op.inputs}
    for op in (op for op in graph.ops if op.pinned):
        output_bytes = sum(sizes[v] for v in op.outputs)
        held_bytes = sum(sizes[v] for v in op.outputs if op.phase == "forward" and v in in_backward)
        rows.append(Pinned(op.name, op.target, op.where or "", op.pinned or "", op.phase, output_bytes, held_bytes))
    return tuple(sorted(rows, key=lambda row: -row.output_bytes))
