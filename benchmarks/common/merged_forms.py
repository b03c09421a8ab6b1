"""A residual network of 50 layers, its norms and activations written in several ways, plainly and merged by hand.

Two activations: swish, x times its sigmoid, and a leaky ReLU right after batch normalization, as in in-place activated
batch normalization (Rota Bulò, Porzi and Kontschieder, CVPR 2018), whose merged function is written here from the
paper: it keeps its result alone, and gets its input back from that. Norms go by the statistics of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOPE = 0.01  # of the leaky ReLU below zero
BLOCKS = (3, 4, 6, 3)
aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """One way to write an activation: after a norm, together with it, and after the sum of two branches."""

    after_norm: Callable[[nn.BatchNorm2d, Tensor], Tensor]
    after_sum: Callable[[Tensor], Tensor]


class MergedSwish(torch.autograd.Function):
    """Keeps its input alone; the sigmoid is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """``x * torch.sigmoid(x)``, whose second product is not kept."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """By the formula, as ops of PyTorch."""
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return gradient * (sigmoid * (1 + x * (1 - sigmoid)))


class FusedSwish(MergedSwish):
    """The same, its backward in one kernel."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """By the kernel of ``F.silu``."""
        (x,) = ctx.saved_tensors
        return aten.silu_backward(gradient, x)


class RecomputedNorm(torch.autograd.Function):
    """A norm and a leaky ReLU that keep what came in; the norm is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """The activation of the norm."""
        y, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.eps = eps
        return F.leaky_relu(y, SLOPE)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """By the kernels of PyTorch, in its order."""
        x, weight, bias, mean, scale = ctx.saved_tensors
        y, _, _ = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, ctx.eps)
        gradient = aten.leaky_relu_backward(gradient, y, SLOPE, False)
        del y
        how: tuple[Any, ...] = (True, ctx.eps, [True, True, True])
        return *aten.native_batch_norm_backward(gradient, x, weight, None, None, mean, scale, *how), None


class InvertedNorm(torch.autograd.Function):
    """A norm and a leaky ReLU that keep what goes out, from which what came in is got back, within rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """The activation of the norm."""
        y, _, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        result = F.leaky_relu(y, SLOPE)
        ctx.save_for_backward(result, weight, bias, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The norm's, of its standardized input, whose mean is 0 and whose deviation is 1."""
        result, weight, bias, scale = ctx.saved_tensors
        gradient = aten.leaky_relu_backward(gradient, result, SLOPE, True)
        standard = F.leaky_relu(result, 1 / SLOPE).sub(bias.view(1, -1, 1, 1)).div(weight.view(1, -1, 1, 1))
        mean, deviation = torch.zeros_like(scale), torch.ones_like(scale)
        by: tuple[Any, ...] = (None, None, mean, deviation, True, 0.0, [True, True, True])
        return *aten.native_batch_norm_backward(gradient, standard, weight * scale, *by), None


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _elementwise(activation: Callable[[Tensor], Tensor]) -> Form:
    return Form(lambda norm, x: activation(norm(x)), activation)


def _merged(function: type[torch.autograd.Function]) -> Form:
    """A norm merged with its activation; where there is none, the activation writes over the sum."""
    in_place = partial(F.leaky_relu, negative_slope=SLOPE, inplace=True)
    return Form(lambda norm, x: function.apply(x, norm.weight, norm.bias, norm.eps), in_place)


FORMS: dict[str, dict[str, Form]] = {  # by activation, the plain one first
    "swish": {
        "plain": _elementwise(_swish),
        "by hand": _elementwise(MergedSwish.apply),
        "by hand, one kernel": _elementwise(FusedSwish.apply),
    },
    "norm and leaky ReLU": {
        "plain": _elementwise(partial(F.leaky_relu, negative_slope=SLOPE)),
        "plain, inplace=True": _elementwise(partial(F.leaky_relu, negative_slope=SLOPE, inplace=True)),
        "by hand, recomputing": _merged(RecomputedNorm),
        "by hand, inverting": _merged(InvertedNorm),
    },
}


class _Unit(nn.Module):
    """A convolution and a norm, with an activation or without."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, form: Form | None) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(after, track_running_stats=False)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        return self.norm(x) if self.form is None else self.form.after_norm(self.norm, x)


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int, form: Form) -> None:
        super().__init__()
        after = 4 * width
        units = (
            _Unit(before, width, 1, 1, form),
            _Unit(width, width, 3, stride, form),
            _Unit(width, after, 1, 1, None),
        )
        self.branch = nn.Sequential(*units)
        self.shortcut = nn.Identity() if before == after else _Unit(before, after, 1, stride, None)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form.after_sum(self.branch(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """The residual network of 50 layers, its activations written in one of the forms."""

    def __init__(self, form: Form, base: int = 64, classes: int = 1000) -> None:
        super().__init__()
        parts: list[nn.Module] = [_Unit(3, base, 7, 2, form), nn.MaxPool2d(3, 2, 1)]
        before = base
        for stage, count in enumerate(BLOCKS):
            for i in range(count):
                parts.append(_Bottleneck(before, base << stage, 2 if stage and i == 0 else 1, form))
                before = 4 * base << stage
        self.parts = nn.Sequential(*parts)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.head(F.adaptive_avg_pool2d(self.parts(x), 1).flatten(1))
