"""Results that can wait are made last, where that lowers the floor, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.solvers.backward_order import late_results
from checkmate.solvers.search.min_budget import min_budget
from tests.support.sampling import in_turn


def _random_step(seed: int) -> Graph:
    """A chain of layers with a weight gradient in front of each gradient that is passed on, of any sizes."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 5))
    values = [Value(f"x{k}", int(rng.integers(1, 400)), k) for k in range(layers)]
    ops = [Op(f"layer{k}", "f", (k - 1,) if k else (), (k,)) for k in range(layers)]
    grad = layers - 1
    weights = []
    for x in reversed(range(layers)):
        for name, size in (("weight", int(rng.integers(1, 400))), ("grad", values[x].size_bytes)):
            ops.append(Op(f"{name}{x}", "f", tuple(sorted({x, grad})), (len(values),), "backward"))
            values.append(Value(f"d{name}{x}", size, len(ops) - 1))
        weights.append(len(values) - 2)
        grad = len(values) - 1
    return Graph(tuple(ops), tuple(values), (*weights, grad))


def _smallest(graph: Graph) -> int:
    T = len(graph.ops)
    found = min_budget(Problem(graph, Profile(np.ones(T), np.zeros(T))))
    assert found.proven
    return found.peak


def _floor(graph: Graph) -> int:
    T = len(graph.ops)
    return int(Problem(graph, Profile(np.ones(T), np.zeros(T))).unavoidable_bytes.max())


def test_an_order_that_is_taken_has_a_lower_smallest_budget() -> None:
    taken = 0
    for seed in range(60):
        graph = _random_step(seed)
        if (order := late_results(graph)) is not None:
            taken += 1
            assert sorted(order) == list(range(len(graph.ops)))
            assert _smallest(graph.in_order(order)) < 0.99 * _smallest(graph)
    assert 5 < taken < 60


def test_what_stands_before_an_op_that_must_run_once_stays() -> None:
    graph = next(graph for graph in map(_random_step, range(60)) if late_results(graph) is not None)
    last = replace(graph.ops[-1], pinned="overwrites a buffer")
    assert late_results(replace(graph, ops=(*graph.ops[:-1], last))) is None


@in_turn(seed=range(5))
def test_an_order_can_be_undone(seed: int) -> None:
    graph = _random_step(seed)
    swapped = [*range(len(graph.ops) - 2), len(graph.ops) - 1, len(graph.ops) - 2]
    assert graph.in_order(swapped).in_order(swapped) == graph
