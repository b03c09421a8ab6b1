"""Copy values to a file and back, with a thread per direction: the `Mover` of a `Store` on the CPU.

The file has no name: what it holds is gone with the process, however that ends. It is written and read past the page
cache where the file system can (O_DIRECT): pages that the kernel keeps of a file are memory of the machine, too, and a
second memory is to have other bytes than the first. Elsewhere each piece is written to the device at once, and its
pages given back. Its bytes are taken from the disk when it is opened, so that a full disk is known then.

Where the file is used past the page cache, addresses are multiples of 512 bytes for most disks, and PyTorch's are of
64. So a value's begin up to such an address, its head, and what is behind its last whole block go by way of a small
buffer, into the last blocks that it takes; all between goes straight. A landing that lies otherwise than the source did
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
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from io import FileIO
from itertools import accumulate
from pathlib import Path

import torch

from checkmate.errors import HostError
from checkmate.host.store import BLOCK, Value, Wait, rounded
from checkmate.units import exact_bytes

PIECE = 16 << 20  # bytes of one call
ALIGNMENTS = (64, 512, BLOCK)  # bytes that addresses may have to be multiples of; the first is PyTorch's
BOUNCE = 1 << 20  # bytes of a small buffer: what a core's cache holds


class FileMover:
    """Copies to and from a file of this many bytes, a multiple of `BLOCK`, in a folder.

    Its threads hold addresses: storages stay and go with the caller alone.

    Raises:
        HostError: if there is no such folder, or not so much room.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.name = f"the file in {folder}"
        self._file = _open(folder, nbytes)
        fd = self._file.fileno()
        self._alignment = _find_alignment(fd, folder) if nbytes else 1
        self._out, self._back = _Lane(fd, self._alignment, out=True), _Lane(fd, self._alignment, out=False)
        self._begun: list[Future[None]] = []  # not known to have ended

    def out(self, storage: torch.UntypedStorage, value: Value) -> Wait:
        """Begin to copy a value into the file."""
        address = storage.data_ptr()
        value.head = min(-address % self._alignment, value.nbytes)
        return self._begin(self._out, value, address)

    def back(self, value: Value, storage: torch.UntypedStorage) -> Wait:
        """Begin to copy a value from the file."""
        return self._begin(self._back, value, storage.data_ptr())

    def finish(self) -> None:
        """Wait for the copies under way; queued ones never begin."""
        wait([future for future in self._begun if not future.cancel()])
        self._begun.clear()

    def close(self) -> None:
        """End the threads, and return the file's bytes to the disk."""
        for lane in (self._out, self._back):
            lane.thread.shutdown()
        self._file.close()

    def abandon(self) -> None:
        """Close the file; a forked child has no threads to end."""
        self._file.close()

    def _begin(self, lane: _Lane, value: Value, address: int) -> Wait:
        self._begun = [future for future in self._begun if not future.done()]
        self._begun.append(lane.thread.submit(lane.copy, value, address))
        copy = self._begun[-1]

        def ended() -> BaseException | None:
            try:
                return copy.exception()
            except CancelledError:
                return HostError("it had not begun when all was given up")

        return ended


class _Lane:
    """A direction of copies, with its thread and the thread's small buffer."""

    def __init__(self, fd: int, alignment: int, *, out: bool) -> None:
        self._fd, self._alignment, self._is_out = fd, alignment, out
        self._space = ctypes.c_char.from_buffer(mmap.mmap(-1, BOUNCE))  # a page's begin, which suits every file
        self._bounce = ctypes.addressof(self._space)
        name = f"checkmate-{'out' if out else 'back'}"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.thread.submit(int).result()  # a thread that cannot start is known when the store is opened

    def copy(self, value: Value, address: int) -> None:
        """Copy a value: first its aligned body, then head and tail, which have blocks of their own."""
        begin, body = address + value.head, (value.nbytes - value.head) // BLOCK * BLOCK
        if begin % self._alignment == 0:
            self._move(value, 0, begin, body)
        else:
            for done in range(0, body, BOUNCE):
                self._by_way(value, done, [(begin + done, min(BOUNCE, body - done))])
        self._by_way(value, body, [(address, value.head), (begin + body, value.nbytes - value.head - body)])

    def _by_way(self, value: Value, at: int, pieces: list[tuple[int, int]]) -> None:
        """Copy pieces of memory, (address, bytes), through the buffer, in which they are adjacent."""
        places = list(accumulate((count for _, count in pieces), initial=self._bounce))
        if self._is_out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(place, address, count)
        self._move(value, at, self._bounce, rounded(places[-1] - self._bounce))
        if not self._is_out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(address, place, count)

    def _move(self, value: Value, at: int, address: int, nbytes: int) -> None:
        """Copy bytes between memory and a value's extents, from byte ``at`` on; everything is aligned."""
        for extent in value.extents:
            part, at = extent[at : at + nbytes], max(0, at - len(extent))
            nbytes -= len(part)
            while part:
                # The call releases the interpreter, and may move less than it was asked for.
                offset, count = part.start, min(PIECE, len(part))
                piece = (ctypes.c_char * count).from_address(address)
                moved = os.pwrite(self._fd, piece, offset) if self._is_out else os.preadv(self._fd, [piece], offset)
                whole = moved if moved == count else moved // BLOCK * BLOCK  # a call goes on where the last was aligned
                if not whole:
                    raise HostError(f"{moved} of {count} bytes were moved at byte {offset} of its file.")
                if self._alignment == 1:
                    # The kernel lets go of pages once they are written.
                    os.fdatasync(self._fd)
                    os.posix_fadvise(self._fd, offset, whole, os.POSIX_FADV_DONTNEED)
                part, address = part[whole:], address + whole


def _open(folder: Path, nbytes: int) -> FileIO:
    """Make an unnamed file, and allocate its bytes on the disk."""
    try:
        file: FileIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the store is)
    except OSError as error:
        raise HostError(
            f"No file can be made in {folder}: {error.strerror}. Name a folder that exists and may be written to, "
            "as host='file:/fast/disk'."
        ) from error
    try:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        file.close()
        # Say what is in the way: a limit of the process or the file system, or the disk.
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            largest = "larger than this file system's" if limit == resource.RLIM_INFINITY else exact_bytes(limit)
            why = f"a file of this process may have {largest} (ulimit -f)"
        else:
            why = f"{exact_bytes(shutil.disk_usage(folder).free)} are free there ({error.strerror})"
        raise HostError(
            f"No room for a file of {exact_bytes(nbytes)} in {folder}: {why}. Name another folder, as "
            "host='file:/fast/disk', free so much there, or give a smaller host_budget."
        ) from error
    return file


def _find_alignment(fd: int, folder: Path) -> int:
    """Switch a file to direct I/O, and find the address alignment that it needs; 1 if it cannot be switched."""
    # It was opened without, since to take its bytes may mean to write some of each block.
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # a file system without
        return 1
    # Try each alignment, with a block that lies so.
    with mmap.mmap(-1, 3 * BLOCK) as space, memoryview(space) as memory:
        for alignment in ALIGNMENTS:
            try:
                os.pwrite(fd, memory[alignment : alignment + BLOCK], 0)
                os.preadv(fd, [memory[alignment : alignment + BLOCK]], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise HostError(f"The file in {folder} cannot be used: {error.strerror}.") from error
            else:
                return alignment
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return 1
