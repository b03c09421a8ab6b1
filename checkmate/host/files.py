"""Files without a name, and the `Mover` that copies a `Store`'s values to them and back, a thread per direction.

A file is gone with the process, however that ends, and is read and written past the page cache.

Pages that the kernel keeps of a file are memory of the machine, too, and a second memory is to have other bytes than
the first (O_DIRECT). Where the file system has no such way, each piece is written to the device at once, and its pages
given back. All bytes are taken from the disk when a file is opened, so that a full disk is known then.

Values without a home lie in a file of the store's. Where a file is used past the page cache, addresses are multiples of
512 bytes for most disks, and PyTorch's are of 64. So a value's begin up to such an address, its head, and what is
behind its last whole block go by way of a small buffer, into the last blocks that it takes; all between goes straight.
A landing that lies otherwise than the source did is filled by way of the buffer. A home has its bytes in their order:
there all goes by way of the buffer, unless the value begins at such an address.
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
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from io import FileIO
from itertools import accumulate
from pathlib import Path

import torch

from checkmate.errors import HostError
from checkmate.host.store import BLOCK, Ending, StoredValue, rounded
from checkmate.units import exact_bytes

PIECE = 16 << 20  # bytes of one call
ALIGNMENTS = (64, 512, BLOCK)  # bytes that addresses may have to be multiples of; the first is PyTorch's
BOUNCE = 1 << 20  # bytes of a small buffer: what a core's cache holds


class File:
    """A file of this many bytes, a multiple of `BLOCK`, in a folder; closed when it is deleted, at the latest.

    Args:
        another: how to name another folder, for errors.
        fewer: how to ask for fewer bytes.

    Raises:
        HostError: if there is no such folder, or not so much room.
    """

    def __init__(self, folder: Path, nbytes: int, another: str, fewer: str = "") -> None:
        self.folder = Path(os.path.realpath(folder))
        self.name = f"the file in {folder}"  # for errors
        file = _open(folder, nbytes, another, fewer)
        self.fd = file.fileno()
        self.close = weakref.finalize(self, file.close)
        self.alignment = 1  # of addresses, in bytes; 1: through the page cache
        if nbytes:
            self._go_past_the_cache()

    def go_by_the_cache(self) -> None:
        """Read and write through the page cache."""
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.alignment = 1

    def move(self, extents: Sequence[range], at: int, address: int, nbytes: int, *, out: bool) -> None:
        """Copy bytes between memory and extents of the file, from byte ``at`` of these on; everything is aligned."""
        for extent in extents:
            part, at = extent[at : at + nbytes], max(0, at - len(extent))
            nbytes -= len(part)
            while part:
                # The call releases the interpreter, and may move less than it was asked for.
                offset, count = part.start, min(PIECE, len(part))
                piece = (ctypes.c_char * count).from_address(address)
                moved = os.pwrite(self.fd, piece, offset) if out else os.preadv(self.fd, [piece], offset)
                whole = moved if moved == count else moved // BLOCK * BLOCK  # a call goes on where the last was aligned
                if not whole:
                    raise HostError(f"{moved} of {count} bytes were moved at byte {offset} of its file.")
                if self.alignment == 1:
                    # The kernel lets go of pages once they are written.
                    os.fdatasync(self.fd)
                    os.posix_fadvise(self.fd, offset, whole, os.POSIX_FADV_DONTNEED)
                part, address = part[whole:], address + whole

    def _go_past_the_cache(self) -> None:
        """Switch to direct I/O, and find the alignment that it needs; change nothing where it cannot be had."""
        # The file was opened without, since to take its bytes may mean to write some of each block.
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:  # a file system without
            return
        # Try each alignment, with a block that lies so.
        with mmap.mmap(-1, 3 * BLOCK) as space, memoryview(space) as memory:
            for alignment in ALIGNMENTS:
                try:
                    os.pwrite(self.fd, memory[alignment : alignment + BLOCK], 0)
                    os.preadv(self.fd, [memory[alignment : alignment + BLOCK]], 0)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise HostError(f"The file in {self.folder} cannot be used: {error.strerror}.") from error
                else:
                    self.alignment = alignment
                    return
        self.go_by_the_cache()


def _open(folder: Path, nbytes: int, another: str, fewer: str) -> FileIO:
    """Make an unnamed file, and allocate its bytes on the disk."""
    try:
        file: FileIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as it is used)
    except OSError as error:
        raise HostError(
            f"No file can be made in {folder}: {error.strerror}. Name a folder that exists and may be written to, "
            f"as {another}."
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
            f"No room for a file of {exact_bytes(nbytes)} in {folder}: {why}. Name another folder, as {another}, or "
            f"free so much there{fewer}."
        ) from error
    return file


class FileMover:
    """Copies to and from a file of this many bytes, a multiple of `BLOCK`, in a folder.

    Its threads hold addresses: storages stay and go with the caller alone.

    Raises:
        HostError: if there is no such folder, or not so much room.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._file = File(folder, nbytes, "host='file:/fast/disk'", ", or give a smaller host_budget")
        self.name = self._file.name
        self._out, self._back = _Lane(out=True), _Lane(out=False)
        self._copies: list[Future[None]] = []  # not known to have ended

    def out(self, storage: torch.UntypedStorage, value: StoredValue) -> Ending:
        """Begin to copy a value into the file, or its home."""
        address = storage.data_ptr()
        value.head = 0 if value.home else min(-address % self._file.alignment, value.nbytes)
        return self._begin(self._out, value, address)

    def back(self, value: StoredValue, storage: torch.UntypedStorage) -> Ending:
        """Begin to copy a value from the file, or its home."""
        return self._begin(self._back, value, storage.data_ptr())

    def finish(self) -> None:
        """Wait for the copies under way; queued ones never begin."""
        wait([future for future in self._copies if not future.cancel()])
        self._copies.clear()

    def close(self) -> None:
        """End the threads, and return the file's bytes to the disk."""
        for lane in (self._out, self._back):
            lane.thread.shutdown()
        self._file.close()

    def _begin(self, lane: _Lane, value: StoredValue, address: int) -> Ending:
        self._copies = [future for future in self._copies if not future.done()]
        file = value.home.memory if value.home else self._file
        self._copies.append(lane.thread.submit(lane.copy, file, value, address))
        copy = self._copies[-1]

        def ended() -> BaseException | None:
            try:
                return copy.exception()
            except CancelledError:
                return HostError("it had not begun when all was given up")

        return ended


