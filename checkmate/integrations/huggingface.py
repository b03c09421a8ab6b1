"""Hugging Face Trainers within a budget of bytes: transformers' `Trainer`, TRL's, and their subclasses.

Trainer(..., callbacks=[WithinBudget("8 GB")])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from typing_extensions import Unpack

from checkmate.backends.planner import Bytes, CompileOptions, Options
from checkmate.errors import Unsupported
from checkmate.integrations.planned_call import Loop, PlannedCall, largest_batch, plan_call
from checkmate.memory import aside, measure_peak
from checkmate.sizes.largest_batch import LargestBatch

log = logging.getLogger("checkmate.integrations")


class WithinBudget(TrainerCallback):
    """Keep a Trainer within a budget of bytes, with unchanged numbers.

    The model's forward and the backward through it are planned, with the bytes that the Trainer keeps beside them left
    out of the budget. The page docs/ecosystem.md says what that is, and what changes.

    Args:
        budget: bytes at any moment of training, parameters and optimizer included, as for `checkmate.compile`.
        beside: other modules on the device, whose bytes count: a reference model.
        options: those of `checkmate.compile`; ``reserve`` comes on top of what is known here, as for a loss that the
            model does not compute itself.

    Raises:
        BudgetError, RuleError, TypeError, ValueError: at once, as for `checkmate.compile`.
        Unsupported: where it is given to a Trainer too late, or for a model that was compiled before.
        InfeasibleBudget: at the first step, if no plan fits, or the update itself does not.
    """

    def __init__(
        self, budget: Bytes = "fit", *, beside: Sequence[nn.Module] = (), **options: Unpack[CompileOptions]
    ) -> None:
        self._options = Options.of(WithinBudget, CompileOptions.__optional_keys__, options, budget)
        self._beside, self._refers = [*beside], False  # whether there is a model that the trained one is compared with
        self.planned: PlannedCall | None = None  # has .plans, .planning, .wait() and .memory(), and .kept

    def add_to(self, trainer: Any) -> WithinBudget:
        """Add this to an existing Trainer; its reference model, if any, counts as resident.

        If it was made with ``auto_find_batch_size=True``, `find_batch_size` finds the size, by plans.
        """
        self._refers = hasattr(trainer, "ref_model")
        if getattr(trainer, "ref_model", None) is not None:
            self._beside.append(trainer.ref_model)
        if trainer.args.auto_find_batch_size:
            limits = {"reserve": self._options.set_aside, "time_limit": self._options.time_limit}
            find_batch_size(trainer, self._options.budget, beside=self._beside, **limits)
            trainer.args.auto_find_batch_size = False
        trainer.add_callback(self)
        self._plan(trainer.model)
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the Trainer has its model, before anything wraps its forward."""
        self._plan(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the Trainer has its optimizer."""
        model, count = kwargs["model"], args.gradient_accumulation_steps
        loop = Loop([kwargs["optimizer"]], accumulates=count > 1, ahead=count, beside=self._beside, around=model)
        if hasattr(args, "precompute_ref_log_probs") and not self._refers:
            raise Unsupported(
                "This trainer compares its model with a reference model, which a callback is not told of. Make the "
                "trainer without it, and say WithinBudget(...).add_to(trainer)."
            )
        if args.auto_find_batch_size:
            raise Unsupported(
                "auto_find_batch_size tries sizes until one does not run out of memory, and within a budget none runs "
                "out. Make the trainer without this callback, and say WithinBudget(...).add_to(trainer): it finds the "
                "size. Or call find_batch_size(trainer, budget), and leave auto_find_batch_size out."
            )
        if (head := head_within(model)) is not None:
            # Plan the model below the head, and measure what the head takes.
            base: Any
            base, forward = head
            if self.planned is None or self.planned.module is not base.base_model:
                if self.planned is not None:
                    self.planned.stands_aside = True
                self.planned = plan_call(base.base_model, "forward", self._options)
            loop.outside = partial(_bytes_outside, self.planned, base, forward, self._refers)
        elif self.planned is None or self.planned.module is not model:
            if hasattr(model, "_original_forward"):
                raise Unsupported(
                    "The Trainer has wrapped the model's forward for mixed precision already. Give the callback when "
                    "the Trainer is made, Trainer(..., callbacks=[WithinBudget(...)]), or by add_to(trainer) at once."
                )
            self._plan(model)
        newer = hasattr(model, "activation_checkpointing_disable")  # transformers 5.2x has another name for it
        if getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False):
            log.info("activation checkpointing is turned off: the plan decides what runs again")
            (model.activation_checkpointing_disable if newer else model.gradient_checkpointing_disable)()
        assert self.planned is not None
        self.planned.begin(loop)

    def _plan(self, model: nn.Module) -> None:
        if head_within(model) is None:  # else the part below the head, once the trainer has called it
            self.planned = plan_call(model, "forward", self._options)


def find_batch_size(
    trainer: Any, budget: Bytes, *, beside: Sequence[nn.Module] = (), reserve: Bytes = 0, **options: Any
) -> LargestBatch:
    """Give a Trainer the largest batch whose step fits a budget, found by planning, without running out of memory.

    Beside the step it counts what the Trainer keeps: the state of its optimizer, which is made here, gradients that are
    accumulated, batches that are fetched ahead. Train with ``WithinBudget(budget)`` then.

    Args:
        trainer: its ``args.per_device_train_batch_size`` is set; its collator makes batches of the rows of its data.
        budget: bytes at any moment of training, as for `WithinBudget`; so are beside and reserve.
        options: those of `checkmate.max_batch_size`, such as ``max_overhead``, ``largest`` and ``time_limit``.

    Raises:
        InfeasibleBudget: if not even the smallest size fits.
        Unsupported: if the trainer computes its loss by a head outside of the model's graph, as those of TRL do.
        BudgetError, TypeError, ValueError: for arguments that make no sense.
    """
    args, model = trainer.args, trainer.model
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise Unsupported(
            f"{type(trainer).__name__} computes its loss itself, in what no plan sees: the largest batch of the model "
            "alone would not be its largest. Try sizes within a budget: the errors name the smallest that works."
        )
    trainer.create_optimizer()
    with torch.random.fork_rng():
        loader = trainer.get_train_dataloader()
    count = args.gradient_accumulation_steps
    loop = Loop([trainer.optimizer], accumulates=count > 1, ahead=count, beside=beside)
    settings, prepare = Options(budget, reserve=reserve), trainer._prepare_inputs
    answer = largest_batch(lambda batch: model(**batch), loader, settings, model, loop, options, prepare)
    args.per_device_train_batch_size = answer.size
    trainer._train_batch_size = args.train_batch_size
    return answer


def head_within(model: Any) -> tuple[nn.Module, Callable[..., Any]] | None:
    """The module whose forward ends in a TRL head, and that forward; None if there is none.

    TRL's trainers compute log-probabilities in the model's forward, in tiles, by a function that is in no one graph.

        log_probs = head(backbone(tokens)),  plan = backbone,  reserve = bytes of the head, and of a reference model

    So the plan is of the model below the head, and what the head takes is measured before it is made.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = getattr(base, "_original_forward", base.forward)  # as it was before mixed precision
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    return (base, function) if code is not None and "fused_lm_head" in code.co_varnames else None


def _bytes_outside(
    planned: PlannedCall, base: nn.Module, forward: Callable[..., Any], refers: bool, args: Any, kwargs: Any
) -> int:
    """Measure the bytes that a forward takes outside of its planned part.

    Args:
        planned: the call of the part.
        base: the module of the forward.
        forward: ends in a head.
        refers: a model is called as a reference as well, without gradients, before the backward.
        args, kwargs: of the part.
    """
    part = planned.module
    device = next(part.parameters()).device
    hidden = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
    labels = torch.zeros(hidden.shape[:2], dtype=torch.long, device=device)

    def refer() -> Any:
        with torch.no_grad():
            return planned.plainly(part, *args, **kwargs)

    def run_head() -> None:
        output = forward(base, *args, labels=labels, fused_lm_head=True, **kwargs)
        weights = [p for p in base.get_output_embeddings().parameters() if p.requires_grad]  # type: ignore[operator]
        torch.autograd.grad(output.loss, [leaf, *weights], allow_unused=True)

    # The planned part without gradients, as for a reference.
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        use = _peak(refer, device)
    # The head with its loss and backward, on that part's output.
    leaf = use.result.last_hidden_state.detach().requires_grad_()
    planned.stub = replace(use.result, last_hidden_state=leaf)
    try:
        head = _peak(run_head, device).peak
    finally:
        planned.stub = None
    return max(head, use.peak if refers else 0)


def _peak(fn: Callable[[], Any], device: torch.device) -> Any:
    """Measure the bytes of a call under the same autocast, in another thread if a profiler runs in this one."""
    kind = device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def measured() -> Any:
        with torch.autocast(kind, dtype) if on else nullcontext():
            return measure_peak(fn, device)

    return aside(measured)
