"""Values in a second memory: which are there, which are on their way, and where each lies.

A `Store` keeps the books; a `Mover` copies. Each of the two directions takes its copies one after the other, in the
order in which they were begun, beside the step. A value is copied as a whole storage, so that it comes back with the
bits it had, whatever views of it there are.

A value may lie there in several pieces. So all that is free can be used, and a capacity that holds the values of a plan
in bytes holds them in any order. Addresses that are planned ahead do not: values that take four blocks at most at once
may need five, if none is to be split (`tests/host/test_store.py` has them).

A value may have a home there: bytes of its own, in which a tensor lies between steps. Then copies go to these and come
from these, in their order, and nothing of the capacity is taken.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Protocol

import torch

from checkmate.errors import HostError
from checkmate.units import exact_bytes

log = logging.getLogger("checkmate.host")

BLOCK = 4096  # bytes: what a file is read and written by without the page cache
Ending = Callable[
    [], BaseException | None
]  # wait until a copy has ended, for all that follows; what went wrong, if anything
TORN = "A tensor may be new in part there: load a checkpoint before you go on."


def rounded(nbytes: int) -> int:
    """Bytes that a value takes in a second memory, rounded up.

    >>> rounded(0), rounded(1), rounded(4096), rounded(4097)
    (0, 4096, 4096, 8192)
    """
    return -(-nbytes // BLOCK) * BLOCK


@dataclass(frozen=True, eq=False)
class Home(ABC):
    """The bytes of a tensor's storage, which lie in a second memory for good."""

    nbytes: int
    name: str  # of where it is, for errors
    memory: Any  # of its kind, from which and to which a mover copies
    extents: tuple[range, ...]  # its whole blocks there, in the order of its bytes

    @property
    @abstractmethod
    def place(self) -> Hashable:
        """The folder or the device to which it belongs."""

    @abstractmethod
    def let_go(self) -> None:
        """Write the pages that only memory has, and free them there."""

    @abstractmethod
    def beside(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Make storages of these sizes in bytes, at home in the same place."""


HOMES: dict[int, Home] = {}  # by the address of the storage


def address_of(storage: torch.UntypedStorage) -> int:
    """The address of a storage's memory; of one without memory that of itself."""
    return storage.data_ptr() or storage._cdata


def home_of(tensor: torch.Tensor) -> Home | None:
    """The home of a tensor's storage, if it has one, or of that for which it stands on a device.

    >>> home_of(torch.zeros(3)) is None
    True
    """
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # no `DTensor`, and has memory
    if not is_plain or tensor.layout is not torch.strided:
        return None
    return HOMES.get(address_of(tensor.untyped_storage()))


def is_stand_in(tensor: Any) -> bool:
    """Tell whether a tensor on a device has no memory, and stands for one at home elsewhere."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu" and home_of(tensor) is not None


@dataclass(eq=False)
class StoredValue:
    """A value in a second memory, from its `Store.send` to its `Store.drop`; with a home, from `Store.adopt` on."""

    nbytes: int
    extents: tuple[range, ...]  # its bytes there, in whole blocks
    kept: torch.UntypedStorage | None  # source or landing, alive until its copy has ended
    head: int = 0  # bytes at its begin that lie behind all others there; noted by the mover that wrote them
    pending: Ending | None = None
    arrived: bool = False  # its bytes are there, whole
    home: Home | None = None


class Mover(Protocol):
    """The copier between a step's memory and the second one. Callers keep storages until copies end."""

    name: str  # for errors

    def out(self, storage: torch.UntypedStorage, value: StoredValue) -> Ending:
        """Begin to copy a value out."""

    def back(self, value: StoredValue, storage: torch.UntypedStorage) -> Ending:
        """Begin to copy a value back."""

    def finish(self) -> None:
        """Wait for copies under way, and drop those not begun; copies' errors are not raised."""

    def close(self) -> None:
        """Free threads and memory, after `finish`."""


class Store:
    """A second memory for the values of a step.

    A value has a number of its own. At most one copy of it is under way: `send` or `fetch`, then `wait`. What the
    caller must not do meanwhile is write to a source, or read a landing. Several threads may use a store, each with
    values of its own.
    """

    def __init__(self, mover: Mover, capacity: int) -> None:
        self.capacity = rounded(capacity)  # bytes
        self._mover = mover
        self._values: dict[int, StoredValue] = {}
        self._books = threading.Lock()
        self._process = os.getpid()
        self._close = weakref.finalize(self, _shut, mover, self._values, self._process)

    @property
    def bytes_there(self) -> int:
        """Bytes in use of the capacity: each value without a home `rounded`, from its `send` to its `drop`."""
        return sum(rounded(value.nbytes) for value in [*self._values.values()] if value.home is None)

    def adopt(self, key: int, home: Home) -> None:
        """Take a value as one that is in its home: `fetch` copies from there, and `send` writes over it.

        Raises:
            HostError: if it is there already, its pages cannot be written, or the store is closed or another process's.
        """
        home.let_go()
        with self._opened():
            if key in self._values:
                raise HostError(f"Value {key} is in {self._mover.name} already: it cannot be in {home.name} too.")
            self._values[key] = StoredValue(home.nbytes, home.extents, None, arrived=True, home=home)

    def send(self, key: int, storage: torch.UntypedStorage) -> None:
        """Begin to copy a value out, or to its home. Its storage must stay unchanged until `wait`.

        Raises:
            HostError: if it is there already, there is no room, or the store is closed or another process's.
        """
        nbytes = storage.nbytes()
        with self._opened():
            value = self._values.get(key)
            if value is not None and value.home is not None:
                value = self._settled(key, "sent", nbytes)
                value.arrived, value.kept = False, storage
                value.pending = self._mover.out(storage, value)
                return
            if value is not None:
                raise HostError(f"Value {key} is in {self._mover.name} already: drop it before it is sent again.")
            # The first gap between values that holds it, or else the lowest gaps together.
            waiting = [value for value in self._values.values() if value.home is None]
            taken = sorted((e for value in waiting for e in value.extents), key=attrgetter("start"))
            around = pairwise((range(0), *taken, range(self.capacity, self.capacity)))
            gaps = [range(before.stop, after.start) for before, after in around if before.stop < after.start]
            need, extents = rounded(nbytes), list[range]()
            for gap in [gap for gap in gaps if len(gap) >= need][:1] or gaps:
                extents.append(gap[:need])
                need -= len(extents[-1])
            if need:
                raise HostError(
                    f"No room for value {key} of {exact_bytes(nbytes)} in {self._mover.name}: "
                    f"{exact_bytes(self.bytes_there)} of {exact_bytes(self.capacity)} are taken."
                )
            # It is kept before anything is copied.
            self._values[key] = value = StoredValue(nbytes, tuple(filter(None, extents)), storage)
            value.pending = self._mover.out(storage, value)

    def fetch(self, key: int, landing: torch.UntypedStorage) -> None:
        """Begin to copy a value back into a storage of as many bytes. The copy stays until `drop`.

        Raises:
            HostError: if it is not there, is still on its way, or the landing has another size.
        """
        with self._opened():
            value = self._settled(key, "fetched", landing.nbytes())
            value.kept = landing
            value.pending = self._mover.back(value, landing)

    def wait(self, key: int) -> None:
        """Wait until the last copy begun for a value has ended: its source may go, its target be read.

        On CUDA it is the compute stream that waits, not the caller.

        Raises:
            HostError: if the copy failed, with the reason; or no copy of the value was begun.
        """
        with self._opened():
            value = self._values.get(key)
            if value is None or value.pending is None:
                raise HostError(f"Nothing of value {key} is under way to or from {self._mover.name}.")
            pending = value.pending
        error = pending()
        failed = None if error is None else _failed(value, (value.home or self._mover).name, error)
        with self._books:
            value.pending = value.kept = None
            if error is None:
                value.arrived = True
            elif not value.arrived and value.home is None and self._values.get(key) is value:
                del self._values[key]
        if failed is not None:
            raise failed from error

    def drop(self, key: int) -> None:
        """Free the copy in the second memory.

        Raises:
            HostError: if it is not there, or still on its way.
        """
        with self._opened():
            if self._settled(key, "dropped").home is not None:
                raise HostError(f"Value {key} is at home in {self._mover.name}, and cannot be dropped.")
            del self._values[key]

    def reset(self) -> None:
        """Start again after a step that did not end: wait for copies under way, then free everything.

        Raises:
            HostError: if a copy to a home failed.
        """
        with self._opened():
            error = _end(self._mover, self._values)
        if error is not None:
            raise error

    def close(self) -> None:
        """Free the second memory after the copies under way. Closing again does nothing."""
        if os.getpid() != self._process:
            self._close()
            return
        with self._books:
            self._close()

    def _settled(self, key: int, act: str, nbytes: int | None = None) -> StoredValue:
        """A value with a whole copy, of this many bytes, and no transfer under way."""
        value = self._values.get(key)
        if value is not None and value.pending is not None:
            raise HostError(f"Value {key} is under way to or from {self._mover.name}: wait for it before it is {act}.")
        if value is None or not value.arrived:
            raise HostError(f"Value {key} is not in {self._mover.name}, and cannot be {act}.")
        if nbytes is not None and nbytes != value.nbytes:
            raise HostError(f"Value {key} has {exact_bytes(value.nbytes)} there, and {exact_bytes(nbytes)} here.")
        return value

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Lock the books of an open store. A forked child must not wait for the lock: its holder is not there."""
        if os.getpid() != self._process:
            raise HostError(
                f"The second memory in {self._mover.name} was opened by process {self._process}. This one was forked "
                "from it, without the threads that copy: open another, that is, compile the model in this process."
            )
        with self._books:
            if not self._close.alive:
                raise HostError(f"The second memory in {self._mover.name} is closed.")
            yield


def _shut(mover: Mover, values: dict[int, StoredValue], process: int) -> None:
    """Clean up a store that is closed, deleted, or alive at the interpreter's exit."""
    if os.getpid() != process:  # a forked child has no threads to end, and its file is closed with the mover
        return
    if error := _end(mover, values):
        log.error("%s", error)
    mover.close()


def _end(mover: Mover, values: dict[int, StoredValue]) -> HostError | None:
    """End all copies, those to homes by their end, and give the error if one of these has failed.

    Storages that were copied are let go of here: an error's traceback may keep a value longer.
    """
    error = None
    for value in values.values():
        if value.home is not None and value.pending is not None and not value.arrived and (why := value.pending()):
            error = _failed(value, value.home.name, why)
    mover.finish()
    for value in values.values():
        value.kept = None
    values.clear()
    return error


def _failed(value: StoredValue, name: str, why: BaseException) -> HostError:
    """The error of a copy."""
    way, torn = ("from", "") if value.arrived else ("to", "" if value.home is None else f". {TORN}")
    return HostError(f"The copy of {exact_bytes(value.nbytes)} {way} {name} failed: {why}{torn}")
