"""Whole steps on ranks that train together: what they average and share, told by `DistributedDataParallel` or a group.

A step does itself what that module does around its forward and its backward. While the step is captured and runs, the
module is called as the one that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from checkmate.capture.meta_tensors import is_fake
from checkmate.errors import Unsupported
from checkmate.updates.exchange import Exchange

_INSTEAD = (
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


class AsItsModule(DistributedDataParallel):
    """Calls the module that it wraps, and nothing else."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the wrapped module gives."""
        return self.module(*inputs, **kwargs)


def wrapped_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Those of the modules and their parts that average gradients over ranks."""
    found = (part for module in modules for part in module.modules())
    return list({id(part): part for part in found if isinstance(part, DistributedDataParallel)}.values())


@contextmanager
def as_their_modules(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Within the block these are called as the modules that they wrap."""
    for module in wrapped:
        module.__class__ = AsItsModule
    try:
        yield
    finally:
        for module in wrapped:
            module.__class__ = DistributedDataParallel


def stand_aside(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Have them leave the next backward alone.

    After a forward without a backward, as to evaluate, they wait for gradients, and would send those of a step as well.
    """
    for module in wrapped:
        module.reducer._reset_state()


def refuse_special(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Refuse what does more or less than to average all gradients.

    Raises:
        Unsupported: naming it.
    """
    for module in wrapped:
        if type(module) not in (DistributedDataParallel, AsItsModule):
            raise Unsupported(f"A {type(module).__name__} may do more than DistributedDataParallel. {_INSTEAD}")
        for does, words in _REFUSED:
            if does(module):
                raise Unsupported(f"This DistributedDataParallel {words}, which no plan does. {_INSTEAD}")
        if not module.require_backward_grad_sync:
            raise Unsupported(
                "A training step within no_sync() would update each rank by its own gradients. Call it outside; to sum "
                "the gradients of n calls first, make the step with accumulate=n."
            )


def exchange_of(modules: Sequence[nn.Module], group: Any, optimizers: Sequence[optim.Optimizer]) -> Exchange | None:
    """What a step exchanges with other ranks; None: nothing.

    Args:
        modules: of the step.
        group: of ranks that average the gradients of all parameters; False: those do that wrap a module.
        optimizers: of the step.

    Raises:
        TypeError: if the group is none.
        Unsupported: if modules exchange gradients in other ways, or with different ranks.
        ValueError: if both are given, or the ranks' parameters are not of the same shapes.
    """
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
        return _of_group(modules, group, optimizers)
    if not wrapped:
        return None
    refuse_special(wrapped)
    if any(module.process_group != wrapped[0].process_group for module in wrapped):
        raise Unsupported(f"Parts of the model average their gradients over different ranks. {_INSTEAD}")

    def parameters() -> Iterator[torch.Tensor]:
        return (p for m in wrapped for n, p in m.module.named_parameters() if n not in m.parameters_to_ignore)

    def buffers() -> Iterator[torch.Tensor]:
        sharing = (m for m in wrapped if m.broadcast_buffers)
        return (b for m in sharing for n, b in m.module.named_buffers() if n not in m.parameters_to_ignore)

    buckets = sum(p.nbytes for p in parameters() if p.requires_grad)
    return Exchange(wrapped[0].process_group, parameters, buffers, buckets)


def _of_group(modules: Sequence[nn.Module], group: Any, optimizers: Sequence[optim.Optimizer]) -> Exchange:
    """The exchange of all gradients within a group, whose ranks begin with the tensors of the first one."""

    def parameters() -> Iterator[torch.Tensor]:
        return (p for o in optimizers for settings in o.param_groups for p in settings["params"])

    def buffers() -> Iterator[torch.Tensor]:
        return iter({id(b): b for module in modules for b in module.buffers()}.values())

    exchange = Exchange(group, parameters, buffers)
    shapes: list[Any] = [None] * exchange.ranks
    dist.all_gather_object(shapes, [(tuple(t.shape), str(t.dtype)) for t in (*parameters(), *buffers())], group)
    if any(other != shapes[0] for other in shapes):
        raise ValueError("The ranks of process_group= have models of different shapes: they cannot train together.")
    exchange.share(t for t in (*parameters(), *buffers()) if not is_fake(t))
    return exchange
