"""Lightning within a budget of bytes: a callback for training, and one that finds the largest batch that fits.

lightning.Trainer(..., callbacks=[WithinBudget("8 GB")])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import Unpack

from checkmate.backends.planner import Bytes, CompileOptions, Options
from checkmate.errors import Unsupported
from checkmate.integrations.planned_call import Loop, PlannedCall, largest_batch, plan_call
from checkmate.sizes.largest_batch import LargestBatch
from checkmate.torch_internals.running import tree_leaves

Part = Literal["training_step", "forward"]
_LOGGING = ("log", "log_dict")


class WithinBudget(lightning.Callback):
    """Keep a Lightning Trainer within a budget of bytes, with unchanged numbers.

    Planned are ``training_step`` and the backward through it, or what ``self(...)`` computes, with the bytes that the
    Trainer keeps beside them left out of the budget. The page docs/ecosystem.md says what that is, and what changes.

    Args:
        budget: bytes at any moment of training, parameters and optimizer included, as for `checkmate.compile`.
        of: "training_step" or "forward"; without a choice as the optimization is automatic or manual.
        beside: other modules on the device, whose bytes count.
        options: those of `checkmate.compile`; ``reserve`` comes on top of what is known here.

    Raises:
        BudgetError, RuleError, TypeError, ValueError: at once, as for `checkmate.compile`.
        Unsupported: when training begins, if the module was compiled before, or has no forward to plan; at the first
            step, if what is planned cannot be captured as one graph.
        InfeasibleBudget: at the first step, if no plan fits, or the update itself does not.
    """

    def __init__(
        self,
        budget: Bytes = "fit",
        *,
        of: Part | None = None,
        beside: Sequence[torch.nn.Module] = (),
        **options: Unpack[CompileOptions],
    ) -> None:
        super().__init__()
        self._options = Options.of(WithinBudget, CompileOptions.__optional_keys__, options, budget)
        if of not in (None, "training_step", "forward"):
            raise ValueError(f'of is "training_step" or "forward", not {of!r}.')
        self._part, self._beside = of, [*beside]
        self.planned: PlannedCall | None = None  # has .plans, .planning, .wait() and .memory(), and .kept

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called when the module exists, before anything wraps it."""
        if stage != "fit" or (self.planned is not None and self.planned.module is pl_module):
            return
        part = self._part or ("training_step" if pl_module.automatic_optimization else "forward")
        if part == "training_step" and not pl_module.automatic_optimization:
            raise Unsupported(
                "With manual optimization training_step is a loop: it runs backward and the optimizers itself. "
                'WithinBudget(..., of="forward") plans what self(...) computes within it.'
            )
        if part == "forward" and type(pl_module).forward is lightning.LightningModule.forward:
            raise Unsupported(
                f"{type(pl_module).__name__} has no forward to plan. Move into it what training_step computes, loss "
                "included, and call self(...) there."
            )
        wrap = partial(_logging_behind, pl_module) if part == "training_step" else None
        self.planned = plan_call(pl_module, part, self._options, wrap)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called when the optimizers exist, with the states of a checkpoint if training resumes."""
        assert self.planned is not None
        accumulates = trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization
        keeps = type(pl_module).optimizer_zero_grad is not lightning.LightningModule.optimizer_zero_grad
        self.planned.begin(Loop(trainer.optimizers, accumulates=accumulates or keeps, ahead=2, beside=self._beside))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Free gradients that Lightning would set to None only after the forward."""
        own = type(pl_module).optimizer_zero_grad is not lightning.LightningModule.optimizer_zero_grad
        if pl_module.automatic_optimization and not own and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)


class BatchSizeFinder(lightning.Callback):
    """Set the largest batch size whose step fits a budget, found by planning, without running out of memory.

    As Lightning's own finder it sets ``batch_size`` of the data module or of the module, of which their
    ``train_dataloader`` makes its loader. Give it before a `WithinBudget` of the same budget.

    Args:
        budget: bytes at any moment of training, as for `WithinBudget`; so are of, beside and reserve.
        options: those of `checkmate.max_batch_size`, such as ``max_overhead``, ``largest`` and ``time_limit``.

    Raises:
        Unsupported: when training begins, if nothing has a ``batch_size``, or a loader was given instead.
        InfeasibleBudget: when training begins, if not even the smallest size fits.
        BudgetError, TypeError, ValueError: for arguments that make no sense.
    """

    def __init__(
        self,
        budget: Bytes,
        *,
        of: Part | None = None,
        beside: Sequence[torch.nn.Module] = (),
        reserve: Bytes = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._asked, self._part, self._beside = Options(budget, reserve=reserve), of, [*beside]
        self._more = options
        self.found: LargestBatch | None = None  # once training has begun

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the size with the optimizers and loader as they will be made; they are freed afterwards."""
        owner = next((owner for owner in (trainer.datamodule, pl_module) if hasattr(owner, "batch_size")), None)
        if owner is None or not is_overridden("train_dataloader", owner):
            raise Unsupported(
                "A batch size is set on what makes the loader: give the module or the data module a batch_size, and "
                "a train_dataloader that makes its DataLoader of it; and no loader to fit()."
            )
        loader = owner.train_dataloader()
        part = self._part or ("training_step" if pl_module.automatic_optimization else "forward")
        method = getattr(type(pl_module), part)

        def step(batch: Any) -> Any:
            return method(pl_module, batch, 0) if part == "training_step" else method(pl_module, *batch)

        # The optimizers come as one, several, with schedulers, or in dicts.
        leaves = tree_leaves(pl_module.configure_optimizers())
        optimizers = [leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)]
        accumulates = trainer.accumulate_grad_batches > 1 or not pl_module.automatic_optimization
        loop = Loop(optimizers, accumulates, ahead=2, beside=self._beside)
        with trainer.precision_plugin.train_step_context(), _recorded(pl_module, []):
            self.found = largest_batch(step, loader, self._asked, pl_module, loop, self._more)
        owner.batch_size = self.found.size


def _logging_behind(module: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Delay the logging of a planned method until it has run, since no graph can hold it."""

    def step(*args: Any, **kwargs: Any) -> Any:
        calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        with _recorded(module, calls):
            result = run(*args, **kwargs)
        for name, arguments, keywords in calls:
            getattr(module, name)(*arguments, **keywords)
        return result

    return step


@contextmanager
def _recorded(module: Any, calls: list[Any]) -> Iterator[None]:
    """Record log calls within the block."""

    def record(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append((name, _detached(args), _detached(kwargs)))

    for name in _LOGGING:
        object.__setattr__(module, name, record(name))
    try:
        yield
    finally:
        for name in _LOGGING:
            object.__delattr__(module, name)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {name: _detached(item) for name, item in value.items()}
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value
