"""Steps on gradients before an update: sum, unscale, clip, each as plain PyTorch does it.

**Sums.** Gradients of several micro-batches are summed in each parameter's ``.grad``. The first is stored there, later
ones are added to it in place. Its memory is allocated before the backward: it outlives the step, and is no part of what
the step's plan allocates.

**Scaling** of the loss by a `torch.amp.GradScaler`, taken apart for a plan.

    u_i = g_i / s,   skip = any g_i is not finite

The loss is scaled outside of the captured step, so that the scale s may change from call to call. Whether a gradient is
finite is told as soon as it is there; no update can begin before all were looked at. The scaler itself keeps what was
found and changes the scale, as in plain training.

**Clipping** by the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does it, taken apart for a plan.

    n_i = |g_i|,   n = |(n_1, ..., n_k)|,   c = min(1, max_norm / (n + 1e-6)),   g_i c

The norm of each gradient is there as soon as the gradient is; no update can begin before n is known. In between a plan
keeps gradients, or lets go of them and makes them again. To clip values waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import nn, optim

from checkmate.capture.nodes import Held
from checkmate.errors import Unsupported
from checkmate.torch_internals import running
from checkmate.torch_internals.running import _amp_foreach_non_finite_check_and_unscale_, _foreach_norm
from checkmate.units import check_positive
from checkmate.updates.optimizers import parameters_of

HELD_BYTES = 6 * 8  # scale, its inverse, its count of steps; the scaled loss, its gradient, and what was found
TINY = 1e-6  # added to the norm by PyTorch


class Sums:
    """The gradient sums of the parameters that get gradients in a step."""

    def __init__(self) -> None:
        self._strides: dict[torch.Tensor, tuple[int, ...]] = {}  # per parameter's sum
        self._rooms: dict[torch.Tensor, torch.Tensor] = {}  # not in use yet
        self.adds = 0  # of this call, that were begun
        self.at_home = set[torch.Tensor]()  # parameters whose sums are at home in the second memory
        self.aside: dict[torch.Tensor, torch.Tensor] = {}  # sums at home that are not on their parameter's device now

    def expect(self, parameter: torch.Tensor, strides: Sequence[int]) -> None:
        """Expect that a step adds to this parameter's gradient, which autograd stores with these strides."""
        self._strides.setdefault(parameter, tuple(strides))

    @property
    def held_bytes(self) -> int:
        """Bytes of all sums."""
        return sum(p.numel() * p.element_size() for p in self._strides)

    def of(self, parameter: torch.Tensor) -> Held:
        """A parameter's sum, in whose place another tensor may be put."""

        def get() -> torch.Tensor | None:
            return self.aside.get(parameter) if parameter.grad is None else parameter.grad

        def put(gradient: torch.Tensor) -> None:
            is_here = gradient.device == parameter.device  # else PyTorch takes it for no gradient of the parameter
            parameter.grad = gradient if is_here else None
            self.aside.pop(parameter, None)
            if not is_here:
                self.aside[parameter] = gradient

        return Held("grad", parameter.nbytes, parameter, get, put)

    @property
    def held(self) -> list[Held]:
        """All sums."""
        return [self.of(parameter) for parameter in self._strides]

    def make_rooms(self) -> None:
        """Before a call's adds, allocate the missing sums, but those at home in the second memory, made there."""
        self.adds = 0
        for parameter in self._strides:
            if parameter.grad is None and parameter not in {*self._rooms, *self.at_home}:
                self._rooms[parameter] = self.room(parameter, parameter.device)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient to a sum as autograd does."""
        self.adds += 1
        if parameter.grad is None:
            room = self._rooms.pop(parameter, None)
            parameter.grad = (self.room(parameter, parameter.device) if room is None else room).copy_(gradient)
        else:
            parameter.grad.add_(gradient)

    def room(self, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory for a parameter's sum on a device."""
        return torch.empty_strided(parameter.shape, self._strides[parameter], dtype=parameter.dtype, device=device)


