"""A file without a name: gone with the process, however that ends, and read and written past the page cache.

Pages that the kernel keeps of a file are memory of the machine, too, and a second memory is to have other bytes than
the first (O_DIRECT). Where the file system has no such way, each piece is written to the device at once, and its pages
given back. All bytes are taken from the disk when a file is opened, so that a full disk is known then.
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
from io import FileIO
from pathlib import Path

from checkmate.errors import HostError
from checkmate.host.store import BLOCK
from checkmate.units import exact_bytes

PIECE = 16 << 20  # bytes of one call
ALIGNMENTS = (64, 512, BLOCK)  # bytes that addresses may have to be multiples of; the first is PyTorch's


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
