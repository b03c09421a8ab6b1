"""Plans that run ops again in another order than PyTorch's, as modules: with the bits and bytes that are promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.simulator import lower_runs
from checkmate.core.solution import Solution
from checkmate.solvers import plan_cache
from checkmate.solvers.common.incumbent import certify


class Branches(nn.Module):
    """Layers of branches that read the same and do not know of each other, side by side again after each layer."""

    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU())
                for _ in range(2)
            )
            for _ in range(layers)
        )
        self.last = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for branches in self.layers:
            x = torch.cat([branch(x) for branch in branches], 1)
        return self.last(x.mean((2, 3)))


def late_first(graph: Graph, ops: list[int]) -> list[int]:
    """These ops in another order that can be: each right after what it reads, those of the last ones first."""
    order: list[int] = []

    def visit(k: int) -> None:
        if k in ops and k not in order:
            for d in reversed(graph.deps[k]):
                visit(d)
            order.append(k)

    for k in reversed(ops):
        visit(k)
    return order


def test_ops_that_run_again_in_another_order_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Solution] = []

    def begin(problem: Problem, budget: int, **options: object) -> tuple[Solution, None]:
        graph = problem.graph
        first = graph.forward_length
        free = [k for k, op in enumerate(graph.ops[:first]) if op.pinned is None]
        again = late_first(graph, free)
        assert again != free
        before = {first: again + free, first + 1: again}
        stages = [[*before.get(t, ()), t] for t in range(len(graph.ops))]
        plans.append(certify(problem, budget, lower_runs(problem, stages), method="auto"))
        return plans[-1], None

    monkeypatch.setattr(plan_cache, "begin", begin)
    torch.manual_seed(0)
    network, x, y = Branches(), torch.randn(4, 16, 12, 12), torch.randint(0, 10, (4,))
    report = checkmate.verify(lambda x, y: nn.functional.cross_entropy(network(x), y), x, y, budget="1 GB")
    (found,) = plans
    assert found.plan is not None
    assert not found.plan.is_a_schedule
    assert report.measured_peak == report.predicted_peak
