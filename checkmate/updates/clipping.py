"""Clipping by the norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does it, taken apart for a plan.

    n_i = |g_i|,   n = |(n_1, ..., n_k)|,   c = min(1, max_norm / (n + 1e-6)),   g_i c

The norm of each gradient is there as soon as the gradient is; no update can begin before n is known. In between a plan
keeps gradients, or lets go of them and makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

TINY = 1e-6  # that PyTorch adds to the norm


def norm_of(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of one gradient."""
    (norm,) = torch._foreach_norm([gradient], order)
    return norm


def coefficient_of(note: Callable[[torch.Tensor], None]) -> Callable[..., torch.Tensor]:
    """A function of all norms, in PyTorch's order, that gives the factor of the gradients.

    Args:
        note: is told the norm of all.
    """

    def coefficient(norms: Sequence[torch.Tensor], max_norm: float, order: float) -> torch.Tensor:
        first = norms[0].device
        total = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]), order)
        note(total)
        return torch.clamp(max_norm / (total + TINY), max=1.0)

    return coefficient


def order_of(gradients: Sequence[torch.Tensor]) -> list[int]:
    """The positions of gradients in the order in which PyTorch adds their norms: by type, where there are several."""
    if len({g.dtype for g in gradients}) == 1:
        return [*range(len(gradients))]
    like: Any = [torch.empty(0, dtype=g.dtype, device=g.device) for g in gradients]
    groups = _group_tensors_by_device_and_dtype([like], with_indices=True)
    return [i for _, positions in groups.values() for i in positions]
