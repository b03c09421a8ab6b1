"""Average gradients over ranks that train together, one parameter after the other, before anything else uses them.

    mean = sum over all ranks of g / n

Each rank multiplies its gradient by 1/n, then all are summed, as `DistributedDataParallel` does it, which sums several
gradients at once, in buckets. Of two ranks the bits are equal, since a + b = b + a. Of more, the order in which a
backend adds the numbers of an element depends on where it stands in what is sent.

All ranks must send the same gradients in the same order, and agree on that before the first is sent.

Which ranks these are is told by `DistributedDataParallel` or a group. A step does itself what that module does around
its forward and its backward, and calls the module as the one that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.sharded.collectives import as_number, reduce_in_place, same_on_all
from checkmate.errors import Unsupported
from checkmate.updates.optimizers import parameters_of

AGREEING_BYTES = 2 * 8  # compared by ranks
INSTEAD = (
    "Update outside of the plan: DistributedDataParallel(checkmate.compile(model, budget=..., reserve=...)), with the "
    "bytes of gradients and optimizer state as the reserve."
)
_REFUSED: tuple[tuple[Callable[[Any], bool], str], ...] = (  # of a module, what it does otherwise, in words
    (lambda ddp: ddp.mixed_precision is not None, "casts parameters (mixed_precision=)"),
    (lambda ddp: bool(getattr(ddp, "_comm_hooks", ())), "has a communication hook"),
    (lambda ddp: hasattr(ddp, "buffer_hook"), "has a hook for its buffers"),
    (lambda ddp: bool(getattr(ddp, "_delay_all_reduce_params", ())), "delays gradients"),
    (lambda ddp: bool(getattr(ddp, "_use_python_reducer", False)), "has its reducer in Python (optimize_ddp)"),
    (lambda ddp: ddp._join_config.enable, "is within join()"),
    (lambda ddp: any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()), "updates in the backward"),
)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The ranks that train together, and their collectives."""

    group: Any  # of the ranks
    parameters: Callable[[], Iterable[torch.Tensor]]  # whose gradients are averaged, as they are now
    buffers: Callable[[], Iterable[torch.Tensor]]  # that follow the first rank's, as they are now
    held_bytes: int = 0  # held for the exchange, outside of plans

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    def part(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """A rank's term of the mean, written to ``out``."""
        return torch.mul(gradient, 1.0 / self.ranks, out=out)  # `mul_` would round the factor to half precision

    def mean(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of a gradient over all ranks; ``out``: where to write it."""
        part = self.part(gradient, out)
        dense = _dense(part)
        reduce_in_place(dense, dist.ReduceOp.SUM, self.group)
        if dense is not part:
            part.copy_(dense)
        return part

    def agree(self, gradients: Sequence[object], device: torch.device) -> None:
        """Check that all ranks are about to send the same gradients, described in words; else all refuse."""
        if not same_on_all(as_number(gradients), device, self.group):
            raise Unsupported(
                f"The ranks ran different steps: rank {dist.get_rank()} has gradients of {len(gradients)} parameters, "
                "and another rank has those of others, or has them in another order. No parameter was updated. Have "
                "each rank use the same parameters in a step; or update outside of the plan: DistributedDataParallel("
                "checkmate.compile(model, budget=..., reserve=...), find_unused_parameters=True)."
            )

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors from the first rank to all."""
        with torch.no_grad():
            pairs = [(t, _dense(t)) for t in (t.detach() for t in tensors)]
            sent = [dist.broadcast(dense, group=self.group, group_src=0, async_op=True) for _, dense in pairs]
            for work, (tensor, dense) in zip(sent, pairs, strict=True):
                if work is not None:
                    work.wait()
                if dense is not tensor:
                    tensor.copy_(dense)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a dense copy, as backends require."""
    return tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()


class AsItsModule(DistributedDataParallel):
    """Calls the wrapped module, and nothing else."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*inputs, **kwargs)


def wrapped_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """The modules, and parts of modules, that average gradients over ranks."""
    parts = (part for module in modules for part in module.modules())
    return list({id(part): part for part in parts if isinstance(part, DistributedDataParallel)}.values())


@contextmanager
def as_their_modules(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Within the block, call these as the modules that they wrap."""
    kinds = [type(module) for module in wrapped]
    for module in wrapped:
        module.__class__ = AsItsModule
    try:
        yield
    finally:
        for module, kind in zip(wrapped, kinds, strict=True):
            module.__class__ = kind


def stand_aside(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Make wrapped modules, which expect gradients after a forward, ignore the next backward."""
    for module in wrapped:
        module.reducer._reset_state()


def refuse_special(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Refuse, as `Unsupported`, wrappers that do more or less than average all gradients."""
    for module in wrapped:
        if type(module) not in (DistributedDataParallel, AsItsModule):
            raise Unsupported(f"A {type(module).__name__} may do more than DistributedDataParallel. {INSTEAD}")
        for does, words in _REFUSED:
            if does(module):
                raise Unsupported(f"This DistributedDataParallel {words}, which no plan does. {INSTEAD}")
        if not module.require_backward_grad_sync:
            raise Unsupported(
                "A training step within no_sync() would update each rank by its own gradients. Call it outside; to sum "
                "the gradients of n calls first, make the step with accumulate=n."
            )


def exchange_of(modules: Sequence[nn.Module], group: Any, optimizers: Sequence[optim.Optimizer]) -> Exchange | None:
    """Find the ranks with which a step averages gradients; None if there are none.

    Args:
        group: of ranks that average the gradients of all parameters; False: those do that wrap a module.

    Raises:
        TypeError: if the group is none.
        Unsupported: if modules exchange gradients in other ways, or with different ranks.
        ValueError: if both are given, or the ranks' parameters are not of the same shapes.
    """
    # Ranks of a group average the gradients of all parameters.
    wrapped = wrapped_in(modules)
    if group is not False:
        if wrapped:
            raise ValueError(
                "The model is wrapped in DistributedDataParallel, which has a process group. Leave process_group= out, "
                "or give the module within, which saves the memory of buckets."
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group is a torch.distributed.ProcessGroup, such as torch.distributed.group.WORLD after "
                f"torch.distributed.init_process_group(), not {group!r}."
            )

        def shared() -> Iterable[torch.Tensor]:
            return {id(b): b for module in modules for b in module.buffers()}.values()

        exchange = Exchange(group, lambda: parameters_of(optimizers), shared)
        # The ranks have models of the same shapes, and begin with the tensors of the first one.
        tensors = [*exchange.parameters(), *exchange.buffers()]
        shapes: list[Any] = [None] * exchange.ranks
        dist.all_gather_object(shapes, [(tuple(t.shape), str(t.dtype)) for t in tensors], group)
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError("The ranks of process_group= have models of different shapes: they cannot train together.")
        exchange.share(t for t in tensors if not is_fake(t))
        return exchange
    # `DistributedDataParallel` averages the gradients of the module within.
    if not wrapped:
        return None
    refuse_special(wrapped)
    if any(module.process_group != wrapped[0].process_group for module in wrapped):
        raise Unsupported(f"Parts of the model average their gradients over different ranks. {INSTEAD}")

    def parameters() -> Iterator[torch.Tensor]:
        return (p for m in wrapped for n, p in m.module.named_parameters() if n not in m.parameters_to_ignore)

    def buffers() -> Iterator[torch.Tensor]:
        sharing = (m for m in wrapped if m.broadcast_buffers)
        return (b for m in sharing for n, b in m.module.named_buffers() if n not in m.parameters_to_ignore)

    buckets = sum(p.nbytes for p in parameters() if p.requires_grad)
    return Exchange(wrapped[0].process_group, parameters, buffers, buckets)
