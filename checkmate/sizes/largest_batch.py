"""The answer of `checkmate.max_batch_size`: the largest size, its plan, and the cost of smaller sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from checkmate.core.answer import Column, Listed, Table, record, table
from checkmate.core.solution import Solution, format_gap
from checkmate.units import format_bytes, format_seconds


@dataclass(frozen=True)
class SizePoint:
    """A size with a plan and its throughput."""

    size: int
    throughput: float  # sizes a second: samples/s where the size is that of a batch
    seconds: float  # of the step
    overhead: float  # recomputation in proportion to running each op once
    peak: int  # bytes
    gap: float  # (cost - bound) / cost: how much better another schedule of this size could be at most
    method: str
    waited: float  # seconds of the step in which no op runs
    solution: Solution = field(repr=False, compare=False)

    @classmethod
    def of(cls, size: int, solution: Solution) -> SizePoint:
        """The point of a solution with a plan."""
        s = solution
        assert s.peak is not None
        throughput = size / s.cost if s.cost > 0 else float("inf")
        return cls(size, throughput, s.cost, s.recomputation, s.peak, s.gap, s.method, s.waited, s)

    def record(self) -> dict[str, Any]:
        """Its numbers and text as a dict."""
        return record(self)


@dataclass(frozen=True, repr=False)
class LargestBatch(Listed[SizePoint]):
    """The largest size that fits, and the curve below it. Prints as a table."""

    size: int
    solution: Solution  # its plan
    budget: int  # bytes
    max_overhead: float | str | None
    points: tuple[SizePoint, ...]  # by size; the last is the answer
    keep_all: int | None  # the largest size that fits with nothing run again; None: not even the smallest
    fastest: SizePoint  # the highest predicted throughput of the points: often a smaller size
    next_size: str  # why not one more: "proven", "not found", "not looked at", or "asked for no more"
    baselines: Mapping[str, SizePoint | None]  # the largest size of other methods; None: they plan no size
    cut_short: tuple[str, ...]  # methods whose search ran out of time: they may fit larger sizes
    measured_peak: int | None  # bytes of the plan as it ran
    seconds: float  # spent
    ended: str  # "", "time limit" or "interrupted"
    tokens: float | None = None  # of each sample, where the batch is text

    listed: ClassVar = "points"  # for `records`
    facts_width: ClassVar = 0  # as wide as they are

    @property
    def proven(self) -> bool:
        """Tell whether it is proven that no schedule fits at the next larger size."""
        return self.next_size == "proven"

    def summary(self) -> dict[str, Any]:
        """The answer without its plans, for JSON."""
        names = ["size", "budget", "max_overhead", "keep_all", "next_size", "cut_short", "measured_peak", "seconds"]
        names += [] if self.tokens is None else ["tokens"]
        best = {name: None if point is None else point.record() for name, point in self.baselines.items()}
        facts = {name: getattr(self, name) for name in [*names, "ended"]}
        return {**facts, "points": self.records(), "fastest": self.fastest.record(), "baselines": best}

    def _title(self) -> str:
        if self.max_overhead is None:
            cap = "any recomputation"
        elif isinstance(self.max_overhead, str):
            cap = "recomputing one forward at most"
        else:
            cap = f"{self.max_overhead:.1%} recomputation at most"
        return f"largest size within {format_bytes(self.budget)}, {cap}: {self.size}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "one more", _NEXT[self.next_size]
        if self.keep_all is None:
            yield "keep all", "fits at no size"
        else:
            more = "; its search was cut short" if "checkpoint-all" in self.cut_short else ""
            yield "keep all", f"{self.keep_all}, so {self.size / self.keep_all:.2f} times as large{more}"
        fast = self.fastest
        tokens = "" if self.tokens is None else f", {fast.throughput * self.tokens:.4g} tokens/s"
        yield "fastest", f"{fast.size}: {fast.throughput:.4g} samples/s{tokens}, {fast.overhead:+.1%} recomputation"
        for name, point in self.baselines.items():
            more = "; its search was cut short" if name in self.cut_short else ""
            yield name, f"{'plans no size' if point is None else point.size}{more}"
        if self.measured_peak is not None:
            yield "measured", f"{format_bytes(self.measured_peak)} at the largest"
        ended = f", ended by {self.ended}" if self.ended else ""
        yield "found in", f"{format_seconds(self.seconds)}{ended}"

    def _tables(self) -> Iterator[Table]:
        size, samples, step, *columns = _COLUMNS
        tokens, text = self.tokens, []
        if tokens is not None:
            text = [Column("tokens/s", lambda point: f"{point.throughput * tokens:.4g}", str)]
        waits = [Column("waits", "waited", format_seconds)] if any(point.waited for point in self.points) else []
        yield table([size, samples, *text, step, *waits, *columns], self.points)


_COLUMNS = (
    Column("size", "size", str),
    Column("samples/s", lambda point: f"{point.throughput:.4g}", str),
    Column("step", "seconds", format_seconds),
    Column("recomputed", "overhead", "{:.2%}".format),
    Column("peak", "peak", format_bytes),
    Column("gap", "gap", format_gap),
)
_NEXT = {
    "proven": "no schedule fits: proven",
    "not found": "no plan was found; that none exists is not proven",
    "not looked at": "not looked at, for want of time",
    "asked for no more": "not asked for",
}
