"""Reorder a step's backward: large gradients that nothing reads are made last, where they keep the smallest budget up.

A gradient that nothing reads stays from the moment it is made. Where it is larger than what it is made of, it is better
made at the end: the gradient of a fully connected layer's weight behind a convolutional network has hundreds
of megabytes, and is made first. No sum changes by that, as each op computes what it did.

At budgets at which PyTorch's order has plans another one is worth little, so that order stays unless the other one has
a plan below what every plan in PyTorch's needs.
"""

from __future__ import annotations

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem, Profile
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.search.eviction import Stuck, run_pass
from checkmate.solvers.search.next_use import GRID

WORTH = 0.01  # of the smallest budget: what another order must save


def late_results(graph: Graph) -> list[int] | None:
    """The order of a step's ops in which its smallest budget is lower; None where it is none, or hardly.

    Nothing but the bytes of values counts, so that the answer is the same wherever and whenever a step is captured.

    Args:
        graph: of the step.

    >>> from checkmate.core.graph import Op, Value
    >>> forward = Op("a", "f", (), (0,)), Op("b", "f", (0,), (1,))
    >>> backward = Op("db", "f", (1,), (2,), "backward"), Op("c", "f", (0, 1), (3,), "backward")
    >>> sizes = [10, 10, 50, 80]
    >>> graph = Graph(forward + backward, tuple(Value(f"v{k}", n, k) for k, n in enumerate(sizes)), (2,))
    >>> late_results(graph)
    [0, 1, 3, 2]
    """
    order = _with_results_late(graph)
    if order == sorted(order):
        return None
    least = _lowest(graph)
    later = graph.in_order(order)
    if _lowest(later) > (1 - WORTH) * least:
        return None
    stages = run_pass(Tables.of(_bare(later)), int((1 - WORTH) * least), GRID[0])
    return None if isinstance(stages, Stuck) else order


def _with_results_late(graph: Graph) -> list[int]:
    """All ops; those last whose results nobody reads and are larger than what must wait with them.

    What must run once may write to what others read: ops before the last such one stay where they are.
    """
    results = set(graph.outputs)
    late: list[int] = []
    begin = max([graph.forward_length, *(k + 1 for k, op in enumerate(graph.ops) if op.pinned)])
    for k, op in enumerate(graph.ops[begin:], begin):
        unread = all(v in results and not graph.users[v] for v in op.outputs)
        made = sum(graph.values[v].size_bytes for v in op.outputs)
        read = [graph.values[v] for v in op.inputs if v not in results]
        if unread and made > sum(value.size_bytes for value in read if value.producer is not None):
            late.append(k)
    waiting = set(late)
    return [k for k in range(len(graph.ops)) if k not in waiting] + late


def _bare(graph: Graph) -> Problem:
    T = len(graph.ops)
    return Problem(graph, Profile(np.ones(T), np.zeros(T, dtype=np.int64)))


def _lowest(graph: Graph) -> int:
    """Bytes beyond the resident ones that every plan needs."""
    return int(_bare(graph).unavoidable_bytes.max())
