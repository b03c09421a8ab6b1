"""Values that wait in a second memory: which are there, which are on their way, and where each of them lies.

A `Store` keeps the books; a `Mover` copies. Each of the two directions takes its copies one after the other, in the
order in which they were begun, beside the step. A value is copied as a whole storage, so that it comes back with the
bits it had, whatever views of it there are.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from checkmate.errors import HostError
from checkmate.host.slots import Run, Slots
from checkmate.units import exact_bytes


@dataclass
class Place:
    """Where a value lies in a second memory."""

    nbytes: int
    runs: tuple[Run, ...]
    head: int = 0  # bytes at the value's begin that lie behind all others; noted by the mover that wrote them


class Transfer(Protocol):
    """A copy that was begun."""

    @property
    def ended(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> BaseException | None:
        """Until it has ended, for all that comes after; what went wrong, if anything did."""


class Mover(Protocol):
    """What copies between a step's memory and the second one. The caller keeps the storages until the copy's end."""

    name: str  # for errors
    own_bytes: int  # of the first memory, for its own use

    def out(self, storage: torch.UntypedStorage, place: Place) -> Transfer:
        """Begin to copy a value there."""

    def back(self, place: Place, storage: torch.UntypedStorage) -> Transfer:
        """Begin to copy a value here."""

    def finish(self) -> None:
        """Wait for what is under way, and forget what has not begun; raises nothing that a copy does."""

    def close(self) -> None:
        """Let threads and memory go, after `finish`."""

    def abandon(self) -> None:
        """Let go what a forked child has of it."""


@dataclass(frozen=True)
class Counts:
    """What a store did since it was opened."""

    sent: int = 0  # bytes
    fetched: int = 0  # bytes
    waits: int = 0
    blocked: int = 0  # of these: found the copy still under way


@dataclass
class _Value:
    place: Place
    kept: torch.UntypedStorage | None  # source or landing, alive until its copy has ended
    pending: Transfer | None = None
    arrived: bool = False  # its bytes are there, whole


class Store:
    """A second memory for the values of a step.

    A value has a number of its own. At most one copy of it is under way: `send` or `fetch`, then `wait`. What the
    caller must not do meanwhile is write to a source, or read a landing. Several threads may use a store, each with
    values of its own.

    Args:
        mover: copies.
        capacity: bytes of the second memory.
    """

    def __init__(self, mover: Mover, capacity: int) -> None:
        self._mover, self._slots = mover, Slots(capacity)
        self._values: dict[int, _Value] = {}
        self._books = threading.Lock()
        self._process = os.getpid()
        self._counts = [0, 0, 0, 0]
        self._close = weakref.finalize(self, _shut, mover, self._values, self._process)
        self.peak_there = 0  # the most of `bytes_there` since it was opened, or since this was set to 0

    @property
    def capacity(self) -> int:
        """Bytes of the second memory."""
        return self._slots.capacity

    @property
    def bytes_there(self) -> int:
        """Bytes that values take in the second memory now: each `rounded`, from its `send` to its `drop`."""
        return self._slots.capacity - self._slots.free

    @property
    def own_bytes(self) -> int:
        """Bytes of the first memory that the store has for its own use: PyTorch's allocator does not know them."""
        return self._mover.own_bytes

    @property
    def counts(self) -> Counts:
        """What it did."""
        return Counts(*self._counts)

    def send(self, key: int, storage: torch.UntypedStorage) -> None:
        """Begin to copy a value out. Its storage stays as it is until `wait`.

        Raises:
            HostError: if it is there already, there is no room, or the store is closed or another process's.
        """
        nbytes = storage.nbytes()
        with self._opened():
            if key in self._values:
                raise HostError(f"Value {key} is in {self._mover.name} already: drop it before it is sent again.")
            runs = self._slots.take(nbytes)
            if runs is None:
                raise HostError(
                    f"No room for value {key} of {exact_bytes(nbytes)} in {self._mover.name}: "
                    f"{exact_bytes(self.bytes_there)} of {exact_bytes(self.capacity)} are taken."
                )
            self._values[key] = value = _Value(Place(nbytes, runs), storage)  # kept before anything is copied
            value.pending = self._mover.out(storage, value.place)
            self.peak_there = max(self.peak_there, self.bytes_there)
            self._counts[0] += nbytes

    def fetch(self, key: int, landing: torch.UntypedStorage) -> None:
        """Begin to copy a value back, into a storage of as many bytes. It is there until `drop` all the same.

        Raises:
            HostError: if it is not there, is still on its way, or the landing has another size.
        """
        with self._opened():
            value = self._settled(key, "fetched")
            if landing.nbytes() != value.place.nbytes:
                sizes = (exact_bytes(value.place.nbytes), exact_bytes(landing.nbytes()))
                raise HostError(f"Value {key} has {sizes[0]}, and is to land in {sizes[1]}.")
            value.kept = landing
            value.pending = self._mover.back(value.place, landing)
            self._counts[1] += value.place.nbytes

    def wait(self, key: int) -> None:
        """Until the copy of a value that was begun last has ended. From then on its source may go, its landing be read.

        On CUDA it is the compute stream that waits, not the caller.

        Raises:
            HostError: if the copy failed, with the reason; or no copy of the value was begun.
        """
        with self._opened():
            value = self._values.get(key)
            if value is None or value.pending is None:
                raise HostError(f"Nothing of value {key} is under way to or from {self._mover.name}.")
            pending, self._counts[2] = value.pending, self._counts[2] + 1
            self._counts[3] += not pending.ended
        error = pending.wait()
        with self._books:
            value.pending = value.kept = None
            way = "from" if value.arrived else "to"
            if error is None:
                value.arrived = True
            elif not value.arrived and self._values.get(key) is value:
                self._forget(key)
        if error is not None:
            size = exact_bytes(value.place.nbytes)
            raise HostError(f"The copy of {size} {way} {self._mover.name} failed: {error}") from error

    def drop(self, key: int) -> None:
        """Let the copy there go.

        Raises:
            HostError: if it is not there, or still on its way.
        """
        with self._opened():
            self._settled(key, "dropped")
            self._forget(key)

    def reset(self) -> None:
        """Begin anew, after a step that did not end: what is under way ends first, and then nothing is there.

        No storage is let go while something is copied to or from it.
        """
        with self._opened():
            self._mover.finish()
            _let_go(self._values)
            self._slots = Slots(self.capacity)

    def close(self) -> None:
        """Let the second memory go, after what is under way has ended. Closing again does nothing."""
        if os.getpid() != self._process:
            self._close()
            return
        with self._books:
            self._close()

    def _settled(self, key: int, what: str) -> _Value:
        """A value that is there, whole, with no copy under way."""
        value = self._values.get(key)
        if value is not None and value.pending is not None:
            raise HostError(f"Value {key} is under way to or from {self._mover.name}: wait for it before it is {what}.")
        if value is None or not value.arrived:
            raise HostError(f"Value {key} is not in {self._mover.name}, and cannot be {what}.")
        return value

    def _forget(self, key: int) -> None:
        self._slots.give(self._values.pop(key).place.runs)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """The books of an open store. A forked child must not even wait for them: who has them is not there."""
        if os.getpid() != self._process:
            raise HostError(
                f"The second memory in {self._mover.name} was opened by process {self._process}. This one was forked "
                "from it, without the threads that copy: open another, that is, compile the model in this process."
            )
        with self._books:
            if not self._close.alive:
                raise HostError(f"The second memory in {self._mover.name} is closed.")
            yield


def _shut(mover: Mover, values: dict[int, _Value], process: int) -> None:
    """What is left to do where a store is closed, deleted, or alive at the interpreter's end."""
    if os.getpid() != process:
        mover.abandon()
        return
    mover.finish()
    _let_go(values)
    mover.close()


def _let_go(values: dict[int, _Value]) -> None:
    """Forget values and the storages that were copied; an error's traceback may hold a value for longer."""
    for value in values.values():
        value.kept = None
    values.clear()
