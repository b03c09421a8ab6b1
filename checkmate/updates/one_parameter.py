"""One parameter's update by the optimizer that has it: the same object, the same state, its settings as they are now.

The optimizer's own `step` runs, on a view of the optimizer that has this parameter only. So a learning rate that is set
by hand or by a scheduler holds from the next update on, and states are where `state_dict` finds them. PyTorch's
optimizers compute each element of a parameter from its own gradient and state, whichever others are updated with it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn, optim

from checkmate.memory import CPU
from checkmate.torch_internals.descriptions import FakeTensor
from checkmate.torch_internals.dispatcher import _disable_current_modes
from checkmate.updates.slices import in_slices, step_in_slices

Call = Callable[..., None]
META = torch.device("meta")
LATE = 10**9  # updates, after which an optimizer does nothing more for the first time
_ALL_AT_ONCE = ("foreach", "fused")  # settings that choose among kernels with the same states


@dataclass(eq=False)
class Update:
    """The update of one parameter."""

    optimizer: optim.Optimizer
    group: int  # the position of its group in the optimizer
    parameter: torch.Tensor

    @property
    def settings(self) -> dict[str, Any]:
        """Its group's, as they are now."""
        return self.optimizer.param_groups[self.group]

    @property
    def about(self) -> str:
        """What a late update's cost depends on beside the parameter: the optimizer's kind, and what is turned on."""
        return f"late {about(self.optimizer, self.settings)}"

    def __call__(self, gradient: torch.Tensor) -> None:
        """Update the parameter."""
        _update(self.optimizer, self.settings, self.parameter, gradient, self.optimizer.state)

    def rehearsal(self) -> Call:
        """A function that does to another parameter what a late update does to this one, with a state of its own.

        The plan holds for all updates, and late ones take most: RAdam rectifies from its sixth on, ASGD averages from
        one that is said to it.
        """
        states: dict[torch.Tensor, Any] = defaultdict(dict)

        def rehearse(gradient: torch.Tensor, parameter: torch.Tensor, about: str) -> None:
            if parameter not in states:
                states[parameter].update(_copied(self.optimizer.state.get(self.parameter, {})))
                if not isinstance(parameter, FakeTensor):  # whose counts cannot be read
                    _update(self.optimizer, self.settings, parameter, gradient, states)
                    _make_late(states[parameter])
            _update(self.optimizer, self.settings, parameter, gradient, states)

        return rehearse

    @property
    def state_bytes(self) -> int:
        """Bytes of its state on its device, from the first update on."""
        here = self.parameter.device
        state = self.optimizer.state.get(self.parameter) or self._first_state
        tensors = [t for t in state.values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in tensors if t.device in (here, META) or here in (CPU, META))

    @cached_property
    def _first_state(self) -> dict[str, Any]:
        """A state as the first update makes it: without data, where that can be had."""
        states: dict[torch.Tensor, Any] = defaultdict(dict)
        plain = {**self.settings, **{name: False for name in _ALL_AT_ONCE if name in self.settings}}
        with _disable_current_modes():
            for device, settings in ((META, plain), (self.parameter.device, self.settings)):
                like = nn.Parameter(torch.zeros_like(self.parameter, device=device))
                try:
                    _step(self.optimizer, settings, like, torch.zeros_like(like), states)
                except (RuntimeError, NotImplementedError):  # of an optimizer that reads numbers of its state
                    if device != META:
                        raise
                else:
                    break
        return states[like]


def about(optimizer: optim.Optimizer, settings: dict[str, Any]) -> str:
    """The kind of an optimizer and what is turned on in a group of it, but for rates, which change from step to step.

    >>> about(sgd := optim.SGD([torch.ones(1)], lr=0.1, momentum=0.9), sgd.param_groups[0])
    'SGD momentum'
    """
    rates = ("params", "lr", "initial_lr", "max_lr", "min_lr")
    on = [name for name, value in settings.items() if name not in rates and _is_on(value)]
    return " ".join((type(optimizer).__name__, *on))


def _is_on(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float, str)) else value is not None


def _update(
    optimizer: optim.Optimizer, settings: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, states: Any
) -> None:
    """Update a parameter: in slices if it is large, which takes less memory."""
    if in_slices(optimizer, settings, parameter, gradient, states.get(parameter, {})):
        step_in_slices(partial(_step, optimizer, settings), parameter, gradient, states)
    else:
        _step(optimizer, settings, parameter, gradient, states)


def _step(
    optimizer: optim.Optimizer, settings: dict[str, Any], parameter: Any, gradient: torch.Tensor, states: Any
) -> None:
    """Update a parameter, as the optimizer does with these settings; its state is found among these, or made."""
    kind = type(optimizer)
    one: Any = object.__new__(kind)
    one.__dict__.update(optimizer.__dict__)
    one.__dict__.pop("step", None)  # in which a scheduler counts
    one.param_groups, one.state = [{**settings, "params": [parameter]}], states
    before, parameter.grad = parameter.grad, gradient.clone() if _writes(optimizer, settings) else gradient
    try:
        with torch.no_grad():
            inspect.unwrap(kind.step)(one)  # without what a profiler and hooks are told of a whole step
    finally:
        parameter.grad = before


def _writes(optimizer: optim.Optimizer, settings: dict[str, Any]) -> bool:
    """Whether an update writes over the gradient, which others may read, or be."""
    return type(optimizer) is optim.SGD and settings["nesterov"] and settings["foreach"] is not False


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: what.clone() if isinstance(what, torch.Tensor) else what for name, what in state.items()}


def _make_late(state: dict[str, Any]) -> None:
    """Have so many updates counted in a state, if it counts them."""
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        step.fill_(LATE)
    elif step is not None:
        state["step"] = LATE
