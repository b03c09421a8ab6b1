"""TRL's trainers compute log-probabilities in the model's forward, in tiles, by a function that is in no one graph.

    log_probs = head(backbone(tokens)),   plan = backbone,   reserve = bytes that the head takes, and a reference model

So the plan is of the model below the head, and what the head takes is measured before it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from checkmate.integrations.planned_call import Outside, PlannedCall
from checkmate.memory import aside, measure_peak


def head_within(model: Any) -> tuple[nn.Module, Callable[..., Any]] | None:
    """The module whose forward ends in such a head, and that forward; None: there is none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = getattr(base, "_original_forward", base.forward)  # as it was before mixed precision
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    return (base, function) if code is not None and "fused_lm_head" in code.co_varnames else None


def outside_of(planned: PlannedCall, base: nn.Module, forward: Callable[..., Any], *, refers: bool) -> Outside:
    """Make a meter of the bytes that a forward takes outside of its planned part.

    Args:
        planned: the call of the part.
        base: the module of the forward.
        forward: ends in a head.
        refers: a model is called as a reference as well, without gradients, before the backward.
    """

    def measure(args: Any, kwargs: Any) -> int:
        part = planned.module
        device = next(part.parameters()).device
        hidden = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
        labels = torch.zeros(hidden.shape[:2], dtype=torch.long, device=device)

        def refer() -> Any:
            with torch.no_grad():
                return planned.plainly(part, *args, **kwargs)

        def run_head() -> None:
            found = forward(base, *args, labels=labels, fused_lm_head=True, **kwargs)
            weights = [p for p in base.get_output_embeddings().parameters() if p.requires_grad]  # type: ignore[operator]
            torch.autograd.grad(found.loss, [leaf, *weights], allow_unused=True)

        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            use = _peak(refer, device)
        leaf = use.result.last_hidden_state.detach().requires_grad_()
        planned.stub = replace(use.result, last_hidden_state=leaf)
        try:
            head = _peak(run_head, device).peak
        finally:
            planned.stub = None
        return max(head, use.peak if refers else 0)

    return measure


def _peak(fn: Callable[[], Any], device: torch.device) -> Any:
    """Measure the bytes of a call, in another thread if a profiler runs in this one, under the same autocast."""
    kind = device.type
    on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def measured() -> Any:
        with torch.autocast(kind, dtype) if on else nullcontext():
            return measure_peak(fn, device)

    return aside(measured)
