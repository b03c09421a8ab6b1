"""Names that stand around a step: hooks of optimizers, and processes that train together."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_OPTIMIZER, _RANKS = "whole steps are refused", "steps on several ranks are refused"
_MODULES, _UNSEEN = "torch.nn.modules.module", "hooks of all modules are seen only if they are there at the first call"
_DDP = "torch.nn.parallel:DistributedDataParallel"
NAMES = Table(
    Name("_global_optimizer_pre_hooks", "torch.optim.optimizer", "hooks that see each optimizer's step", _OPTIMIZER),
    Name("_global_optimizer_post_hooks", "torch.optim.optimizer", "hooks that see each optimizer's step", _OPTIMIZER),
    Name("_global_forward_pre_hooks", _MODULES, "hooks of the forward of each module", _UNSEEN),
    Name("_global_forward_hooks", _MODULES, "hooks of the forward of each module", _UNSEEN),
    Name("_global_backward_pre_hooks", _MODULES, "hooks of the backward of each module", _UNSEEN),
    Name("_global_backward_hooks", _MODULES, "hooks of the backward of each module", _UNSEEN),
    Name("_get_default_store", "torch.distributed.distributed_c10d", "where ranks agree on a plan", _RANKS),
    Name("_resolve_process_group", "torch.distributed.distributed_c10d", "the ranks of a collective, by name", _RANKS),
    Name("_get_active_ddp_module", f"{_DDP}._get_active_ddp_module", "whether DistributedDataParallel calls"),
)
__getattr__ = NAMES.get
