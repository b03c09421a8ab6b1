"""Copy values of a step to a file and back, on a thread for each direction: what a `Store` on the CPU calls.

The file has no name: what it holds is gone with the process, however that ends. It is written and read past the page
cache where the file system can (O_DIRECT): pages that the kernel keeps of a file are memory of the machine, too, and a
second memory is to have other bytes than the first. Elsewhere each piece is written to the device at once, and its
pages given back. Its bytes are taken from the disk when it is opened, so that a full disk is known then.

Where the file is used past the page cache, addresses are multiples of 512 bytes for most disks, and PyTorch's are of
64. So a value's begin up to such an address, its head, and what is behind its last whole block go by way of a small
buffer, into the last blocks of its slot; all between goes straight. A landing that lies otherwise than the source did
is filled by way of the buffer.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from checkmate.errors import HostError
from checkmate.host.store import BLOCK, Extent, Slot, Wait, rounded
from checkmate.units import exact_bytes

PIECE = 16 << 20  # bytes of one call
ALIGNMENTS = (64, 512, BLOCK)  # bytes that addresses may have to be multiples of; the first is PyTorch's
BOUNCE = 1 << 20  # bytes of a small buffer: what a core's cache holds


class Buffer:
    """The file.

    Args:
        folder: in which file system.
        nbytes: of the file, a multiple of `BLOCK`.

    Raises:
        HostError: if there is no such folder, or not so much room.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the store is)
        except OSError as error:
            raise HostError(
                f"No file can be made in {folder}: {error.strerror}. Name a folder that exists and may be written to, "
                "as host='file:/fast/disk'."
            ) from error
        self.fd = self._file.fileno()
        try:
            if nbytes:
                os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            self._file.close()
            raise _no_room(folder, nbytes, error) from error
        self.direct = self._go_direct()
        self.alignment = self._find_alignment() if self.direct else 1

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copy bytes of memory into the file; offset, address and count are aligned."""
        self._move(offset, address, nbytes, lambda piece, at: os.pwrite(self.fd, piece, at))

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy bytes of the file into memory; offset, address and count are aligned."""
        self._move(offset, address, nbytes, lambda piece, at: os.preadv(self.fd, [piece], at))

    def close(self) -> None:
        """Give its bytes back to the disk."""
        self._file.close()

    def _move(
        self, offset: int, address: int, nbytes: int, call: Callable[[ctypes.Array[ctypes.c_char], int], int]
    ) -> None:
        """Move pieces by calls that release the interpreter, and may move less than they were asked for."""
        done = 0
        while done < nbytes:
            count = min(PIECE, nbytes - done)
            moved = call((ctypes.c_char * count).from_address(address + done), offset + done)
            whole = moved if moved == count else moved // BLOCK * BLOCK  # a call goes on where the last was aligned
            if not whole:
                raise HostError(f"{moved} of {count} bytes were moved at byte {offset + done} of its file.")
            if not self.direct:
                self._forget_pages(offset + done, whole)
            done += whole

    def _forget_pages(self, offset: int, nbytes: int) -> None:
        """Tell the kernel to let go of pages, which it does once they are written."""
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _go_direct(self) -> bool:
        """Past the page cache; not from the begin on, since to take its bytes may mean to write some of each block."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:  # a file system without
            return False
        return True

    def _find_alignment(self) -> int:
        """Find by trying the alignment of addresses; without any the page cache is used after all."""
        if not self.nbytes:
            return 1
        with mmap.mmap(-1, 3 * BLOCK) as space, memoryview(space) as memory:
            for alignment in ALIGNMENTS:
                try:
                    os.pwrite(self.fd, memory[alignment : alignment + BLOCK], 0)
                    os.preadv(self.fd, [memory[alignment : alignment + BLOCK]], 0)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise HostError(f"The file in {self.folder} cannot be used: {error.strerror}.") from error
                else:
                    return alignment
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        return 1


class FileMover:
    """Copies to and from a file. What the threads hold are addresses: storages stay and go with the caller alone."""

    def __init__(self, buffer: Buffer) -> None:
        self.name = f"the file in {buffer.folder}"
        self._buffer = buffer
        self._out, self._back = _Lane(True, buffer), _Lane(False, buffer)
        self._begun: list[Future[None]] = []  # not known to have ended

    def out(self, storage: torch.UntypedStorage, slot: Slot) -> Wait:
        """Begin to copy a value into the file."""
        address = storage.data_ptr()
        slot.head = min(-address % self._buffer.alignment, slot.nbytes)
        return self._begin(self._out, slot, address)

    def back(self, slot: Slot, storage: torch.UntypedStorage) -> Wait:
        """Begin to copy a value from the file."""
        return self._begin(self._back, slot, storage.data_ptr())

    def finish(self) -> None:
        """Wait for the present copies of the threads; those behind them never begin."""
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

    def _begin(self, lane: _Lane, slot: Slot, address: int) -> Wait:
        self._begun = [future for future in self._begun if not future.done()]
        self._begun.append(lane.thread.submit(lane.copy, slot, address))
        return partial(_ended, self._begun[-1])


def _ended(copy: Future[None]) -> BaseException | None:
    """Wait until a thread has made a copy."""
    try:
        return copy.exception()
    except CancelledError:
        return HostError("it had not begun when all was given up")


class _Lane:
    """One direction: its thread, and the small buffer that this uses."""

    def __init__(self, out: bool, buffer: Buffer) -> None:
        self._out, self._alignment, self._move = out, buffer.alignment, buffer.write if out else buffer.read
        self._space = ctypes.c_char.from_buffer(mmap.mmap(-1, BOUNCE))  # a page's begin, which suits every file
        self._bounce = ctypes.addressof(self._space)
        name = f"checkmate-{'out' if out else 'back'}"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.thread.submit(int).result()  # a thread that cannot start is known when the store is opened

    def copy(self, slot: Slot, address: int) -> None:
        """Copy a value: its body first, then its edges, head and tail, which lie in blocks of their own."""
        body = (slot.nbytes - slot.head) // BLOCK * BLOCK
        tail = slot.nbytes - slot.head - body
        for offset, start, count in _spans(slot.extents, 0, body):
            begin = address + slot.head + start
            if begin % self._alignment == 0:
                self._move(offset, begin, count)
                continue
            for done in range(0, count, BOUNCE):
                piece = min(BOUNCE, count - done)
                self._by_way([(begin + done, piece)], [(offset + done, 0, piece)])
        edges = [(address, slot.head), (address + slot.head + body, tail)]
        self._by_way(edges, _spans(slot.extents, body, rounded(slot.head + tail)))

    def _by_way(self, pieces: list[tuple[int, int]], spans: Iterable[tuple[int, int, int]]) -> None:
        """Copy pieces of memory, address and bytes, by way of the buffer, in which they lie side by side."""
        places = list(accumulate((count for _, count in pieces), initial=self._bounce))
        if self._out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(place, address, count)
        for offset, start, count in spans:
            self._move(offset, self._bounce + start, count)
        if not self._out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(address, place, count)


def _spans(extents: tuple[Extent, ...], begin: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """The extents of a slot, from its byte `begin` on: offset in the file, bytes since `begin`, and length."""
    passed, end = 0, begin + nbytes
    for extent in extents:
        first, last = max(begin, passed), min(end, passed + extent.nbytes)
        if first < last:
            yield extent.begin + first - passed, first - begin, last - first
        passed += extent.nbytes


def _no_room(folder: Path, nbytes: int, error: OSError) -> HostError:
    """The error for a file that cannot have this many bytes."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        largest = "larger than this file system's" if limit == resource.RLIM_INFINITY else f"{exact_bytes(limit)}"
        why = f"a file of this process may have {largest} (ulimit -f)"
    else:
        why = f"{exact_bytes(shutil.disk_usage(folder).free)} are free there ({error.strerror})"
    return HostError(
        f"No room for a file of {exact_bytes(nbytes)} in {folder}: {why}. Give a smaller host_budget, or another "
        "folder, as host='file:/fast/disk'."
    )
