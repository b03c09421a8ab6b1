"""Copy values to files and back, with a thread per direction: the `Mover` of a `Store` on the CPU.

Values without a home lie in a file of the store's. Where a file is used past the page cache, addresses are multiples of
512 bytes for most disks, and PyTorch's are of 64. So a value's begin up to such an address, its head, and what is
behind its last whole block go by way of a small buffer, into the last blocks that it takes; all between goes straight.
A landing that lies otherwise than the source did is filled by way of the buffer. A home has its bytes in their order:
there all goes by way of the buffer, unless the value begins at such an address.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from itertools import accumulate
from pathlib import Path

import torch

from checkmate.errors import HostError
from checkmate.host.files import File
from checkmate.host.store import BLOCK, Value, Wait, rounded

BOUNCE = 1 << 20  # bytes of a small buffer: what a core's cache holds


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
        self._begun: list[Future[None]] = []  # not known to have ended

    def out(self, storage: torch.UntypedStorage, value: Value) -> Wait:
        """Begin to copy a value into the file, or its home."""
        address = storage.data_ptr()
        value.head = 0 if value.home else min(-address % self._file.alignment, value.nbytes)
        return self._begin(self._out, value, address)

    def back(self, value: Value, storage: torch.UntypedStorage) -> Wait:
        """Begin to copy a value from the file, or its home."""
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

    def _begin(self, lane: _Lane, value: Value, address: int) -> Wait:
        self._begun = [future for future in self._begun if not future.done()]
        file = value.home.memory if value.home else self._file
        self._begun.append(lane.thread.submit(lane.copy, file, value, address))
        copy = self._begun[-1]

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

    def copy(self, file: File, value: Value, address: int) -> None:
        """Copy a value: first its aligned body, then head and tail, which have blocks of their own."""
        begin, body = address + value.head, (value.nbytes - value.head) // BLOCK * BLOCK
        if begin % file.alignment == 0:
            file.move(value.extents, 0, begin, body, out=self._is_out)
        else:
            for done in range(0, body, BOUNCE):
                self._by_way(file, value, done, [(begin + done, min(BOUNCE, body - done))])
        self._by_way(file, value, body, [(address, value.head), (begin + body, value.nbytes - value.head - body)])

    def _by_way(self, file: File, value: Value, at: int, pieces: list[tuple[int, int]]) -> None:
        """Copy pieces of memory, (address, bytes), through the buffer, in which they are adjacent."""
        places = list(accumulate((count for _, count in pieces), initial=self._bounce))
        if self._is_out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(place, address, count)
        file.move(value.extents, at, self._bounce, rounded(places[-1] - self._bounce), out=self._is_out)
        if not self._is_out:
            for place, (address, count) in zip(places, pieces, strict=False):
                ctypes.memmove(address, place, count)
