"""Clipping by the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does it, taken apart for a plan.

    n_i = |g_i|,   n = |(n_1, ..., n_k)|,   c = min(1, max_norm / (n + 1e-6)),   g_i c

The norm of each gradient is there as soon as the gradient is; no update can begin before n is known. In between a plan
keeps gradients, or lets go of them and makes them again. To clip values waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from checkmate.torch_internals.kernels import _foreach_norm, _group_tensors_by_device_and_dtype
from checkmate.units import check_positive

TINY = 1e-6  # that PyTorch adds to the norm


@dataclass(eq=False)
class Clipping:
    """How gradients are clipped.

    Args:
        most: the largest norm of all gradients; None: they are not clipped by it.
        order: of the norm.
        finite: a norm that is not finite is an error.
        value: the largest absolute value of an element; None: they are not clipped by it.

    Raises:
        ValueError: if a limit is no positive number, or there are two, or the order is no number.
    """

    most: float | None = None
    order: float = 2.0
    finite: bool = False
    value: float | None = None
    norm: torch.Tensor | None = field(default=None, init=False)  # of all gradients of the last step, before clipping

    def __post_init__(self) -> None:
        for name, limit in (("clip_norm", self.most), ("clip_value", self.value)):
            if limit is not None:
                check_positive(name, limit)
        if self.most is not None and self.value is not None:
            raise ValueError("Gradients are clipped by clip_norm or by clip_value: give one of them.")
        try:
            self.order = float(self.order)
        except (TypeError, ValueError):
            raise ValueError(f"norm_type is a number, or math.inf, not {self.order!r}.") from None

    def by_norm(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients that parameters have, where they are."""
        if self.most is not None:
            self.norm = nn.utils.clip_grad_norm_(parameters, self.most, self.order, error_if_nonfinite=self.finite)

    def by_value(self, parameter: torch.Tensor) -> None:
        """Clip the gradient that a parameter has, where it is."""
        if self.value is not None:
            nn.utils.clip_grad_value_(parameter, self.value)

    def coefficient(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The factor of gradients whose norms these are, in PyTorch's order.

        Raises:
            RuntimeError: if the norm of all is not finite and has to be.
        """
        assert self.most is not None
        self.norm = norm = total(norms, self.order)
        if self.finite and not norm.isfinite():
            raise RuntimeError(
                f"The norm of all gradients is {norm.item()}: they cannot be clipped, and no parameter was updated. "
                "Without error_if_nonfinite=True they are multiplied all the same."
            )
        return torch.clamp(self.most / (norm + TINY), max=1.0)


def norm_of(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of one gradient."""
    (norm,) = _foreach_norm([gradient], order)
    return norm


def total(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of all, from those of each."""
    first = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), order)


def order_of(gradients: Sequence[torch.Tensor]) -> list[int]:
    """The positions of gradients in the order in which PyTorch adds their norms: by type, where there are several."""
    if len({g.dtype for g in gradients}) == 1:
        return [*range(len(gradients))]
    like: Any = [torch.empty(0, dtype=g.dtype, device=g.device) for g in gradients]
    groups = _group_tensors_by_device_and_dtype([like], with_indices=True)
    return [i for _, positions in groups.values() for i in positions]