class Scaling:
    """A scaler's part in one update."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._inverse: torch.Tensor | None = None
        self._skipped: dict[int, bool] = {}  # by the id of the optimizer

    def begin(self) -> None:
        """Prepare for the update: the loss is scaled, and there is no gradient yet."""
        scale: Any = self.scaler._scale
        self._inverse = scale.double().reciprocal().float()  # as PyTorch computes it
        self._skipped = {}

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """The unscaled gradient."""
        self.unscale(copy := gradient.clone())
        return copy

    def unscale(self, gradient: torch.Tensor) -> None:
        """Unscale a gradient in place."""
        found_inf = torch.zeros((), dtype=torch.float32, device=gradient.device)
        inverse = torch.ones_like(found_inf) if self._inverse is None else self._inverse  # while it is measured
        _amp_foreach_non_finite_check_and_unscale_([gradient], found_inf, inverse)

    def decide(self, optimizer: optim.Optimizer, largest: Sequence[torch.Tensor]) -> torch.Tensor:
        """1.0 to skip an optimizer's update, else 0.0, from `largest_of` of its gradients; the scaler notes it.

        Where others of them were looked at before, these count as well.
        """
        found_inf = are_not_finite(largest)
        per_device = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for before in per_device.values():
            found_inf = torch.maximum(found_inf, before)
        per_device[found_inf.device] = found_inf
        return found_inf

    def skips(self, optimizer: optim.Optimizer) -> bool:
        """Tell whether a gradient was not finite, so that nothing is updated."""
        key = id(optimizer)
        if key not in self._skipped:
            flags = self.scaler._per_optimizer_states[key]["found_inf_per_device"].values()
            self._skipped[key] = any(bool(flag.item()) for flag in flags)
        return self._skipped[key]

    def finish(self) -> None:
        """Adapt the scale to what was found."""
        self._inverse = None
        self.scaler.update()


def checked_scaler(scaler: Any, optimizers: Sequence[optim.Optimizer]) -> Scaling | None:
    """The scaling of a step; None if the scaler is disabled.

    Raises:
        TypeError: if something else is given.
        Unsupported: if a fused optimizer would unscale gradients within its kernel, which rounds otherwise.
        ValueError: if a parameter is in half precision, as in PyTorch.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}.")
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        raise Unsupported(
            f"{type(scaler).__module__}.{type(scaler).__name__} may look at all gradients in ways of its own. "
            "Give a torch.amp.GradScaler."
        )
    if not scaler.is_enabled():
        return None
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise Unsupported(
                f"A fused {type(optimizer).__name__} unscales gradients within its kernel, where no plan sees them. "
                "Make it with fused=False."
            )
        if any(p.dtype == torch.float16 for p in parameters_of([optimizer])):
            raise ValueError(
                "A scaler unscales no gradients in float16, and a parameter of this "
                f"{type(optimizer).__name__} is in it. Keep parameters in float32, and use torch.autocast."
            )
    return Scaling(scaler)


def are_not_finite(largest: Sequence[torch.Tensor]) -> torch.Tensor:
    """1.0 if any gradient has an inf or NaN, else 0.0 (GradScaler's found_inf)."""
    return (~torch.stack([value.isfinite() for value in largest]).all()).float()


def largest_of(gradient: torch.Tensor) -> torch.Tensor:
    """The largest absolute value in a gradient; not finite if an element is not."""
    if not gradient.numel():
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return torch.linalg.vector_norm(gradient, inf)


@dataclass(eq=False)
class Clipping:
    """The clipping of gradients.

    Raises:
        ValueError: if a limit is no positive number, or there are two, or the order is no number.
    """

    most: float | None = None  # the largest norm of all gradients; None: they are not clipped by it
    order: float = 2.0  # of the norm
    finite: bool = False  # a norm that is not finite is an error
    value: float | None = None  # the largest absolute value of an element; None: they are not clipped by it
    norm: torch.Tensor | None = field(default=None, init=False)  # of all gradients of the last step, before clipping
    factor: torch.Tensor | None = field(default=None, init=False)  # that clips them, in the step that goes on

    def __post_init__(self) -> None:
        for name, limit in (("clip_norm", self.most), ("clip_value", self.value)):
            if limit is not None:
                check_positive(name, limit, most=inf)
        if self.most is not None and self.value is not None:
            raise ValueError("Gradients are clipped by clip_norm or by clip_value: give one of them.")
        try:
            self.order = float(self.order)
        except (TypeError, ValueError):
            raise ValueError(f"norm_type is a number, or math.inf, not {self.order!r}.") from None

    def in_place(self, parameter: torch.Tensor) -> None:
        """Clip the parameter's gradient in place, by the factor of the step that goes on or by value."""
        if self.factor is not None and parameter.grad is not None:
            parameter.grad.mul_(self.factor)
        if self.value is not None:  # of a parameter without one, nothing
            nn.utils.clip_grad_value_(parameter, self.value)

    def coefficient(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The factor for gradients with these norms, in PyTorch's order; raise if ``finite`` and the norm is not."""
        assert self.most is not None
        self.norm = norm = total(norms, self.order)
        if self.finite and not norm.isfinite():
            raise RuntimeError(
                f"The norm of all gradients is {norm.item()}: they cannot be clipped, and no parameter was updated. "
                "Without error_if_nonfinite=True they are multiplied all the same."
            )
        self.factor = torch.clamp(self.most / (norm + TINY), max=1.0)
        return self.factor


def norm_of(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of one gradient."""
    (norm,) = _foreach_norm([gradient], order)
    return norm


def total(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The total norm, from the norm of each gradient."""
    first = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), order)


def order_of(gradients: Sequence[torch.Tensor]) -> list[int]:
    """The order of gradients in which PyTorch adds their norms: grouped by type if there are several."""
    if len({g.dtype for g in gradients}) == 1:
        return [*range(len(gradients))]
    like: Any = [torch.empty(0, dtype=g.dtype, device=g.device) for g in gradients]
    groups = running._group_tensors_by_device_and_dtype([like], with_indices=True)
    return [i for _, positions in groups.values() for i in positions]
