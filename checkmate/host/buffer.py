"""A file without a name, for values of a step: what it holds is gone with the process, however that ends.

It is written and read past the page cache where the file system can (O_DIRECT): pages that the kernel keeps of a file
are memory of the machine, too, and a second memory is to have other bytes than the first. Elsewhere each piece is
written to the device at once, and its pages given back. Its bytes are taken from the disk when it is opened, so that a
full disk is known then.
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
from collections.abc import Callable
from pathlib import Path

from checkmate.errors import HostError
from checkmate.host.slots import BLOCK
from checkmate.units import exact_bytes

PIECE = 16 << 20  # bytes of one call
ALIGNMENTS = (64, 512, BLOCK)  # bytes that addresses may have to be multiples of; the first is PyTorch's


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
        """Have the kernel let go of pages, which it does once they are written."""
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
        """What addresses must be multiples of, found by trying; without any the page cache is used after all."""
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


def _no_room(folder: Path, nbytes: int, error: OSError) -> HostError:
    """Why a file cannot have so many bytes."""
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
