"""Ops that have no variant which writes over an argument, called so that they do.

Each leaves the bits of its op in ``out``, which is the op's first argument, and gives what the op gives.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten
Number = int | float | bool | complex


def take_over(x: torch.Tensor, *, memory_format: torch.memory_format | None = None, out: torch.Tensor) -> torch.Tensor:
    """``x.clone()``: where nothing reads x any more, x itself."""
    return out


def rsub_over(x: torch.Tensor, other: Number, alpha: Number = 1, *, out: torch.Tensor) -> torch.Tensor:
    """``other - alpha * x``."""
    return aten.sub.out(other, x, alpha=alpha, out=out)


def safe_softmax_over(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, out: torch.Tensor
) -> torch.Tensor:
    """Softmax in which rows of nothing but -inf are zero: these are looked for first."""
    masked = torch.eq(x, float("-inf")).all(dim, keepdim=True)
    return aten._softmax.out(x, dim, False, out=out).masked_fill_(masked, 0.0)


def batch_norm_over(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Batch norm: the result, mean and deviation as saved for the backward, and the new running statistics."""
    new_mean, new_var = running_mean.clone(), running_var.clone()
    saved = [(x if weight is None else weight).new_empty(x.shape[1] if training else 0) for _ in range(2)]
    aten._native_batch_norm_legit.out(
        x, weight, bias, new_mean, new_var, training, momentum, eps, out=out, save_mean=saved[0], save_invstd=saved[1]
    )
    return out, *saved, new_mean, new_var
