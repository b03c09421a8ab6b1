"""Random numbers are drawn once and never again, however often what they go into runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.sampling import slow
from tests.stepping import assert_same, train

BATCH, TOKENS, WIDTH = 4, 16, 32


class Block(nn.Module):
    """A layer with a dropout of one kind."""

    def __init__(self, drop: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.drop(F.gelu(self.wide(x)), self.training))


def _attention(x: Tensor, training: bool) -> Tensor:
    q = x.view(BATCH, TOKENS, 4, -1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q, q * 2, dropout_p=0.2 if training else 0.0)
    return mixed.transpose(1, 2).reshape(x.shape)


def _masked_attention(x: Tensor, training: bool) -> Tensor:
    q = x.view(BATCH, TOKENS, 4, -1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if training else 0.0, is_causal=True)
    return mixed.transpose(1, 2).reshape(x.shape)


DROPS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout": lambda x, training: F.dropout(x, 0.1, training),
    "in place": lambda x, training: F.dropout(x * 2, 0.3, training, inplace=True),
    "alpha": lambda x, training: F.alpha_dropout(x, 0.2, training),
    "channels": lambda x, training: F.dropout1d(x, 0.2, training),
    "attention": _attention,
    "causal attention": _masked_attention,
    "noise": lambda x, training: x + 0.1 * torch.randn_like(x) * torch.sigmoid(x),
}
QUICK = {"dropout", "attention"}


def _network(drop: Callable[[Tensor, bool], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(drop) for _ in range(3)))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["dropout", "attention", *(slow(name) for name in sorted({*DROPS} - QUICK))])
def test_replays_at_the_tightest_budget(name: str) -> None:
    """Several steps: the random state goes on as in plain PyTorch from each to the next."""
    net, twin = _network(DROPS[name]), _network(DROPS[name])
    x = torch.randn(BATCH, TOKENS, WIDTH)
    step = lambda x: net(x).square().mean()  # noqa: E731
    budget = checkmate.trace(step, x).min_budget(time_limit=1).peak
    compiled = checkmate.compile(step, budget=budget, time_limit=1)
    found = train(net, compiled, (x,))
    (plan,) = compiled.plans
    assert_same(found, train(twin, lambda x: twin(x).square().mean(), (x,)))
    assert plan.schedule is not None
    assert plan.plan is not None
    assert plan.schedule.recomputed.sum() > 0  # it is tight
    drawing = [k for k, op in enumerate(plan.problem.graph.ops) if op.pinned == "draws random numbers"]
    assert len(drawing) == 3
    assert all(plan.plan.runs.count(k) == 1 for k in drawing)
    assert max(found.peaks) + plan.problem.resident == plan.peak <= budget