class _Lane:
    """A direction of copies, with its thread and the thread's small buffer."""

    def __init__(self, *, out: bool) -> None:
        self._is_out = out
        self._space = ctypes.c_char.from_buffer(mmap.mmap(-1, BOUNCE))  # a page's begin, which suits every file
        self._bounce = ctypes.addressof(self._space)
        name = f"checkmate-{'out' if out else 'back'}"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.thread.submit(int).result()  # a thread that cannot start is known when the store is opened

    def copy(self, file: File, value: StoredValue, address: int) -> None:
        """Copy a value: first its aligned body, then head and tail, which have blocks of their own."""
        begin, body = address + value.head, (value.nbytes - value.head) // BLOCK * BLOCK
        if begin % file.alignment == 0:
            file.move(value.extents, 0, begin, body, out=self._is_out)
        else:
            for done in range(0, body, BOUNCE):
                self._by_way(file, value, done, [(begin + done, min(BOUNCE, body - done))])
        self._by_way(file, value, body, [(address, value.head), (begin + body, value.nbytes - value.head - body)])

    def _by_way(self, file: File, value: StoredValue, at: int, pieces: list[tuple[int, int]]) -> None:
        """Copy pieces of memory, (address, bytes), through the buffer, in which they are adjacent."""
        places = list(accumulate((count for _, count in pieces), initial=self._bounce))
        if self._is_out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(place, address, count)
        file.move(value.extents, at, self._bounce, rounded(places[-1] - self._bounce), out=self._is_out)
        if not self._is_out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(address, place, count)
