"""Opening a second memory by its name: ``"file:/fast/disk"``, ``"file:"`` or ``"pinned"``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from checkmate.errors import HostError
from checkmate.host.slots import rounded
from checkmate.host.store import Mover, Store


def open_store(where: str, capacity: int, device: torch.device) -> Store:
    """Open a second memory for a step. All of its bytes are taken at once: what is missing is known before the step.

    Args:
        where: ``"file:/fast/disk"``, a folder in which a file without a name is made, for a step on the CPU;
            ``"file:"`` takes the folder for temporary files. ``"pinned"``, or ``"memory"``, for a step on CUDA.
        capacity: bytes; each value takes its bytes `rounded`.
        device: where the step runs.

    Raises:
        HostError: if there is no such memory, no such folder, or not so much room.

    >>> store = open_store("file:", 10_000, torch.device("cpu"))
    >>> value, landing = torch.rand(1000).untyped_storage(), torch.UntypedStorage(4000)
    >>> store.send(0, value)
    >>> store.wait(0)
    >>> store.fetch(0, landing)
    >>> store.wait(0)
    >>> bytes(landing) == bytes(value), store.bytes_there
    (True, 4096)
    >>> store.close()
    """
    return Store(_mover(where, rounded(capacity), device), capacity)


def _mover(where: str, nbytes: int, device: torch.device) -> Mover:
    kind, colon, folder = where.partition(":")
    if kind == "file" and colon:
        if device.type != "cpu":
            raise HostError(f"A file is for steps on the CPU, not on {device}: write host='pinned'.")
        if sys.platform != "linux":
            raise HostError("A file as a second memory needs Linux.")
        from checkmate.host.buffer import Buffer
        from checkmate.host.file_mover import FileMover

        return FileMover(Buffer(Path(folder or tempfile.gettempdir()), nbytes))
    if where not in ("pinned", "memory"):
        raise HostError(f"Unknown second memory {where!r}: write 'file:/fast/disk', 'file:', or on CUDA 'pinned'.")
    if device.type != "cuda":
        raise HostError(f"Pinned memory is for steps on CUDA, not on {device}: write host='file:/fast/disk'.")
    from checkmate.host.pinned_mover import PinnedMover

    return PinnedMover(device, nbytes)
