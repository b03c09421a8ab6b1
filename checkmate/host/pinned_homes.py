"""Tensors at home in pinned memory beside an accelerator: ordinary ones on the CPU, from and to which steps copy.

A step that runs there knows such a tensor by a stand-in: a tensor on its device, of the same layout, without memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from checkmate.devices import kind_of
from checkmate.host.homes import within
from checkmate.host.store import HOMES, Home, address_of


@dataclass(frozen=True, eq=False)
class Pinned(Home):
    """A home in memory that is pinned for one device."""

    device: torch.device
    _stand_ins: list[torch.Tensor] = field(default_factory=list)

    @property
    def place(self) -> torch.device:
        """The device that it is pinned for."""
        return self.device

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
