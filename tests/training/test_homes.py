"""Whole steps whose parameters, states and sums are at home in a file: plain PyTorch's numbers in the planned bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.host import home_of
from checkmate.units import parse_bytes
from tests.support.sampling import long, slow
from tests.support.whole_steps import TrainedWhole, assert_as_plain, itself, plain_step, training

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = "9 MB"
WIDTH = 512  # a matrix of it takes 1 MiB, the least that has a home
X, Y = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10


class Net(nn.Module):
    """A frozen layer with a small trained one beside it, one that is used twice, and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.tied, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        h = F.gelu(self.frozen(x) + self.up(self.down(x)))
        h = self.norm(self.tied(F.dropout(self.tied(h), 0.1)))
        for layer in self.layers:
            h = F.gelu(layer(h))
        return F.cross_entropy(self.head(h), y) * factor


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-4, centered=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, fused=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.1},
    "sums": {"accumulate": 3},
    "clipped sums": {"accumulate": 2, "clip_norm": 0.1},
    "scaled sums": {"accumulate": 2, "clip_norm": 0.1, "scaler": True},
}


def _optimizer(model: nn.Module, name: str = "AdamW") -> optim.Optimizer:
    return OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def _homes(model: nn.Module, optimizer: optim.Optimizer) -> list[str]:
    """Where the large parameters, states and sums are."""
    states = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    held = [*model.parameters(), *states, *(p.grad for p in model.parameters() if p.grad is not None)]
    return ["in memory" if home_of(t) is None else "in a file" for t in held if t.nbytes >= 2**20]


CASES = [("AdamW", "plain"), ("AdamW", "clipped sums"), ("SGD", "sums"), ("RMSprop", "scaled sums")]
REST = [(n, w) for n in OPTIMIZERS for w in WAYS if (n, w) not in CASES and ("fused" not in n or "scaled" not in w)]


@pytest.mark.parametrize(("name", "way"), [*CASES[:2], *(slow(*case) for case in CASES[2:]), *(long(*c) for c in REST)])
def test_same_numbers_within_the_bytes(name: str, way: str, tmp_path: Path) -> None:
    """Six steps at a budget that is half of what parameters, states and sums take; each peak is within its plan's."""
    options, homes = dict(WAYS[way]), list[list[str]]()
    if options.pop("scaler", False):
        options["scaler"] = lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def batch(i: int) -> tuple[Tensor, ...]:
        return X, Y, torch.tensor(float("inf") if "scaler" in options and i == 3 else 1.0)

    def train(make: Callable[..., Any]) -> TrainedWhole:
        new = (lambda: checkmate.in_file(Net(), tmp_path)) if make is not plain_step else Net
        seen = lambda model, optimizer: homes.append(_homes(model, optimizer))  # noqa: E731
        how = {"loss": itself, "batch": batch, "steps": 6, "look": seen, **options}
        return training(new, lambda model: _optimizer(model, name), **how)(make)

    step, found = assert_as_plain(train, budget=BUDGET, host=f"file:{tmp_path}", host_budget="100 MB")
    assert len(homes[0]) >= 4
    assert [{*where} for where in homes] == [{"in a file"}, {"in memory"}]
    firsts = 1 + options.get("accumulate", 1)  # steps in which small states and sums come to be
    assert all(plan.peak <= parse_bytes(BUDGET) and plan.problem.homes for plan in step.plans)
    most = max(plan.peak - plan.problem.resident for plan in step.plans)
    assert max(found.peaks[firsts:]) <= most
