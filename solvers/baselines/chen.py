"""Checkpoints along the forward: every k-th candidate, or one wherever enough bytes have come together.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for chains; candidates of general graphs as in Jain
et al., "Checkmate", MLSys 2020. Of what the forward makes, the checkpoints and all that comes after the last of them
reach the backward (the backward begins there); the backward makes the other values again, segment by segment.

    chen-*        a candidate is every op of a chain; where the forward is none, the method does not apply and says so
    ap-*          articulation points of the forward
    linearized-*  every op of the forward, in the order in which it runs

*-sqrt keeps candidates k - 1, 2k - 1, … with k = ⌊√candidates⌋: one schedule, whatever the budget. It recomputes even
where everything would fit, and finds nothing where its peak exceeds the budget. *-greedy adds up bytes since the last
checkpoint and keeps the candidate at which they exceed b; it tries many b, and takes the cheapest schedule that fits.
With b = ∞ it keeps everything.

We differ from the papers in that what is kept is turned into a schedule by simulation, not by a formula, and in that
an op is kept with all its outputs, so that the indices of a max-pool come with the values.

Papers: https://arxiv.org/abs/1604.06174 and https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isqrt

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.baselines.checkpoint_places import CANDIDATES, droppable
from checkmate.solvers.baselines.sweep import cheapest, does_not_apply
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import kept_by_the_forward
from checkmate.solvers.common.task import Task

PREFIX = {"chain": "chen"}  # of a method's name, where it is not that of its candidates
TRIES = 64  # values of b that are simulated
MOST_SELECTIONS = 4096  # values of b that are thought of


def sqrt(kind: str) -> Callable[[Task, Incumbent], Remarks]:
    """The method that keeps every ⌊√n⌋-th of n candidates. No plan where it does not apply, or does not fit.

    Args:
        kind: of candidates, in `checkmate.solvers.baselines.checkpoint_places.CANDIDATES`.

    >>> from checkmate import solve
    >>> deps = [[], [0], [1], [2], [3], [2, 4], [1, 5], [0, 6]]
    >>> chain = Problem.from_dag(deps, seconds=[1] * 8, sizes=[1] * 8, forward=5)
    >>> solve(chain, 4, method="chen-sqrt").cost, solve(chain, 3, method="chen-sqrt").status
    (10.0, Status.NOT_FOUND)
    """
    prefix = PREFIX.get(kind, kind)

    def run(task: Task, incumbent: Incumbent) -> Remarks:
        problem = task.problem
        if kind == "chain" and (no := does_not_apply(task, "ap-sqrt and linearized-sqrt")):
            return no
        candidates = CANDIDATES[kind](problem)
        checkpoints = every_kth(candidates)
        runs = kept_by_the_forward(problem, kept(problem, checkpoints))
        sweep = cheapest(task, incumbent, f"{prefix}-sqrt", 1, lambda _: runs, tries=1)
        remedy = f", and it has no other schedule; {prefix}-greedy adapts to the budget"
        return sweep.remarks({"candidates": len(candidates), "checkpoints": len(checkpoints)}, remedy=remedy)

    return run


def greedy(kind: str) -> Callable[..., Remarks]:
    """The method that keeps a candidate where the bytes since the last exceed b, for the best b. As `sqrt` otherwise.

    Its option ``tries`` says how many b are simulated.
    """
    method = f"{PREFIX.get(kind, kind)}-greedy"

    def run(task: Task, incumbent: Incumbent, *, tries: int = TRIES) -> Remarks:
        problem = task.problem
        if kind == "chain" and (no := does_not_apply(task, "ap-greedy and linearized-greedy")):
            return no
        candidates = CANDIDATES[kind](problem)
        choices = [tuple(candidates[i] for i in chosen) for chosen in selections(_filled(problem, candidates))]

        def runs(i: int) -> np.ndarray:
            return kept_by_the_forward(problem, kept(problem, choices[i]))

        sweep = cheapest(task, incumbent, method, len(choices), runs, tries=tries)
        details = {"candidates": len(candidates), "selections": len(choices)}
        if sweep.best is not None:
            details["checkpoints"] = len(choices[sweep.best])
        return sweep.remarks(details)

    return run


def every_kth(candidates: Sequence[int]) -> tuple[int, ...]:
    """Candidates k - 1, 2k - 1, … with k = ⌊√n⌋.

    >>> every_kth(range(10))
    (2, 5, 8)
    """
    k = max(1, isqrt(len(candidates)))
    return tuple(candidates[k - 1 :: k])


def by_bytes(filled: Sequence[int], b: float) -> tuple[tuple[int, ...], int]:
    """The candidates, by their place, at which the bytes since the one kept before exceed b.

    ``filled[i]`` are the bytes that the forward makes and may drop, from its start up to and with candidate i. Also the
    smallest sum that made a checkpoint, 0 where none did: from b up to just below it the checkpoints are the same.

    >>> by_bytes([4, 8, 12, 16], 4)
    ((1, 3), 8)
    """
    chosen, before, smallest = [], 0, 0
    for i, bytes_so_far in enumerate(filled):
        since = bytes_so_far - before
        if since > b:
            chosen.append(i)
            before = bytes_so_far
            smallest = min(smallest or since, since)
    return tuple(chosen), smallest


def selections(filled: Sequence[int], most: int = MOST_SELECTIONS) -> list[tuple[int, ...]]:
    """The different choices of `by_bytes` from b = 0, which keeps all candidates, to b = ∞, which makes no checkpoint.

    All of them, unless there are more than ``most``; then those for as many b that grow by equal factors.

    >>> selections([4, 8, 12])
    [(0, 1, 2), (1,), (2,), ()]
    """
    found: list[tuple[int, ...]] = []
    b = 0
    while len(found) < most:
        chosen, smallest = by_bytes(filled, b)
        found.append(chosen)
        if not chosen:
            return found
        b = smallest
    _, smallest = by_bytes(filled, 0)
    growing = np.geomspace(smallest, filled[-1], most - 1).tolist()
    return [*dict.fromkeys([found[0], *(by_bytes(filled, b)[0] for b in growing), ()])]


def kept(problem: Problem, checkpoints: Sequence[int]) -> set[int]:
    """The values of the forward that reach the backward: of the checkpoints, and of all ops after the last."""
    graph, last = problem.graph, max(checkpoints, default=-1)
    outputs = {v for op in graph.ops[: graph.forward_length] for v in op.outputs}
    dropped = {v for k in set(range(last + 1)).difference(checkpoints) for v in graph.ops[k].outputs}
    return outputs - (dropped & droppable(problem))


def _filled(problem: Problem, candidates: Sequence[int]) -> list[int]:
    """Bytes that the forward makes and may drop, from its start up to and with each candidate."""
    values, graph = droppable(problem), problem.graph
    made = [sum(int(problem.sizes[v]) for v in op.outputs if v in values) for op in graph.ops[: graph.forward_length]]
    so_far = list(accumulate(made))
    return [so_far[k] for k in candidates]
