"""Copies between the RAM and a file, on a thread for each direction.

Where the file is used past the page cache, addresses are multiples of 512 bytes for most disks, and PyTorch's are of
64. So a value's begin up to such an address, its head, and what is behind its last whole block go by way of a small
buffer, into the last blocks of its place; all between goes straight. A landing that lies otherwise than the source did
is filled by way of the buffer.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import torch

from checkmate.errors import HostError
from checkmate.host.buffer import Buffer
from checkmate.host.slots import BLOCK, Run, rounded
from checkmate.host.store import Place, Transfer

BOUNCE = 1 << 20  # bytes of a small buffer: what a core's cache holds


class FileTransfer:
    """A copy that a thread makes."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._future.done()

    def wait(self) -> BaseException | None:
        """Until the thread has made it."""
        try:
            return self._future.exception()
        except CancelledError:
            return HostError("it had not begun when all was given up")


class FileMover:
    """Copies to and from a file. What the threads hold are addresses: storages stay and go with the caller alone."""

    own_bytes = 2 * BOUNCE

    def __init__(self, buffer: Buffer) -> None:
        self.name = f"the file in {buffer.folder}"
        self._buffer = buffer
        self._out, self._back = _Lane("out", buffer), _Lane("back", buffer)
        self._begun: list[Future[None]] = []  # not known to have ended

    def out(self, storage: torch.UntypedStorage, place: Place) -> Transfer:
        """Begin to copy a value into the file."""
        address = storage.data_ptr()
        place.head = min(-address % self._buffer.alignment, place.nbytes)
        return self._begin(self._out, self._out.write, place, address)

    def back(self, place: Place, storage: torch.UntypedStorage) -> Transfer:
        """Begin to copy a value from the file."""
        return self._begin(self._back, self._back.read, place, storage.data_ptr())

    def finish(self) -> None:
        """Wait for what the threads are at; what is behind it never begins."""
        wait([future for future in self._begun if not future.cancel()])
        self._begun.clear()

    def close(self) -> None:
        """End the threads, and give the file's bytes back."""
        for lane in (self._out, self._back):
            lane.thread.shutdown()
        self._buffer.close()

    def abandon(self) -> None:
        """Close the file; a forked child has no threads to end."""
        self._buffer.close()

    def _begin(self, lane: _Lane, work: Callable[[Place, int], None], place: Place, address: int) -> Transfer:
        self._begun = [future for future in self._begun if not future.done()]
        self._begun.append(lane.thread.submit(work, place, address))
        return FileTransfer(self._begun[-1])


class _Lane:
    """One direction: its thread, and the small buffer that this uses."""

    def __init__(self, name: str, buffer: Buffer) -> None:
        self._buffer = buffer
        self._space = ctypes.c_char.from_buffer(mmap.mmap(-1, BOUNCE))  # a page's begin, which suits every file
        self._bounce = ctypes.addressof(self._space)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"checkmate-{name}")
        self.thread.submit(int).result()  # a thread that cannot start is known when the store is opened

    def write(self, place: Place, address: int) -> None:
        """Copy a value into the file: its body first, then its edges in blocks of their own."""
        head, body, tail = _parts(place)
        for offset, start, count in _spans(place.runs, 0, body):
            self._write(offset, address + head + start, count)
        ctypes.memmove(self._bounce, address, head)
        ctypes.memmove(self._bounce + head, address + head + body, tail)
        for offset, start, count in _spans(place.runs, body, rounded(head + tail)):
            self._buffer.write(offset, self._bounce + start, count)

    def read(self, place: Place, address: int) -> None:
        """Copy a value from the file."""
        head, body, tail = _parts(place)
        for offset, start, count in _spans(place.runs, 0, body):
            self._read(offset, address + head + start, count)
        for offset, start, count in _spans(place.runs, body, rounded(head + tail)):
            self._buffer.read(offset, self._bounce + start, count)
        ctypes.memmove(address, self._bounce, head)
        ctypes.memmove(address + head + body, self._bounce + head, tail)

    def _write(self, offset: int, address: int, nbytes: int) -> None:
        if address % self._buffer.alignment == 0:
            self._buffer.write(offset, address, nbytes)
            return
        for done in range(0, nbytes, BOUNCE):
            count = min(BOUNCE, nbytes - done)
            ctypes.memmove(self._bounce, address + done, count)
            self._buffer.write(offset + done, self._bounce, count)

    def _read(self, offset: int, address: int, nbytes: int) -> None:
        if address % self._buffer.alignment == 0:
            self._buffer.read(offset, address, nbytes)
            return
        for done in range(0, nbytes, BOUNCE):
            count = min(BOUNCE, nbytes - done)
            self._buffer.read(offset + done, self._bounce, count)
            ctypes.memmove(address + done, self._bounce, count)


def _parts(place: Place) -> tuple[int, int, int]:
    """Bytes of head, body and tail."""
    body = (place.nbytes - place.head) // BLOCK * BLOCK
    return place.head, body, place.nbytes - place.head - body


def _spans(runs: tuple[Run, ...], begin: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Where bytes of a place lie, from its byte `begin` on: offset in the file, bytes since `begin`, and how many."""
    passed, end = 0, begin + nbytes
    for run in runs:
        first, last = max(begin, passed), min(end, passed + run.nbytes)
        if first < last:
            yield run.begin + first - passed, first - begin, last - first
        passed += run.nbytes
