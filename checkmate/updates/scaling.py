"""Loss scaling by a `torch.amp.GradScaler`, taken apart for a plan.

    u_i = g_i / s,   skip = any g_i is not finite

The loss is scaled outside of the captured step, so that the scale s may change from call to call. Whether a gradient is
finite is told as soon as it is there; no update can begin before all were looked at. The scaler itself keeps what was
found and changes the scale, as in plain training.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import optim

from checkmate.errors import Unsupported
from checkmate.torch_internals.kernels import _amp_foreach_non_finite_check_and_unscale_

HELD_BYTES = 6 * 8  # scale, its inverse, its count of steps; the scaled loss, its gradient, and what was found


class Scaling:
    """What a scaler does in one update."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._inverse: torch.Tensor | None = None
        self._skipped: dict[int, bool] = {}  # by the id of the optimizer

    def begin(self) -> None:
        """Prepare for the update: the loss was scaled, and no gradient is there."""
        scale: Any = self.scaler._scale
        self._inverse = scale.double().reciprocal().float()  # as PyTorch computes it
        self._skipped = {}

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient without the scale."""
        copy, found = gradient.clone(), torch.zeros((), dtype=torch.float32, device=gradient.device)
        inverse = torch.ones_like(found) if self._inverse is None else self._inverse  # while it is measured
        _amp_foreach_non_finite_check_and_unscale_([copy], found, inverse)
        return copy

    def decide(self, optimizer: optim.Optimizer, largest: Sequence[torch.Tensor]) -> torch.Tensor:
        """One if an update is to be skipped, else zero. The scaler is told.

        Args:
            optimizer: whose update it is.
            largest: of each gradient, as `largest_of` has it.
        """
        found = are_not_finite(largest)
        state = self.scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found.device: found}
        return found

    def unscale(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Unscale all gradients where they are, and look for those that are not finite."""
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)

    def skips(self, optimizer: optim.Optimizer) -> bool:
        """Whether a gradient was not finite: then nothing is updated."""
        key = id(optimizer)
        if key not in self._skipped:
            found = self.scaler._per_optimizer_states[key]["found_inf_per_device"].values()
            self._skipped[key] = any(bool(one.item()) for one in found)
        return self._skipped[key]

    def finish(self) -> None:
        """Change the scale by what was found."""
        self._inverse = None
        self.scaler.update()


def checked(scaler: Any, optimizers: Sequence[optim.Optimizer]) -> Scaling | None:
    """The scaling of a step; None: the scaler is turned off.

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
        if any(p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "A scaler unscales no gradients in float16, and a parameter of this "
                f"{type(optimizer).__name__} is in it. Keep parameters in float32, and use torch.autocast."
            )
    return Scaling(scaler)


def are_not_finite(largest: Sequence[torch.Tensor]) -> torch.Tensor:
    """One if any of these is not finite, else zero."""
    return (~torch.stack([one.isfinite() for one in largest]).all()).float()


def largest_of(gradient: torch.Tensor) -> torch.Tensor:
    """The largest absolute value in a gradient: not finite if any element is not."""
    if not gradient.numel():
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return torch.linalg.vector_norm(gradient, inf)
