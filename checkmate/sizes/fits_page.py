"""The answer of `checkmate.fits`: a page for a person, its numbers for a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from checkmate.core.answer import Printed, Table
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.sizes.memory_parts import Parts
from checkmate.units import format_bytes, format_seconds

PLAIN = "plain PyTorch"
NOT_ASKED = "not looked at: everything=True does"  # why there is no way, or no largest batch


@dataclass(frozen=True)
class MemoryOption:
    """A way to make the step take less memory, with its price."""

    name: str
    options: dict[str, str]  # of `checkmate.training_step`, beside the budget
    smallest: int | None  # bytes of the smallest budget known; None: there is no such way, see ``why_not``
    bound: int | None  # bytes: no plan takes less, proven; None: not asked
    fits: bool  # the smallest budget is within the room
    solution: Solution | None = field(default=None, repr=False, compare=False)  # at the room, or at its smallest budget
    reserved: int | None = None  # bytes that PyTorch's allocator would hold for it, by its rules; None: no GPU
    why_not: str = ""  # in words
    host_bytes: int | None = None  # of a second memory that has the model, at the plan's peak there
    speed: float | None = None  # then, as a share of that of a device which holds the step
    speed_bound: float | None = None  # no plan is above, whatever is kept here between calls: proven for this loss

    @property
    def budget(self) -> int | None:
        """The budget of the solution, in bytes."""
        return None if self.solution is None else self.solution.budget

    @property
    def peak(self) -> int | None:
        """The peak of the solution, in bytes."""
        return None if self.solution is None else self.solution.peak

    @property
    def overhead(self) -> float | None:
        """Recomputation as a share of the step that runs each op once."""
        return None if self.peak is None or self.solution is None else self.solution.recomputation

    @property
    def seconds(self) -> float | None:
        """Seconds of the step, estimated."""
        return None if self.peak is None or self.solution is None else self.solution.cost

    def record(self) -> dict[str, Any]:
        """Its numbers and text as a dict."""
        names = ["name", "smallest", "bound", "fits", "budget", "peak", "overhead", "seconds", "reserved", "why_not"]
        names += [] if self.host_bytes is None else ["host_bytes", "speed", "speed_bound"]
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "splits": [*(self.solution.problem.splits if self.solution is not None else ())]}


@dataclass(frozen=True)
class LargestSizes:
    """The largest batch sizes for which a step stays within the room; 0 if not even 1 does."""

    given: int  # the size of the batch that was looked at
    plain: int  # of plain PyTorch, about
    keep_all: int  # of the whole step with nothing run twice
    planned: int  # running no more than one forward again
    checked: bool  # for the size after each of these no plan was found; else time was up
    seconds: float | None  # of the step at ``planned``
    overhead: float | None


@dataclass(frozen=True, repr=False)
class Fits(Printed):
    """The answer whether a step fits a device, and what would make it fit. Prints as a page."""

    device: str  # its name
    room: int  # bytes that a step may take there
    memory_bytes: int  # of the device; 0: not known
    fits_plainly: bool  # plain PyTorch does
    verdict: str  # in a sentence
    code: str  # a line to write
    optimizer: str  # its class, and where it is from
    plain: Parts  # bytes at the peak of plain PyTorch, estimated
    kept: Parts  # bytes at the peak of the whole step that runs each op once
    plain_seconds: float  # of its step, estimated
    plain_reserved: int | None  # bytes that PyTorch's allocator would hold for it, by its rules; None: no GPU
    ways: tuple[MemoryOption, ...]  # to have the step take less
    largest: LargestSizes | None
    why_no_largest: str  # in words, where there is none
    notes: tuple[str, ...]  # the assumptions
    problem: Problem = field(repr=False, compare=False)  # the whole step, as it was traced
    trace_seconds: float  # spent on tracing
    seconds: float  # spent in all

    facts_width: ClassVar = 13

    @property
    def fits(self) -> bool:
        """Tell whether plain PyTorch or one of the ways fits."""
        return self.fits_plainly or self.best is not None

    @property
    def best(self) -> MemoryOption | None:
        """The way that the line of code uses; None if plain PyTorch fits, or nothing does."""
        return None if self.fits_plainly else next((way for way in self.ways if way.fits), None)

    def records(self) -> list[dict[str, Any]]:
        """List the ways as dicts."""
        return [way.record() for way in self.ways]

    def summary(self) -> dict[str, Any]:
        """The answer without its plans, for JSON."""
        names = ["device", "room", "memory_bytes", "fits", "fits_plainly", "verdict", "code", "optimizer"]
        names += ["plain_seconds", "plain_reserved", "why_no_largest", "trace_seconds", "seconds"]
        parts = {name: {**dict(part), "peak": part.peak} for name, part in (("plain", self.plain), ("kept", self.kept))}
        largest = None if self.largest is None else vars(self.largest)
        facts = {name: getattr(self, name) for name in names}
        return {**facts, **parts, "ways": self.records(), "largest": largest, "notes": [*self.notes]}

    def _title(self) -> str:
        return self.verdict

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "write", self.code
        share = f" of its {format_bytes(self.memory_bytes)}" if self.memory_bytes else ""
        yield "device", f"{self.device}, where a step may take {format_bytes(self.room)}{share}"
        yield "optimizer", self.optimizer
        if self.why_no_largest == NOT_ASKED:
            yield "more", "everything=True (--everything) looks at all ways to take less, and for the largest batch"
        elif (sizes := self.largest) is None:
            yield "largest batch", self.why_no_largest
        else:
            more = "" if sizes.checked else "; larger ones were not looked at, for want of time"
            recomputed = f" ({sizes.overhead:+.0%} recomputation)" if sizes.overhead else ""
            text = f"{sizes.plain} plainly, {sizes.keep_all} with nothing run twice, {sizes.planned} planned"
            yield "largest batch", f"{text}{recomputed}; this batch has {sizes.given}{more}"
        for note in self.notes:
            yield "note", note
        yield "found in", f"{format_seconds(self.seconds)}, of which tracing took {format_seconds(self.trace_seconds)}"

    def _tables(self) -> Iterator[Table]:
        # The bytes at the peak, part by part.
        parts = zip(self.plain, self.kept, strict=True)
        rows = [(name, format_bytes(a), format_bytes(b)) for (name, a), (_, b) in parts]
        rows.append(("together", format_bytes(self.plain.peak), format_bytes(self.kept.peak)))
        rows.append(("at the peak runs", self.plain.at, self.kept.at))
        heads = ("bytes at the peak", f"{PLAIN}, about", "nothing run twice")
        yield Table(heads, rows, heads[1:])
        # Plain PyTorch, and each way that was looked at.
        held = "-" if self.plain_reserved is None else format_bytes(self.plain_reserved)
        peak, fits = format_bytes(self.plain.peak), "yes" if self.fits_plainly else "no"
        cells: list[tuple[str, ...]] = [(PLAIN, peak, fits, peak, "none", format_seconds(self.plain_seconds), held)]
        for way in self.ways:
            if way.why_not == NOT_ASKED:
                continue
            if way.smallest is None:
                cells.append((way.name, "-", way.why_not, "", "", "", ""))
                continue
            first = way.name, format_bytes(way.smallest, up=True), "yes" if way.fits else "no"
            if way.peak is None:
                cells.append((*first, way.why_not, "", "", ""))
                continue
            held = "-" if way.reserved is None else format_bytes(way.reserved)
            again = f"{way.overhead:.1%}" if way.overhead else "none"
            cells.append((*first, format_bytes(way.peak), again, format_seconds(way.seconds or 0.0), held))
        columns = ("", "smallest budget", "fits", "at", "recomputed", "step", "allocator holds")
        yield Table(columns, cells, {*columns[1:]} - {"fits"})
