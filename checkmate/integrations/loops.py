"""Your own training loop within a budget of bytes: with Accelerate, as in diffusers' examples, or plainly.

model = within_budget(model, optimizer, "8 GB")  # this line
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from checkmate.backends.planner import Bytes, CompileOptions, Options
from checkmate.errors import Unsupported
from checkmate.integrations.planned_call import Loop, PlannedCall, plan_call

M = TypeVar("M", bound=nn.Module)


def within_budget(
    model: M,
    optimizer: optim.Optimizer | Iterable[optim.Optimizer],
    budget: Bytes = "fit",
    *,
    accumulate: int = 1,
    ahead: int = 1,
    beside: Sequence[nn.Module] = (),
    **options: Unpack[CompileOptions],
) -> M:
    """Plan a model's forward and backward within a budget, with room for the loop around them.

    The model stays the object that it is; its forward is planned at its first training call. The page docs/ecosystem.md
    says which bytes are left out of the budget for the loop.

    Args:
        model: the plain module, before `accelerator.prepare`.
        optimizer: the one that will update it, or several.
        budget: bytes at any moment of the loop, parameters and optimizer included, as for `checkmate.compile`.
        accumulate: how many backwards make one update: with more than one, gradients are kept from step to step.
        ahead: how many batches the loop holds beside the one that the model is given.
        beside: other modules on the device, whose bytes count: an average of the model, a frozen encoder.
        options: those of `checkmate.compile`; ``reserve`` is for what the loop makes itself: a loss outside of the
            model, noise.

    Returns:
        The model. `plans_of` gives what is planned of it.

    Raises:
        BudgetError, RuleError, TypeError, ValueError: at once, as for `checkmate.compile`.
        Unsupported: at once, if the model was wrapped or compiled before.
        InfeasibleBudget: at the first step, if no plan fits, or the update itself does not.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> model = within_budget(model, optim.AdamW(model.parameters()), "1 MB")
    >>> model(torch.ones(8, 64)).sum().backward()
    >>> print(plans_of(model).plans[0].status, plans_of(model).kept.states)
    Status.OPTIMAL 33816
    """
    settings = Options.of(within_budget, CompileOptions.__optional_keys__, options, budget)
    if isinstance(model, DistributedDataParallel) or hasattr(model, "_original_forward"):
        raise Unsupported(
            f"This {type(model).__name__} was prepared already. Say model = within_budget(model, optimizer, ...) "
            "before accelerator.prepare(model, ...), or before it is wrapped for several ranks."
        )
    optimizers = (optimizer,) if isinstance(optimizer, optim.Optimizer) else tuple(optimizer)
    plan_call(model, "forward", settings).begin(Loop(optimizers, accumulate > 1, ahead, beside=beside))
    return model


def plans_of(model: nn.Module) -> PlannedCall:
    """The plans of a model: ``.plans``, ``.planning``, ``.wait()``, ``.memory()``, and ``.kept``.

    Raises:
        Unsupported: if it is not within a budget.
    """
    planned = vars(model).get("_checkmate_planned") or vars(getattr(model, "module", model)).get("_checkmate_planned")
    if planned is None:
        raise Unsupported(f"This {type(model).__name__} is not within a budget: there is no plan of it.")
    return planned
