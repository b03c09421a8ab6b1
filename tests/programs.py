"""Random PyTorch programs: branches, joins, views, in-place, multi-output, integer and random ops, dead code."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 16, 12
State = list[Tensor]  # tensors of shape (ROWS, WIDTH)


class Program(nn.Module):
    """A fixed random sequence of ops over a growing list of tensors; the loss reads the last few."""

    def __init__(self, seed: int, length: int = 14) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.weights = nn.ParameterList([nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)) for _ in range(3)])
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(2)])
        self.register_buffer("calls", torch.zeros(()))
        self.steps = [(rng.choice(OPS), rng.randrange(10**6), rng.randrange(10**6)) for _ in range(length)]

    def forward(self, x: Tensor) -> Tensor:
        made = [x, x @ self.weights[0]]
        for op, i, j in self.steps:
            made.append(op(self, made, made[i % len(made)], made[j % len(made)], i))
        made[2].cos()  # dead code
        return sum((t * t).mean() for t in made[-3:]) + made[1].mean()


def _matmul(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return a @ program.weights[i % 3]


def _join(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return torch.tanh(a) * b + a


def _in_place(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return (a + 0.5).add_(b).relu_()


def _dropout(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return F.dropout(a.exp().clamp(max=3.0), 0.1 + 0.1 * (i % 5), program.training)


def _noise(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return a + 0.1 * torch.rand_like(a) * torch.sigmoid(b)


def _batch_norm(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return program.norms[i % 2](a)


def _views(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    left, right = (a + b).t().contiguous().t().chunk(2, dim=1)
    return torch.cat([right, left.flip(1)], dim=1).view(ROWS, 3, 4).transpose(1, 2).reshape(ROWS, WIDTH)


def _sorted(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    values, indices = a.sort(dim=1)
    return values + b.gather(1, indices)


def _integers(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return program.table(a.argmax(dim=1)) * torch.softmax(b, dim=1)


def _masked(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return torch.where(a > b, a, 0.5 * b).masked_fill(b > 2, 0.0)


def _buffer(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    if program.training:
        program.calls += a.detach().mean()
    return a * 1.1


def _layer_norm(program: Program, made: State, a: Tensor, b: Tensor, i: int) -> Tensor:
    return F.layer_norm(a, (WIDTH,)) + F.gelu(b)


OPS: tuple[Callable[..., Any], ...] = (
    _matmul,
    _join,
    _in_place,
    _dropout,
    _noise,
    _batch_norm,
    _views,
    _sorted,
    _integers,
    _masked,
    _buffer,
    _layer_norm,
)
