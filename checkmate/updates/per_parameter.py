"""Optimizers that update each parameter alone: known by a table, or promised by the user.

**Known.** What these compute of a parameter depends on nothing but its gradient, its state and its group's settings. A
derived class has its parent's bits where it changes nothing that the parent's `step` runs: it may have its own
``__init__``, ``add_param_group``, and what saves and loads its state. Of other libraries `NAMED` has those that tests
have shown to do so.

**Promised.** Of any other optimizer only its author can know: what a `step` does for large parameters, or after a
thousand updates, no trial shows. So it is refused without ``alone=True``.

What is not of `torch.optim` runs its own `step`, as it is, for one parameter at a time. What a `step` does once for
all, as to count in a group or to set a rate, is done by one more run, in which no parameter has a gradient.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import optim

from checkmate.errors import Unsupported
from checkmate.torch_internals.running import tree_leaves

SUPPORTED = (
    *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.Muon),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
NAMED = {"transformers.optimization.Adafactor"}  # of other libraries; these write over no gradient either
_BESIDE_STEP = {  # names that a subclass may define without changing its parent's step
    *("__init__", "add_param_group", "state_dict", "load_state_dict", "zero_grad", "__getstate__", "__setstate__"),
    *("__repr__", "__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__"),
    *("__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
}
_AROUND = optim.Optimizer.profile_hook_step(len).__code__  # the wrapper around each step


def known(optimizer: optim.Optimizer) -> Any:
    """The class of `torch.optim` whose step an optimizer runs unchanged; None if there is none.

    >>> renamed = type("Renamed", (optim.AdamW,), {})
    >>> known(renamed([torch.ones(1)])).__name__
    'AdamW'
    """
    kind: Any = type(optimizer)
    return _known(kind)


@cache
def _known(kind: Any) -> Any:
    for n, base in enumerate(kind.__mro__):
        if base in SUPPORTED and not _is_wrapper(kind):
            own = {name for derived in kind.__mro__[:n] for name in vars(derived) if hasattr(base, name)}
            changed = own - _BESIDE_STEP - ({"step"} if _as_written(kind.step) is _as_written(base.step) else set())
            return None if changed else base
    return None


def _as_written(step: Any) -> Any:
    """A step without the wrappers that PyTorch adds with a class's first optimizer."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _AROUND else step


def name_of(optimizer: optim.Optimizer) -> str:
    """The name of an optimizer's class, with its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def is_named(optimizer: optim.Optimizer) -> bool:
    """Tell whether it is of another library, and in the table."""
    return name_of(optimizer) in NAMED


def step_one(
    optimizer: optim.Optimizer, group: dict[str, Any], parameter: Any, gradient: torch.Tensor | None, states: Any
) -> None:
    """Run an optimizer's own step for one parameter, by a view of it with that parameter's group only.

    The optimizer stays as it is, but for what its attributes hold; the group's settings are as the step leaves them.
    The parameter's state is found among ``states``, or made.
    """
    kind = type(optimizer)
    view: Any = object.__new__(kind)
    view.__dict__.update(optimizer.__dict__)
    view.__dict__.pop("step", None)  # in which a scheduler counts
    view.param_groups, view.state = [group], states
    before, parameter.grad = parameter.grad, gradient
    try:
        with torch.no_grad():
            # Of a known class, without the wrapper that tells a profiler and hooks of a whole step.
            step: Any = kind.step if known(optimizer) is None else inspect.unwrap(kind.step)
            step(view)
    finally:
        parameter.grad = before


def update_once(optimizer: optim.Optimizer) -> None:
    """Run the part of an optimizer's step that it does once per step: its step without gradients."""
    if known(optimizer) is not None:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        type(optimizer).step(optimizer)
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def refuse_wrappers(optimizer: optim.Optimizer, instead: str) -> None:
    """Refuse, as `Unsupported`, an optimizer that steps by another one; say what to do ``instead``."""
    held = tree_leaves([value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")])
    inner = [type(leaf).__name__ for leaf in held if isinstance(leaf, optim.Optimizer)]
    if inner or _is_wrapper(type(optimizer)):
        which = f", {inner[0]}," if inner else ""
        raise Unsupported(
            f"{name_of(optimizer)} steps by another optimizer{which} for all parameters at once. Give that one, if "
            f"nothing else is to be done. {instead}"
        )


def _is_wrapper(kind: type) -> bool:
    """Tell whether it shares the groups or states of another optimizer."""
    return any(name in vars(base) for base in kind.__mro__ for name in ("param_groups", "state"))
