"""Why a step cannot be planned, or not as wished: graph breaks, and ops that must run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from checkmate.core.answer import Column, Notes, Printed, Table, table
from checkmate.core.problem import Problem
from checkmate.solvers.search.min_budget import MinBudget
from checkmate.units import format_bytes


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
            yield table(_COLUMNS, self.pinned, top=self.top)
        if self.problem is not None and self.problem.rules:
            sizes, rows = self.problem.sizes, []
            for rule in self.problem.rules:
                made_bytes = sum(int(sizes[list(self.problem.graph.ops[k].outputs)].sum()) for k in rule.ops)
                reasons = Counter(why for _, why in rule.exempt)
                cannot = "; ".join(f"{count}: it {why}" for why, count in reasons.items())
                rows.append((rule.pattern, str(rule.asks), str(len(rule.ops)), format_bytes(made_bytes), cannot))
            yield Table(("pattern", "rule", "ops", "makes", "cannot obey"), rows, {"ops", "makes"}, title="rules")
        if self.breaks:
            yield Notes(("graph break", "why"), [(b.where, b.why) for b in self.breaks], title="graph breaks")


_COLUMNS = (
    Column("op", "target"),
    Column("runs once: it", "why"),
    Column("phase", "phase"),
    Column("makes", "output_bytes", format_bytes),
    Column("held", "held_bytes", format_bytes),
    Column("where", "where"),
)


def pinned_ops(problem: Problem) -> tuple[Pinned, ...]:
    """The ops that run once in every plan, those with the most bytes first."""
    graph, sizes = problem.graph, problem.sizes
    in_backward = {v for op in graph.ops if op.phase == "backward" for v in op.inputs}
    rows = [
        Pinned(
            name=op.name,
            target=op.target,
            where=op.where or "",
            why=op.pinned,
            phase=op.phase,
            output_bytes=sum(int(sizes[v]) for v in op.outputs),
            held_bytes=sum(int(sizes[v]) for v in op.outputs if op.phase == "forward" and v in in_backward),
        )
        for op in graph.ops
        if op.pinned
    ]
    return tuple(sorted(rows, key=lambda row: -row.output_bytes))
