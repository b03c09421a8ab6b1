"""An arena for a step on the CPU: one mapping that serves the step's allocations at planned addresses.

PyTorch leaves each allocation to malloc, which keeps free pieces between live ones: the process then holds up to twice
the bytes that the step counts. Here the first step notes what it allocates and how long each lives, and is served from
the best gaps of one mapping. From the second step on everything has an address of its own, found for these lives.

What is not as noted is served by PyTorch's allocator, and counted: another size or order, an address where something
is still alive (a result that is kept, a second forward before the backward). Other threads, and what is below 4 KiB,
are left to it. When a step has changed, addresses are planned anew, in another mapping; the pages of the old one go
with the tensors in them. When another arena takes over, the pages go that hold nothing alive. In a forked child arenas
serve nothing any more.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from checkmate.memory import native
from checkmate.memory.lives import Lives

ALIGNMENT = 64  # bytes, as of PyTorch's allocator
ROOM = 1.25  # times the bytes of a plan: of the mapping in which a first step finds its addresses
WORTH = 0.002  # of an arena: what it could be lower by is looked for, and taken
TOLD_STEPS = 4  # in which it is measured what the machine gives beside the arena: libraries take theirs at once
_HELD = Path("/proc/self/statm")  # pages; the second number says how many the machine holds
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
Boxed = Callable[[list[Any]], Any]
Offsets = Sequence[int]  # (N,) bytes from the begin of the arena, where each allocation lies


class PendingPlaces(Protocol):
    """Offsets that another process is searching for."""

    @property
    def is_over(self) -> bool:
        """Tell whether the search has ended."""

    @property
    def result(self) -> Offsets | None:
        """The result, if there is one."""


PlaceSoon = Callable[[Lives], Offsets]
PlaceLower = Callable[[Lives], PendingPlaces]


class _Noted(NamedTuple):
    """The allocations of a step, as recorded for the allocator."""

    lives: Lives
    stays: np.ndarray  # (N,) uint8: alive when the next step began
    sizes: np.ndarray  # (N,) int64, bytes as they were asked for
    boundary: int  # how many are the forward's

    @property
    def taken(self) -> int:
        """The most bytes alive at once in the step, except allocations that stay and become resident."""
        born, own = np.arange(len(self.sizes)), self.stays == 0
        return Lives(self.sizes[own], born[own], self.lives.died[own]).peak

    def height(self, offsets: Offsets) -> int:
        """Bytes of the arena."""
        return int((np.array(offsets, dtype=np.int64) + self.lives.sizes).max())


@dataclass(frozen=True)
class Counts:
    """The counts of an arena in the last step, in the order of ``Counts`` in arena.cpp."""

    steps: int = 0  # since it was made
    layouts: int = 0  # times that addresses were planned
    arena: int = 0  # bytes of the mapping
    served: int = 0  # allocations from it
    served_bytes: int = 0
    fallbacks: int = 0  # allocations that PyTorch's allocator served in its place
    fallback_bytes: int = 0
    unplanned: int = 0  # of these, allocations of a size that was not due
    occupied: int = 0  # where something was still alive
    full: int = 0  # for which the mapping of a first step had no room
    alive: int = 0  # bytes of the mapping, now


def _told_nobody(taken: int, planned: int) -> None:
    """Nobody asks what a first step took."""


class Arena:
    """A memory mapping that serves the allocations of a captured step.

    Args:
        place_soon: finds an offset for each allocation, at once.
        place_lower: looks longer, where the arena could be lower by `WORTH`; what it finds holds from a later step on.
        capacity: bytes that the step is expected to allocate at most, at once; `expect` can say it later.
    """

    def __init__(self, place_soon: PlaceSoon, capacity: int = 0, place_lower: PlaceLower | None = None) -> None:
        self._place_soon, self._place_lower, self.capacity = place_soon, place_lower, capacity
        self._recorded: _Noted | None = None  # by which addresses were planned
        self._lower: PendingPlaces | None = None  # others, for the same
        self.live_peak = 0  # bytes alive at once, in the step for which addresses were planned
        self.took: Callable[[int, int], None] = _told_nobody  # is told what a first step took at most
        self.lays_out = True  # plans addresses; False: steps have other sizes each, and find theirs as first steps do
        self.took_next: Callable[[int, int], None] | None = None  # the same of the next step, where none are planned
        self.outside = 0  # bytes that the first steps made the machine give beside the mapping
        self._watched = 2 * TOLD_STEPS  # calls, forward and backward, for which that is measured yet
        self._library: Any = None
        self._handle: int | None = None
        self._opening = threading.Lock()

    def expect(self, capacity: int) -> None:
        """Prepare for another step, with this many bytes alive at once; not while a step runs."""
        if not self.lays_out and capacity <= self.capacity:
            return
        self.capacity, self.live_peak, self._lower = capacity, 0, None
        if self._handle is not None:
            self._library.checkmate_renew(self._handle, int(ROOM * capacity))

    def within(self, phase: Phase, run: Boxed) -> Boxed:
        """A function of one list whose allocations on its thread come from the arena."""
        number = PHASES.index(phase)

        def inside(inputs: list[Any]) -> Any:
            if not self._enter(number):
                return run(inputs)
            whole, before = False, None
            try:
                before = self._beside() if self._watched else None
                result = run(inputs)
                whole = True
                return result
            finally:
                self._library.checkmate_leave(self._handle, whole)
                if before is not None:
                    self.outside += self._beside() - before
                    self._watched -= 1

        return inside

    @property
    def counts(self) -> Counts:
        """The counts of the last step."""
        if self._handle is None:
            return Counts()
        numbers = np.zeros(len(Counts.__dataclass_fields__), dtype=np.int64)
        self._library.checkmate_counts(self._handle, numbers.ctypes.data)
        return Counts(*numbers.tolist())

    @property
    def settled(self) -> bool:
        """Tell whether the search for lower addresses has ended."""
        return self._lower is None

    @property
    def resident(self) -> int:
        """Resident bytes of the mapping."""
        return 0 if self._handle is None else int(self._library.checkmate_resident(self._handle))

    def _beside(self) -> int:
        """Resident bytes of this process beside the mapping."""
        return int(_HELD.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") - self.resident

    def _enter(self, phase: int) -> bool:
        if self._handle is None and not self._open():
            return False
        if phase == 0 and not self.lays_out:
            # Tell of the last step, if that was the first of its sizes.
            if self.took is not _told_nobody and self._library.checkmate_wants_layout(self._handle):
                self.took(self._record().taken, self.capacity)
            self.took, self.took_next = self.took_next or _told_nobody, None
        elif phase == 0 and self._library.checkmate_wants_layout(self._handle):
            # Plan addresses for what the last step allocated.
            self._recorded = noted = self._record()
            height = self._lay(noted, self._place_soon(noted.lives))
            self.live_peak = noted.lives.peak
            self.took(noted.taken, self.capacity)
            could_be_lower = height - self.live_peak >= WORTH * self.live_peak
            self._lower = self._place_lower(noted.lives) if self._place_lower is not None and could_be_lower else None
        elif phase == 0 and self._lower is not None and self._lower.is_over:
            # Take lower addresses for the same allocations, if they are worth it.
            offsets, self._lower = self._lower.result, None
            assert self._recorded is not None
            if offsets is not None and (1 + WORTH) * self._recorded.height(offsets) <= self.counts.arena:
                self._lay(self._recorded, offsets)
        return bool(self._library.checkmate_enter(self._handle, phase))

    def _open(self) -> bool:
        """Make the arena once there is a library; until then a step runs without."""
        library = native.library()
        if library is None or self.capacity <= 0:
            return False
        with self._opening:
            if self._handle is None and library.checkmate_install():
                self._library = library
                self._handle = library.checkmate_open(int(ROOM * self.capacity))
                weakref.finalize(self, library.checkmate_close, self._handle).atexit = False  # a thread may be in it
        return self._handle is not None

    def _lay(self, noted: _Noted, offsets: Offsets) -> int:
        """Use these addresses from now on; give the bytes of the arena."""
        where, height = np.array(offsets, dtype=np.int64), noted.height(offsets)
        arrays = (array.ctypes.data for array in (noted.sizes, where, noted.stays))
        self._library.checkmate_lay_out(self._handle, len(noted.sizes), *arrays, noted.boundary, height)
        return height

    def _record(self) -> _Noted:
        """The last step's allocations."""
        boundary = ctypes.c_int64()
        count = self._library.checkmate_record(self._handle, 0, None, None, ctypes.addressof(boundary))
        sizes, died = np.zeros((2, count), dtype=np.int64)
        where = (sizes.ctypes.data, died.ctypes.data, ctypes.addressof(boundary))
        self._library.checkmate_record(self._handle, count, *where)
        # Allocations alive when the next step begins keep their address through it.
        stays = died < 0
        born = np.where(stays, 0, np.arange(count))
        rounded = -(-sizes // ALIGNMENT) * ALIGNMENT
        lives = Lives(rounded, born, np.where(stays, count, died))
        return _Noted(lives, stays.astype(np.uint8), sizes, boundary.value)
