"""Copy values of a step from a CUDA device to pinned memory and back: what a `Store` on CUDA calls.

Each way has a stream. The memory is taken and pinned once, to the byte: PyTorch's own pool of pinned memory rounds up
to powers of two. A copy begins when what the compute stream was given before it is done, and `wait` has the compute
stream wait for its end: the host waits for nothing. So memory that is freed after `wait`, or allocated before `fetch`,
is ordered by the compute stream alone, and no tensor has to be recorded on another. A step on another stream than that
before waits for it and for its copies, which may still read the bytes that are now written to. It has run on
a simulated device only.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from typing import Any

import torch

from checkmate.errors import HostError
from checkmate.host.store import Slot, Wait
from checkmate.units import exact_bytes, format_bytes

log = logging.getLogger("checkmate.host")


class PinnedMover:
    """Copies to and from pinned memory.

    Args:
        device: of the step.
        nbytes: of the pinned memory.

    Raises:
        HostError: if the host does not give so much, or it cannot be pinned.
    """

    name = "pinned memory"

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._pinned = _pin(nbytes, device)
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._compute = torch.cuda.current_stream(device)

    def out(self, storage: torch.UntypedStorage, slot: Slot) -> Wait:
        """Begin to copy a value into the host's memory."""
        return self._copy(self._out, storage, slot, out=True)

    def back(self, slot: Slot, storage: torch.UntypedStorage) -> Wait:
        """Begin to copy a value from the host's memory."""
        return self._copy(self._back, storage, slot, out=False)

    def finish(self) -> None:
        """Wait for the copies that are under way; here the host waits, since the step has ended."""
        self._out.synchronize()
        self._back.synchronize()

    def close(self) -> None:
        """Give the memory back to the host."""
        if self._pinned.numel():
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def abandon(self) -> None:
        """Nothing: CUDA does not work in a forked child."""

    def _copy(self, stream: Any, storage: torch.UntypedStorage, slot: Slot, *, out: bool) -> Wait:
        """Copy each piece after all that the compute stream was given."""
        there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (slot.nbytes,), (1,))
        compute = torch.cuda.current_stream(self._device)
        if compute != self._compute:
            for earlier in (self._compute, self._out, self._back):
                compute.wait_event(earlier.record_event())
            self._compute = compute
        stream.wait_event(compute.record_event())
        done = 0
        with torch.cuda.stream(stream):
            for extent in slot.extents:
                count = min(extent.nbytes, slot.nbytes - done)
                pinned, piece = self._pinned[extent.begin : extent.begin + count], there[done : done + count]
                to, source = (pinned, piece) if out else (piece, pinned)
                to.copy_(source, non_blocking=True)
                done += count
        ended = stream.record_event()

        def wait() -> None:  # what a device reports of a failed copy comes later, from it
            torch.cuda.current_stream(self._device).wait_event(ended)

        return wait


def _pin(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the host that a device reads and writes by itself."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    except OSError as error:
        raise HostError(
            f"The host does not give {exact_bytes(nbytes)}: {error.strerror}. Give a smaller host_budget."
        ) from error
    log.info("Pinning %s of the host's memory, once.", format_bytes(nbytes))
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if int(status) != 0:
        _take_error(device)
        raise HostError(
            f"{exact_bytes(nbytes)} of the host's memory cannot be pinned: CUDA error {int(status)}. Give a smaller "
            "host_budget, or raise the limit of locked memory (ulimit -l)."
        )
    return memory


def _take_error(device: torch.device) -> None:
    """CUDA keeps the error of a call that failed for whoever asks next, which else were the next kernel of the step."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
