"""The report on a compiled step's memory: its arenas and its second memory in the last step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from checkmate.core.answer import Column, Printed, Table, table
from checkmate.memory.arena import Arena, Counts
from checkmate.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ArenaUse(Counts):
    """The use of a captured graph's arena in the last step; in bytes, except counts."""

    planned: int = 0  # the plan's bytes beyond resident ones
    counted: int = 0  # alive at once in the step for which addresses were found; 0 before there is one
    resident: int = 0  # of the mapping, what the machine holds now
    outside: int = 0  # taken from the machine by the first steps beside it: libraries, small tensors, Python; about
    settled: bool = True  # nobody looks for lower addresses any more


@dataclass(frozen=True)
class HostUse:
    """The use of a second memory in the last call; in bytes, except counts and seconds."""

    where: str  # "file:/fast/disk", "pinned"
    peak: int  # of the values that waited in it, at most at once
    sent: int
    fetched: int
    waited: float  # seconds that the step waited for copies; on CUDA its device does, which is not seen here
    taken: int  # of the second memory, now
    calls: int  # ended since it was compiled
    pending: int  # calls whose backward may still come
    homes: int = 0  # of the peak: parameters, states and sums of the call that are at home there


@dataclass(frozen=True, repr=False)
class ArenaReport(Printed):
    """A row per arena that has served something, and per second memory."""

    rows: tuple[ArenaUse, ...]
    second_memories: tuple[HostUse, ...] = ()

    def _title(self) -> str:
        return "" if self.rows else "No arena has served this step: PyTorch's allocator does."

    def _tables(self) -> Iterable[Table]:
        if self.rows:
            yield table(_ARENAS, self.rows)
        if self.second_memories:
            at_home = [Column("at home", "homes", format_bytes)] * any(use.homes for use in self.second_memories)
            yield table([*_HOSTS[:2], *at_home, *_HOSTS[2:]], self.second_memories)


_ARENAS = (
    *(Column(name, name, format_bytes) for name in ("planned", "counted", "arena", "resident", "outside")),
    Column("served", lambda use: f"{use.served} ({format_bytes(use.served_bytes)})", str),
    Column("fallbacks", lambda use: f"{use.fallbacks} ({format_bytes(use.fallback_bytes)})", str),
    Column("alive now", "alive", format_bytes),
    Column("steps", "steps", str),
)
_HOSTS = (
    Column("second memory", "where"),
    *(Column(name, name, format_bytes) for name in ("peak", "sent", "fetched")),
    Column("waited", "waited", format_seconds),
    Column("taken", "taken", format_bytes),
    *(Column(name, name, str) for name in ("calls", "pending")),
)


def report(arenas: Iterable[Arena], second_memories: Iterable[HostUse] = ()) -> ArenaReport:
    """Report on arenas, the largest first, and on second memories."""
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
    return ArenaReport(tuple(sorted(uses, key=lambda use: -use.planned)), tuple(second_memories))
