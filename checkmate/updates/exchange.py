"""Gradients averaged over ranks that train together, one parameter after the other, before anything is done with them.

    mean = sum over all ranks of g / n

Each rank multiplies its gradient by 1/n, then all are summed, as `DistributedDataParallel` does it. That sums several
gradients at once, in buckets; of two ranks the bits are the same all the same, since a + b = b + a. Of more, the order
in which a backend adds the numbers of an element depends on where it stands in what is sent.

All ranks must send the same gradients in the same order. They agree on that before the first is sent: what else would
be summed may be gradients of different parameters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkmate.errors import Unsupported
from checkmate.torch_internals import engine

AGREEING_BYTES = 2 * 8  # that ranks compare
PATIENCE = 1.0  # seconds that a thread of the backend may take to let go of what it has sent


@dataclass(frozen=True, eq=False)
class Exchange:
    """Ranks that train together, and what they share.

    Args:
        group: of the ranks.
        parameters: those whose gradients are averaged, as they are now.
        buffers: those that follow the first rank, as they are now.
        held_bytes: that are held for the exchange, and are in no plan.
    """

    group: Any
    parameters: Callable[[], Iterable[torch.Tensor]]
    buffers: Callable[[], Iterable[torch.Tensor]]
    held_bytes: int = 0

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def averaged(self) -> set[torch.Tensor]:
        """The parameters whose gradients are averaged."""
        return set(self.parameters())

    def part(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """What a rank has to add to the mean; ``out``: where it is to be written."""
        return torch.mul(gradient, 1.0 / self.ranks, out=out)  # `mul_` would round the factor to half precision

    def mean(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of a gradient over all ranks; ``out``: where it is to be written."""
        part = self.part(gradient, out)
        self._reduce(part, dist.ReduceOp.SUM)
        return part

    def agree(self, gradients: Sequence[object], device: torch.device) -> None:
        """Have all ranks be about to send the same gradients.

        Args:
            gradients: what this rank will send, in words that mean the same on each.
            device: of what is sent.

        Raises:
            Unsupported: on every rank, if they are not the same.
        """
        number = int.from_bytes(hashlib.sha256(repr(gradients).encode()).digest()[:7], "big")
        both = torch.tensor([number, -number], device=device)
        self._reduce(both, dist.ReduceOp.MAX)
        largest, smallest = both.tolist()
        if largest != -smallest:
            raise Unsupported(
                f"The ranks ran different steps: rank {dist.get_rank()} has gradients of {len(gradients)} parameters, "
                "and another rank has those of others, or has them in another order. No parameter was updated. Have "
                "each rank use the same parameters in a step; or update outside of the plan: DistributedDataParallel("
                "checkmate.compile(model, budget=..., reserve=...), find_unused_parameters=True)."
            )

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have tensors be those of the first rank."""
        with torch.no_grad():
            given = [(t.detach(), _dense(t.detach())) for t in tensors]
            sent = [dist.broadcast(dense, group=self.group, group_src=0, async_op=True) for _, dense in given]
            for work, (tensor, dense) in zip(sent, given, strict=True):
                if work is not None:
                    work.wait()
                if dense is not tensor:
                    tensor.copy_(dense)

    def _reduce(self, tensor: torch.Tensor, how: Any) -> None:
        """Have a tensor be the sum, say, of those of all ranks, in place."""
        dense = _dense(tensor)
        held = _times_held(dense)
        dist.all_reduce(dense.detach(), how, self.group)
        # On the CPU a thread of the backend may hold the tensor a moment longer, and free it: no plan would know when.
        deadline = time.monotonic() + PATIENCE
        while _times_held(dense) > held and time.monotonic() < deadline:
            time.sleep(0)
        if dense is not tensor:
            tensor.copy_(dense)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that lies in memory without gaps, as backends ask for it."""
    return tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()


def _times_held(tensor: torch.Tensor) -> int:
    """By how many the memory of a tensor on the CPU is held; 0 elsewhere, where it is the device that waits."""
    if tensor.device.type != "cpu" or not engine.NAMES.has("_storage_Use_Count"):
        return 0
    count: int = engine._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
