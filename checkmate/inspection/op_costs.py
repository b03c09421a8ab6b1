"""The costs of a step, op by op: seconds, bytes made, and how long these bytes live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from checkmate.core.answer import Column, Listed, Table, table
from checkmate.core.problem import Problem
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
        return (
            f"{len(self.rows)} ops, {format_seconds(self.seconds)} and at most {format_bytes(self.peak)} a step "
            f"({self.source})"
        )

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
    graph, seconds, sizes = problem.graph, problem.seconds, problem.sizes
    # The clock of a step that runs each op once.
    ends = np.cumsum(seconds)
    step = problem.keep_all_cost
    estimated = set(problem.profile.estimated)
    results = set(graph.outputs)

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
