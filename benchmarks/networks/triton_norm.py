"""A norm by the root of the mean of squares, forward and backward each one kernel of Triton's, as Liger's are."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

PROGRAMS = 64  # of the backward, each of which sums the gradient of the weight over its rows


@triton.jit
def norm(x, weight, y, scale, rows, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(values * values) / width + eps)
    tl.store(scale + row, by)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + columns, values * by * weights, mask=inside)


@triton.jit
def norm_backward(grad, x, weight, scale, dx, dweight, rows, width, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, PROGRAMS):
        at = row * width + columns
        by = tl.load(scale + row)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * by
        incoming = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += incoming * normed
        weighted = incoming * weights
        tl.store(dx + at, by * (weighted - normed * tl.sum(normed * weighted) / width), mask=inside)
    tl.store(dweight + program * width + columns, total, mask=inside)


class Norm(torch.autograd.Function):
    """Launches the two kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, block: int) -> Tensor:
        """Give x / sqrt(mean(x²) + eps) · weight, (..., width)."""
        width, x = x.shape[-1], x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // width
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        norm[(rows,)](x, weight, y, scale, rows, width, eps, BLOCK=block)
        ctx.save_for_backward(x, weight, scale)
        ctx.block = block
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of x and of the weight."""
        x, weight, scale = ctx.saved_tensors
        width, grad = x.shape[-1], grad.contiguous()
        dx = torch.empty_like(x)
        dweight = torch.empty((PROGRAMS, width), dtype=torch.float32, device=x.device)
        rows = x.numel() // width
        norm_backward[(PROGRAMS,)](grad, x, weight, scale, dx, dweight, rows, width, PROGRAMS=PROGRAMS, BLOCK=ctx.block)
        return dx, dweight.sum(0).to(weight.dtype), None, None


class TritonRMSNorm(nn.Module):
    """Takes the place of `nn.RMSNorm`."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.block = eps, triton.next_power_of_2(width)

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight, self.eps, self.block)
