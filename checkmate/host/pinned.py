"""Pinned memory beside an accelerator: a `Store`'s values wait there (`PinnedMover`), and tensors are at home there.

To their user tensors at home are ordinary ones on the CPU. A step knows such a tensor by a stand-in: a tensor on its
device, of the same layout, without memory.

Each way has a stream, the same for all movers of a device. The memory is taken and pinned once; a home has its own, a
tensor of uint8. A copy begins when what the compute stream was given before it is done, and `wait` has the compute
stream wait for its end: the host waits for nothing. So memory that is freed after `wait`, or allocated before `fetch`,
is ordered by the compute stream alone, and no tensor has to be recorded on another. A step on another stream than that
before waits for the copies so far, which may still write or read the bytes that its own copies read or write. It has
run on simulated devices only.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from checkmate.devices import kind_of
from checkmate.host.homes import within
from checkmate.host.store import HOMES, Ending, Home, StoredValue, address_of


@dataclass(frozen=True, eq=False)
class Pinned(Home):
    """A home in memory that is pinned for one device."""

    device: torch.device
    _stand_ins: list[torch.Tensor] = field(default_factory=list)

    @property
    def place(self) -> torch.device:
        """The device that it is pinned for."""
        return self.device

    def let_go(self) -> None:
        """Do nothing: there is no file behind pinned memory."""

    def beside(self, sizes: Sequence[int]) -> list[torch.UntypedStorage]:
        """Make storages of these sizes in bytes, pinned for the same device."""
        return [pin_storage(size, self.device) for size in sizes]

    def stand_ins(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The stand-ins of tensors in its storage, the same ones from call to call.

        When they are made, they take as much of the device's memory as the storage does, and give it back.
        """
        stand_ins, layouts = self._stand_ins, [_layout(t) for t in tensors]
        if [_layout(t) for t in stand_ins] != layouts:
            _forget(self)
            storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
            stand_ins[:] = [within(storage, t) for t in tensors]
            storage.resize_(0)
            HOMES[address_of(storage)] = self
        return stand_ins


def pin_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Make a storage that is at home in memory pinned for a device, for as long as it lives.

    Raises:
        HostError: if the host does not give so much, or it cannot be pinned.
    """
    storage = kind_of(device).pin(nbytes).untyped_storage()
    # The home does not keep the storage.
    bytes_there = torch.frombuffer((ctypes.c_char * nbytes).from_address(storage.data_ptr()), dtype=torch.uint8)
    HOMES[storage.data_ptr()] = home = Pinned(nbytes, "pinned memory", bytes_there, (range(nbytes),), device)
    weakref.finalize(storage, _forget, home, storage.data_ptr()).atexit = False
    return storage


def _forget(home: Pinned, *addresses: int) -> None:
    for address in (*addresses, *(address_of(t.untyped_storage()) for t in home._stand_ins[:1])):
        del HOMES[address]


def _layout(t: torch.Tensor) -> tuple[object, ...]:
    return t.dtype, t.storage_offset(), t.shape, t.stride()


class PinnedMover:
    """Copies between a step's device and this many bytes of pinned memory.

    Raises:
        HostError: if the host does not give so much, or it cannot be pinned.
    """

    name = "pinned memory"

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._pinned = kind_of(device).pin(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        self._out, self._back = _streams(device)
        self._compute = torch.accelerator.current_stream(device)

    def out(self, storage: torch.UntypedStorage, value: StoredValue) -> Ending:
        """Begin to copy a value into the host's memory."""
        return self._copy(self._out, storage, value, out=True)

    def back(self, value: StoredValue, storage: torch.UntypedStorage) -> Ending:
        """Begin to copy a value from the host's memory."""
        return self._copy(self._back, storage, value, out=False)

    def finish(self) -> None:
        """Wait on the host for copies under way, as the step has ended."""
        self._out.synchronize()
        self._back.synchronize()

    def close(self) -> None:
        """Return the memory to the host."""
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def _copy(self, stream: torch.Stream, storage: torch.UntypedStorage, value: StoredValue, *, out: bool) -> Ending:
        """Copy each piece after all earlier work of the compute stream."""
        view = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (value.nbytes,), (1,))
        compute = torch.accelerator.current_stream(self._device)
        if compute != self._compute:
            for copies in (self._out, self._back):
                compute.wait_event(copies.record_event())
            self._compute = compute
        stream.wait_event(compute.record_event())
        memory = self._pinned if value.home is None else value.home.memory
        with stream:
            for extent in value.extents:
                piece, view = view[: len(extent)], view[len(extent) :]
                pinned = memory[extent.start : extent.start + len(piece)]
                to, source = (pinned, piece) if out else (piece, pinned)
                to.copy_(source, non_blocking=True)
        ended = stream.record_event()

        def wait() -> None:  # the device reports a failed copy later
            torch.accelerator.current_stream(self._device).wait_event(ended)

        return wait


@cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """A device's streams for copies out and back."""
    return torch.Stream(device), torch.Stream(device)
