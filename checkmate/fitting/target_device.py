"""The device that a step is to run on: its room, and the bytes that its allocator would hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.backends.planner import Bytes
from checkmate.backends.static_memory import lives_on
from checkmate.backends.tensor_state import tensors_within
from checkmate.capture.device import main_device
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.nodes import storage
from checkmate.core.host import Host
from checkmate.core.solution import Solution
from checkmate.devices import kind_of
from checkmate.errors import BudgetError
from checkmate.memory.arena import Lives
from checkmate.memory.available import available
from checkmate.memory.cuda_allocator import CudaAllocator, replay_steps
from checkmate.profiling.data_sheets import Device, device_named
from checkmate.units import parse_budget, parse_bytes

HOST_BYTES = 64 * 10**9  # of a second memory beside a GPU that nobody has described
HOST_SHARE = 0.8  # of the rate of its link that copies reach


@dataclass(frozen=True)
class TargetDevice:
    """The device that a step is to run on."""

    name: str
    room: int  # bytes that the step may take
    memory_bytes: int  # 0: not known
    device: Device | None  # by its data sheet; None: it is here, and ops are measured
    profile: str  # where costs come from
    block_bytes: int  # unit of its allocator's sizes
    is_gpu: bool

    @property
    def budget(self) -> int:
        """The room as a budget, as a line of code writes it."""
        return parse_bytes(written(self.room))

    @classmethod
    def of(cls, name: str | None, budget: Bytes | None, reach: Any) -> TargetDevice:
        """The device of a name, or the one here."""
        asked = None if budget is None else parse_budget(budget)
        if name is None:
            held = {storage(t): t.untyped_storage().nbytes() for t in tensors_within(reach) if not is_fake(t)}
            here = main_device(tensors_within(reach))
            there_is = available(here, sum(held.values()))
            room, total = there_is.bytes if asked is None else asked, there_is.limit.total
            here_is = "this machine's CPU" if here.type == "cpu" else f"the {here.type} device here"
            return cls(here_is, room, total, None, "measure", kind_of(here).block_bytes, here.type != "cpu")
        device = device_named(name)
        if asked is None and not device.room:
            raise BudgetError(f"How much memory a {device.name} has is not known: name the bytes, budget='16 GB'.")
        about = device.memory_bytes, device, f"roofline:{name}", device.block_bytes, device.capability is not None
        return cls(device.name, device.room if asked is None else asked, *about)

    def host(self, asked: Host | None) -> Host | None:
        """The second memory that is asked for, or the one beside a GPU."""
        if asked is not None or self.device is None or not self.is_gpu:
            return asked
        rate = HOST_SHARE * self.device.host_link
        return Host(HOST_BYTES, send=rate, fetch=rate)

    def reserved(self, resident: int, lives: Lives, *, expandable: bool = False) -> int | None:
        """Bytes that PyTorch's allocator would hold on an NVIDIA GPU, by its rules; None elsewhere."""
        if not self.is_gpu or self.device is None:
            return None
        return resident + replay_steps(lives, CudaAllocator(expandable=expandable)).reserved

    def reserved_for(self, solution: Solution, *, expandable: bool = False) -> int | None:
        """Bytes that the allocator would hold for a plan."""
        if solution.plan is None or not self.is_gpu or self.device is None:
            return None
        places = torch.device("cuda", 0), torch.device("cpu")  # where there is no C++ compiler, ops are of the CPU
        lives = next(lives for lives in (lives_on(solution, place) for place in places) if lives.sizes.any())
        return self.reserved(solution.problem.resident, lives, expandable=expandable)


def written(count: int) -> str:
    """Bytes in few digits for `parse_bytes`, rounded down.

    >>> written(23_709_803_776), written(64 * 10**9), written(999)
    ('23.7 GB', '64 GB', '999 B')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{math.floor(count / scale * 100) / 100:.10g} {unit}"
    return f"{count} B"
