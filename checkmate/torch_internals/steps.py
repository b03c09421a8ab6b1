"""What stands around a step: hooks of optimizers, and processes that train together."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_OPTIMIZER = "whole steps are refused"
NAMES = Table(
    Name("_global_optimizer_pre_hooks", "torch.optim.optimizer", "hooks that see each optimizer's step", _OPTIMIZER),
    Name("_global_optimizer_post_hooks", "torch.optim.optimizer", "hooks that see each optimizer's step", _OPTIMIZER),
    Name(
        "_get_default_store",
        "torch.distributed.distributed_c10d",
        "where ranks agree on a plan",
        "steps on several ranks are refused",
    ),
    Name(
        "_get_active_ddp_module",
        "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module",
        "whether DistributedDataParallel calls",
    ),
)
__getattr__ = NAMES.get
