"""Save a minimum cut between forward and backward, in the manner of PyTorch's AOTAutograd partitioner.

Some ops of the forward are not to run again: the pinned ones, and those that a knapsack picks. Of all ways to save
values so that the backward gets what it reads while only the other ops run again, a minimum cut saves the fewest bytes
(H. He, "Min-cut optimal(*) recomputation with AOTAutograd", PyTorch developers' forum, 2022). The knapsack gets an
allowance of bytes: it picks the ops of most seconds whose outputs fit into it together, so that the cut saves at most
the allowance beyond what pinned ops force (`activation_memory_budget` in PyTorch).

Where we differ: the budget is one of bytes at the peak, not a share of what is saved, so the allowance is searched for,
each plan simulated; an op's seconds decide what is dear to run again, not a list of names; what is there before the
step begins costs nothing to save.

One cut decides what the forward keeps, and all that the backward reads first may hang on one chain of runs: a small
cut can need as much memory as keeping everything. So the peak does not always fall with the allowance.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

import networkx as nx
import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.runs import cost_of, kept_by_the_forward, peak_of
from checkmate.units import format_bytes

METHOD = "min-cut"
COARSE = 16  # allowances tried first, from everything to nothing
FINE = 6  # bisections between the largest of them that fits and the next larger one
SLOTS = 4096  # into which the knapsack divides its allowance


def min_cut(problem: Problem, budget: int, *, time_limit: float = 10.0) -> Solution:
    """The cheapest plan within the budget that saves a minimum cut, over the bytes allowed for saving.

    NOT_FOUND where none fits. The plan does not depend on the time limit where it does not bind; it takes a few
    seconds for a thousand ops.

    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> min_cut(chain, 4).cost
    5.0
    """
    began = time.perf_counter()
    search = CutSearch(problem, budget)
    _search(search, began + time_limit)
    seconds = time.perf_counter() - began
    if search.R is None:
        message = f"the cut whose plan has the least peak takes {format_bytes(search.least_peak)}"
        return Solution(Status.NOT_FOUND, problem, budget, METHOD, seconds=seconds, message=message)
    details = {"allowance": search.allowance, "saved bytes": search.saved_bytes, "cuts": search.count}
    return certify(problem, budget, search.R, method=METHOD, seconds=seconds, details=details)


class CutSearch:
    """The cheapest plan so far that fits, over allowances."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        ops = candidates(problem)
        self.sizes = problem.sizes.copy()
        self.sizes[list(problem.graph.outputs)] = 0  # held anyway
        self.seconds = {k: float(problem.seconds[k]) for k in ops}
        self.weight = {k: self._bytes(problem.graph.ops[k].outputs) for k in ops}
        self.R: np.ndarray | None = None
        self.cost = float("inf")
        self.allowance = 0  # bytes, of the best plan
        self.saved_bytes = 0  # by its cut
        self.least_peak = problem.keep_all_peak
        self.count = 0

    def fits(self, allowance: int) -> bool:
        """Whether the plan with this allowance fits; the cheapest is kept."""
        problem = self.problem
        saved = cut(problem, most_seconds(self.seconds, self.weight, allowance))
        R = kept_by_the_forward(problem, saved)
        peak, cost = peak_of(problem, R), cost_of(problem, R)
        self.count += 1
        self.least_peak = min(self.least_peak, peak)
        if peak > self.budget:
            return False
        if cost < self.cost:
            self.R, self.cost, self.allowance, self.saved_bytes = R, cost, allowance, self._bytes(saved)
        return True

    def _bytes(self, values: Collection[int]) -> int:
        return int(self.sizes[list(values)].sum())


def _search(search: CutSearch, deadline: float) -> None:
    """Allowances from everything to nothing, then bisection above the largest of them that fits."""
    most = sum(search.weight.values())
    above = low = None  # the allowances around the border: the smallest known not to fit, the largest that does
    for allowance in (most * i // COARSE for i in reversed(range(COARSE + 1))):
        if low is not None and time.perf_counter() > deadline:
            return
        fits = search.fits(allowance)
        if low is None:
            above, low = (above, allowance) if fits else (allowance, None)
    for _ in range(FINE):
        if low is None or above is None or above - low <= 1 or time.perf_counter() > deadline:
            return
        middle = (low + above) // 2
        above, low = (above, middle) if search.fits(middle) else (middle, low)


def candidates(problem: Problem) -> list[int]:
    """The ops of the forward that make what the backward reads, or lead to it, and may run again; ascending."""
    graph = problem.graph
    needed = {v for op in graph.ops[graph.forward_length :] for v in op.inputs}
    found = []
    for k in reversed(range(graph.forward_length)):
        op = graph.ops[k]
        if not needed.isdisjoint(op.outputs):
            found.append(k)
            needed.update(op.inputs)
    return [k for k in reversed(found) if graph.ops[k].pinned is None]


def most_seconds(seconds: Mapping[int, float], weight: Mapping[int, int], allowance: int) -> list[int]:
    """The knapsack: of these ops, those of the most seconds in all whose bytes fit the allowance.

    By dynamic programming, exact where the allowance is at most `SLOTS` bytes; beyond it sizes are rounded up.

    >>> most_seconds({0: 3.0, 1: 2.0, 2: 2.0}, {0: 3, 1: 2, 2: 2}, 4)
    [1, 2]
    """
    ops = [k for k in seconds if 0 < weight[k] <= allowance]
    picked = [k for k in seconds if weight[k] == 0]
    if sum(weight[k] for k in ops) <= allowance:
        return sorted(picked + ops)
    unit = -(-allowance // SLOTS) or 1
    left = allowance // unit
    best = np.zeros(left + 1)  # seconds, by slots that may be filled
    took = np.zeros((len(ops), left + 1), dtype=bool)
    for i, k in enumerate(ops):
        slots = -(-weight[k] // unit)
        with_k = best[: left + 1 - slots] + seconds[k]
        took[i, slots:] = with_k > best[slots:]
        best[slots:] = np.maximum(best[slots:], with_k)
    for i in reversed(range(len(ops))):
        if took[i, left]:
            picked.append(ops[i])
            left -= -(-weight[ops[i]] // unit)
    return sorted(picked)


def cut(problem: Problem, banned: Iterable[int]) -> list[int]:
    """The values of fewest bytes to save so that neither these ops of the forward nor pinned ones run again.

    In the network an op leads to its outputs and a value to its users, without limit; a value's two ends are joined by
    its bytes; banned ops hang on the source, values that the backward reads on the sink. Of several minimum cuts it is
    the one nearest to the backward, after which the least runs again. Results of the step are held anyway, so that
    they cost nothing.

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
