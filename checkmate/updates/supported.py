"""Which optimizers update one parameter at a time with the bits that they have for all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import optim

from checkmate.errors import Unsupported
from checkmate.torch_internals.steps import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from checkmate.updates.one_parameter import parameters_of

# What they compute of a parameter depends on nothing but its gradient, its state and its group's settings.
SUPPORTED = tuple(
    getattr(optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
    if hasattr(optim, name)  # Muon is of PyTorch 2.9
)
_INSTEAD = (
    "Update outside of the plan: checkmate.compile(loss_fn, budget=..., reserve=...), with the bytes of its state and "
    "of the gradients as the reserve."
)


def checked(optimizers: optim.Optimizer | Iterable[optim.Optimizer]) -> tuple[optim.Optimizer, ...]:
    """The optimizers of a step, each of which updates parameters of its own.

    Raises:
        TypeError: if something else is given.
        Unsupported: if one cannot update one parameter at a time, or has hooks, or two update the same parameter.
    """
    given: tuple[Any, ...] = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in given:
        if not isinstance(optimizer, optim.Optimizer):
            raise TypeError(f"optimizer is a torch.optim.Optimizer or several, not {_what_it_is(optimizer)}.")
        _refuse(optimizer)
    if not given:
        raise TypeError("optimizer is a torch.optim.Optimizer or several, not none.")
    seen: set[torch.Tensor] = set()
    for parameter in parameters_of(given):
        if parameter in seen:
            raise Unsupported(
                f"Two updates of a parameter of shape {tuple(parameter.shape)} would follow each other in one step: it "
                f"is in two optimizers, or twice in one. {_INSTEAD}"
            )
        seen.add(parameter)
    return given


def _what_it_is(given: object) -> str:
    """What was given in an optimizer's place, and what to give."""
    if isinstance(given, type):
        return f"the class {given.__name__}: make one of it, {given.__name__}(model.parameters())"
    if isinstance(given, optim.lr_scheduler.LRScheduler):
        return f"a {type(given).__name__}: give its optimizer, and call scheduler.step() after the training step"
    return type(given).__name__


def _refuse(optimizer: optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if type(optimizer) is optim.LBFGS:
        raise Unsupported(f"{name} runs the step several times for one update: there is no one plan. {_INSTEAD}")
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(kind.__name__ for kind in SUPPORTED)
        raise Unsupported(
            f"{type(optimizer).__module__}.{name} may read all gradients at once, so that none is free before its "
            f"update. These update one parameter at a time: {names}. {_INSTEAD}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            f"This {name} is differentiable: gradients would flow through its updates, and a step has none then. "
            "Make it with differentiable=False."
        )
    for group in optimizer.param_groups:
        types = {p.dtype for p in group["params"] if p.requires_grad}
        if name == "Adafactor" and group["eps"][0] is None and _at_once(group) and len(types) > 1:
            raise Unsupported(
                "This Adafactor, with foreach, takes its smallest number from the type of one parameter for parameters "
                "of several types in a group. Make it with eps=(a number, 1e-3), or foreach=False."
            )
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(hooks) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise Unsupported(
            f"A hook on the step of this {name} is called when all gradients are there, and here they never are. "
            f"Call what it does before or after the training step. {_INSTEAD}"
        )


def _at_once(group: dict[str, Any]) -> bool:
    """Whether a group is updated by ops of many tensors."""
    on_cpu = all(p.device.type == "cpu" for p in group["params"])
    return group["foreach"] is True or (group["foreach"] is None and not on_cpu)


def refuse_hooks(optimizers: Sequence[optim.Optimizer]) -> None:
    """Refuse hooks on parameters, which plain PyTorch calls when a gradient is there.

    Raises:
        Unsupported: if a parameter has one.
    """
    for parameter in parameters_of(optimizers):
        of = f"A parameter of shape {tuple(parameter.shape)} has a hook"
        if parameter._backward_hooks:
            raise Unsupported(
                f"{of} on its gradient, which no plan knows the memory of, and which would not be called. Register it "
                "on a view within the step, weight = self.weight.view_as(self.weight); weight.register_hook(...), or "
                "remove it."
            )
        if parameter._post_accumulate_grad_hooks:
            raise Unsupported(
                f"{of} after its gradient is accumulated, and here none is: its update takes the gradient. Remove the "
                "hook; if it runs the optimizer, the training step does that. Else call what it does after a step with "
                "gradients=True."
            )
