"""Save a minimum cut between forward and backward, in the manner of PyTorch's AOTAutograd partitioner.

Some ops of the forward are not to run again: the pinned ones, and those that a knapsack picks. Of all ways to save
values so that the backward gets what it reads while only the other ops run again, a minimum cut saves the fewest bytes
(H. He, "Min-cut optimal(*) recomputation with AOTAutograd", PyTorch developers' forum, 2022). The knapsack gets an
allowance of bytes: it picks the ops of most seconds whose outputs fit into it together, so that the cut saves at most
the allowance beyond what pinned ops force (`activation_memory_budget` in PyTorch).

Where we differ: the budget is one of bytes at the peak, not a share of what is saved, so the allowance is searched for,
each plan simulated; an op's seconds decide what is dear to run again, not a list of names; inputs of the step are free.

One cut decides what the forward keeps, and all that the backward reads first may hang on one chain of runs: a small
cut can need as much memory as keeping everything. So the peak does not always fall with the allowance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import networkx as nx
import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import kept_by_the_forward, ops_for
from checkmate.units import format_bytes

METHOD = "min-cut"
COARSE = 16  # allowances tried first, from everything to nothing
FINE = 6  # bisections between the largest of them that fits and the next larger one
SLOTS = 4096  # into which the knapsack divides its allowance


def min_cut(task: Task, incumbent: Incumbent) -> Remarks:
    """The cheapest plan within the budget that saves a minimum cut, over several allowances of saved bytes.

    No plan where none fits. A time limit that does not bind changes no plan; a thousand ops take a few seconds.

    >>> from checkmate import solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> solve(chain, 4, method="min-cut").cost
    5.0
    """
    problem, clock, details = task.problem, task.clock, {"cuts": 0}
    ops, sizes = savable(problem), problem.sizes.copy()
    sizes[list(problem.graph.outputs)] = 0  # held anyway
    seconds = {k: float(problem.seconds[k]) for k in ops}
    weight = {k: int(sizes[list(problem.graph.ops[k].outputs)].sum()) for k in ops}

    def fits(allowance: int) -> bool:
        """Offer the plan for this allowance; tell whether it fits."""
        saved = cut(problem, most_seconds(seconds, weight, allowance))
        R = kept_by_the_forward(problem, saved)
        details["cuts"] += 1
        if not incumbent.fits(R):
            return False
        if incumbent.offer(R, METHOD):
            details.update({"allowance": allowance, "saved bytes": int(sizes[saved].sum())})
        return True

    # allowances from everything to nothing; low is the largest that fits, above the smallest known not to
    most, above, low = sum(weight.values()), None, None
    for allowance in (most * i // COARSE for i in reversed(range(COARSE + 1))):
        if low is None or not clock.is_over:
            fitting = fits(allowance)
            if low is None:
                above, low = (above, allowance) if fitting else (allowance, None)
    # then bisection between these two
    for _ in range(FINE):
        if low is None or above is None or above - low <= 1 or clock.is_over:
            break
        middle = (low + above) // 2
        above, low = (above, middle) if fits(middle) else (middle, low)
    if incumbent.R is not None:
        return Remarks(details=details)
    return Remarks(f"the cut whose plan has the least peak takes {format_bytes(incumbent.least_peak or 0)}")


def savable(problem: Problem) -> list[int]:
    """Forward ops that make, or lead to, values that the backward reads, and that may run again; ascending."""
    graph = problem.graph
    needed = {v for op in graph.ops[graph.forward_length :] for v in op.inputs}
    return [k for k in ops_for(graph, range(graph.forward_length), needed) if graph.ops[k].pinned is None]


def most_seconds(seconds: Mapping[int, float], weight: Mapping[int, int], allowance: int) -> list[int]:
    """The knapsack: a subset of these ops with the most seconds whose bytes fit the allowance.

    By dynamic programming, exact where the allowance is at most `SLOTS` bytes; beyond it sizes are rounded up.

    >>> most_seconds({0: 3.0, 1: 2.0, 2: 2.0}, {0: 3, 1: 2, 2: 2}, 4)
    [1, 2]
    """
    ops = [k for k in seconds if 0 < weight[k] <= allowance]
    picked = [k for k in seconds if weight[k] == 0]
    if sum(weight[k] for k in ops) <= allowance:
        return sorted(picked + ops)
    unit = -(-allowance // SLOTS) or 1
    room = allowance // unit
    best = np.zeros(room + 1)  # seconds, by slots that may be filled
    took = np.zeros((len(ops), room + 1), dtype=bool)
    for i, k in enumerate(ops):
        slots = -(-weight[k] // unit)
        with_k = best[: room + 1 - slots] + seconds[k]
        took[i, slots:] = with_k > best[slots:]
        best[slots:] = np.maximum(best[slots:], with_k)
    for i in reversed(range(len(ops))):
        if took[i, room]:
            picked.append(ops[i])
            room -= -(-weight[ops[i]] // unit)
    return sorted(picked)


def cut(problem: Problem, banned: Iterable[int]) -> list[int]:
    """The values of fewest bytes to save so that neither these ops nor pinned ones run again.

    In the network an op leads to its outputs and a value to its users, without limit; a value's two ends are joined by
    its bytes; banned ops hang on the source, values that the backward reads on the sink. Of several minimum cuts it is
    the one nearest to the backward, after which the least runs again. Results are held anyway, and cost nothing.

    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[9, 2, 5, 1, 1], forward=3)
    >>> cut(chain, [0, 1]), cut(chain, [])
    ([0, 1], [])
    """
    graph, forward = problem.graph, problem.graph.forward_length
    network = nx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    stays = {k for k, op in enumerate(graph.ops[:forward]) if op.pinned is not None}.union(banned)
    network.add_edges_from(("source", ("op", k)) for k in sorted(stays))
    results = set(graph.outputs)
    for k, op in enumerate(graph.ops[:forward]):
        for v in op.outputs:
            network.add_edge(("op", k), ("made", v))
            network.add_edge(("made", v), ("at hand", v), capacity=0 if v in results else graph.values[v].size_bytes)
            network.add_edges_from((("at hand", v), ("op", j)) for j in graph.users[v] if j < forward)
            if graph.users[v] and graph.users[v][-1] >= forward:
                network.add_edge(("at hand", v), "sink")
    _, (before, after) = nx.minimum_cut(network, "source", "sink")
    values = (v for op in graph.ops[:forward] for v in op.outputs)
    return sorted(v for v in values if ("made", v) in before and ("at hand", v) in after)
