"""Names that random programs use: custom functions of autograd that do what such functions may, and small helpers."""

# ruff: noqa: D102, D103, F401  # programs import all of it; forward and backward are autograd's

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.utils.checkpoint import checkpoint


def part(t: Tensor) -> Tensor:
    """A tensor's share of the loss."""
    t = t.abs() if t.is_complex() else t
    return t.float().square().sum() * (0.1 / max(1, t.numel()))


def image(t: Tensor) -> Tensor:
    """Two channels of four by four numbers of a tensor."""
    return F.pad(t.flatten(), (0, max(0, 32 - t.numel())))[:32].view(1, 2, 4, 4)


def kernel(t: Tensor, *shape: int) -> Tensor:
    """Numbers of a tensor as a square filter."""
    shape = (*shape, shape[-1])
    return t.flatten().repeat(64)[: torch.Size(shape).numel()].view(shape)


def eye(t: Tensor) -> Tensor:
    return torch.eye(t.shape[-1], dtype=t.dtype)


def eye3(t: Tensor) -> Tensor:
    return torch.cat([eye(t), 2 * eye(t), 3 * eye(t)])


def matmul_in(dtype: str, a: Tensor, b: Tensor) -> Tensor:
    """A product under autocast."""
    with torch.autocast("cpu", getattr(torch, dtype), cache_enabled=False):
        return a @ b


def gru(t: Tensor, p: Tensor) -> Tensor:
    """Three steps of a cell with weights that are numbers of a parameter."""
    weight = p.flatten().repeat(32)
    h = t.new_zeros(t.shape[0], 2)
    for _ in range(3):
        h = torch.gru_cell(t[:, :1], h, weight[:6].view(6, 1), weight[6:18].view(6, 2))
    return h


def lstm(t: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    weight = p.flatten().repeat(32)
    state = t.new_zeros(t.shape[0], 2), t.new_zeros(t.shape[0], 2)
    for _ in range(2):
        state = torch.lstm_cell(t[:, :1], state, weight[:8].view(8, 1), weight[8:24].view(8, 2))
    return state


class Scaled(torch.autograd.Function):
    """Takes an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return a * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Doubled(torch.autograd.Function):
    """Writes over its argument."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Writing(torch.autograd.Function):
    """Writes over one of two arguments, and saves both."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a.add_(b)
        ctx.mark_dirty(a)
        ctx.save_for_backward(b)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (b,) = ctx.saved_tensors
        return grad, (grad * b.cos()).sum_to_size(b.shape)


class Parted(torch.autograd.Function):
    """Gives two results."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        s = a.sin()
        ctx.save_for_backward(a, s)
        return s, a.cos()

    @staticmethod
    def backward(ctx: Any, grad_s: Tensor, grad_c: Tensor) -> Tensor:
        a, s = ctx.saved_tensors
        return grad_s * a.cos() - grad_c * s


class WithIndex(torch.autograd.Function):
    """Gives a result without a gradient beside one with; undefined gradients stay undefined."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        values, where = a.sort(-1)
        ctx.save_for_backward(where)
        ctx.mark_non_differentiable(where)
        ctx.set_materialize_grads(False)
        return values, where

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Tensor | None:
        (where,) = ctx.saved_tensors
        return None if grad is None else torch.zeros_like(grad).scatter_(-1, where, grad)


class Product(torch.autograd.Function):
    """Asks which gradients are needed."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = (grad * b).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        return grad_a, (grad * a).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None


class Passed(torch.autograd.Function):
    """Gives back its argument."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class Viewed(torch.autograd.Function):
    """Gives back a view of its argument."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.shape = a.shape
        return a.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.reshape(ctx.shape) * 2


class Straight(torch.autograd.Function):
    """Gives the gradient of another function than the one it computes."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.round()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


class OnlyFirst(torch.autograd.Function):
    """Gives no gradient of the second argument."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(b)
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (b,) = ctx.saved_tensors
        return (grad + b.mean() * 0).sum_to_size(grad.shape), None


class Counted(torch.autograd.Function):
    """Writes to a buffer without a mark."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, buffer: Tensor) -> Tensor:
        buffer.add_(1)
        return a * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 1.5, None


class Recomputed(torch.autograd.Function):
    """Computes its forward again in the backward, with gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(a, p)
        return (a * p).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, p = ctx.saved_tensors
        inner = (1 - (a * p).tanh().square()) * grad
        return (inner * p).sum_to_size(a.shape), (inner * a).sum_to_size(p.shape)


class Clipped(torch.autograd.Function):
    """Writes over the gradient that it is given, a copy of it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[..., :1] *= 0.5
        return grad.mul_(2)


class Tripled(torch.autograd.Function):
    """Has three times its gradient, also within ``torch.func``."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return a.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return grad * a.cos() * 3


class Rounded(torch.autograd.Function):
    """Has a backward and a ``jvp``."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return a.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 0.5


@torch.library.custom_op("checkmate_hunt::double", mutates_args=())
def custom_double(a: Tensor) -> Tensor:
    """An op of our own with a formula."""
    return a * 2


@custom_double.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


custom_double.register_autograd(lambda ctx, grad: grad * 2)
