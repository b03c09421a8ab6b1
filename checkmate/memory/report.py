"""The report on a compiled step's memory: what its arenas and its second memory did when it last ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from checkmate.core.answer import Printed, Table
from checkmate.memory.arena import Arena, Counts
from checkmate.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ArenaUse(Counts):
    """The arena of a captured graph, in the step that ran last; all but counts in bytes."""

    planned: int = 0  # what the plan takes beyond what is resident
    counted: int = 0  # alive at once in the step for which addresses were found; 0 before there is one
    resident: int = 0  # of the mapping, what the machine holds now
    outside: int = 0  # what the first steps made the machine give beside it: libraries, small tensors, Python; about
    settled: bool = True  # nobody looks for lower addresses any more


@dataclass(frozen=True)
class HostUse:
    """The use of a second memory by the call that ended last; all but counts and seconds in bytes."""

    where: str  # "file:/fast/disk", "pinned"
    there: int  # of values that were elsewhere, at most at once
    sent: int
    fetched: int
    waited: float  # seconds that the step waited for copies; on CUDA its device does, which is not seen here
    taken: int  # of the second memory, now
    calls: int  # that have ended, since it was compiled
    pending: int  # calls whose backward may still come


@dataclass(frozen=True, repr=False)
class ArenaReport(Printed):
    """A row for each arena of a step that has served something, and for each second memory."""

    rows: tuple[ArenaUse, ...]
    elsewhere: tuple[HostUse, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """List the arenas as dicts."""
        return [asdict(row) for row in self.rows]

    def _title(self) -> str:
        return "" if self.rows else "No arena has served this step: PyTorch's allocator does."

    def _tables(self) -> Iterable[Table]:
        if self.rows:
            heads = ("planned", "counted", "arena", "resident", "outside", "served", "fallbacks", "alive now", "steps")
            yield Table(heads, [tuple(_cells(row)) for row in self.rows], heads)
        if self.elsewhere:
            of_host = ("second memory", "there", "sent", "fetched", "waited", "taken", "calls", "pending")
            yield Table(of_host, [tuple(_host_cells(use)) for use in self.elsewhere], of_host[1:])


def report(arenas: Iterable[Arena], elsewhere: Iterable[HostUse] = ()) -> ArenaReport:
    """Report on arenas, the largest first, and second memories."""
    uses = [
        ArenaUse(
            **asdict(counts),
            planned=arena.capacity,
            counted=arena.live_peak,
            resident=arena.resident,
            outside=arena.outside,
            settled=arena.settled,
        )
        for arena in arenas
        if (counts := arena.counts).steps
    ]
    return ArenaReport(tuple(sorted(uses, key=lambda use: -use.planned)), tuple(elsewhere))


def _cells(use: ArenaUse) -> Iterator[str]:
    yield from map(format_bytes, (use.planned, use.counted, use.arena, use.resident, use.outside))
    yield f"{use.served} ({format_bytes(use.served_bytes)})"
    yield f"{use.fallbacks} ({format_bytes(use.fallback_bytes)})"
    yield from (format_bytes(use.alive), str(use.steps))


def _host_cells(use: HostUse) -> Iterator[str]:
    yield use.where
    yield from map(format_bytes, (use.there, use.sent, use.fetched))
    yield format_seconds(use.waited)
    yield from (format_bytes(use.taken), str(use.calls), str(use.pending))
