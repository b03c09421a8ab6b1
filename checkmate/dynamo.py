"""The entry point of ``torch.compile(model, backend="checkmate", options={"budget": "8 GB"})``.

It finds fewer mistakes than `checkmate.compile`, which sees the whole call: there is no ``verify``, no ``plans``, and
errors come wrapped as PyTorch wraps them. PyTorch decides what is captured when, and for how many kinds of input. The
budget counts what the graph reads: a parameter, a buffer or a tensor of the batch that it does not use is not known
here. Without a budget each graph takes what there is when it is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.fx as fx

from checkmate.backends.planner import Options, no_option
from checkmate.capture.patches.is_compiling import warn
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.compiler import compile
from checkmate.errors import Unsupported

log = logging.getLogger("checkmate.dynamo")
_OPTIONS = [field.name for field in fields(Options) if field.init and field.name not in ("verify", "max_plans")]


def backend(
    module: fx.GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Plan one captured graph. Each plan is logged.

    Args:
        module: what was captured; inputs: what it is called with.
        options: ``budget`` and, if wanted, others of `checkmate.compile`, but for ``verify`` and ``max_plans``.
        mode: not known here.

    Raises:
        ValueError: with a mode, or with an option that is none; it names the nearest.
        BudgetError: if the budget is neither a positive number of bytes nor a share of what there is.
        InfeasibleBudget: if no plan fits it.
        Unsupported: if this is a part of a step only, or its sizes are left open.

    >>> model = torch.nn.Linear(8, 4)
    >>> step = torch.compile(model, backend=backend, options={"budget": "1 MB"}, dynamic=False)
    >>> step(torch.ones(2, 8)).sum().backward()
    """
    # Take the answers given while this graph was captured.
    options = options or {}
    answer: Answer = backend.answer  # type: ignore[attr-defined]
    places, told_yes = [*answer.asked], {*answer.compiled}
    answer.asked.clear()
    answer.compiled.clear()
    answer.said.clear()  # captured: the next capture may say it again
    # Options that only `compile` has, or nobody.
    if mode is not None:
        raise ValueError(f"The backend checkmate has no modes, and {mode!r} is one of another.")
    if "verify" in options:
        raise ValueError("A backend sees no whole call to verify; checkmate.compile(..., verify=True) does.")
    if "max_plans" in options:
        raise ValueError("PyTorch counts here: torch._dynamo.config.recompile_limit is the most kinds of input.")
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(no_option("The backend checkmate", name, _OPTIONS))
    # A budget holds for a whole step of fixed sizes only.
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        cause = (
            f" The code that asks at {', '.join(places)} was told that it is not compiled, as in plain PyTorch; where "
            "that is what cannot be captured, checkmate.compile tells it otherwise."
            if places
            else ""
        )
        raise Unsupported(
            f"The step was captured only up to a graph break ({reason.reason}). A budget holds for a step that is "
            f"planned as a whole. torch.compile(..., fullgraph=True) says where it breaks.{cause}"
        )
    if any(isinstance(value, torch.SymInt) for value in inputs):
        raise Unsupported("Sizes were left open; a plan is for fixed ones: torch.compile(..., dynamic=False).")
    warn(told_yes)
    step = compile(module.forward, **options)._run.backend.compile(module, inputs)
    if step.training is not None:
        log.info("%s", step.training.plan)
    return step.run


backend.answer = Answer()  # type: ignore[attr-defined]
