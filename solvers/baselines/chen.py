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

Two yardsticks choose nothing. "checkpoint-all" keeps everything: each op runs once, each value stays until its last
use, which is what PyTorch does by itself. "last-node" keeps only what the op before made and makes everything else
again, the most recomputation there is: the step of a chain, n ops, runs some n² / 8 of them, and with residual
connections gradients run again too, up to n² / 2. It is not the least memory either: what an op misses is made again as
a whole, and on branches that can be more than was let go. A chain of 3,401 ops, with 1.4 million runs, takes some 20
seconds to solve.

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
from checkmate.solvers.common.runs import kept_by_the_forward, on_demand
from checkmate.solvers.common.task import Task
from checkmate.units import format_bytes

PREFIX = {"chain": "chen"}  # of a method's name, where it is not that of its candidates
TRIES = 64  # values of b that are simulated
MOST_SELECTIONS = 4096  # values of b that are thought of


def checkpoint_all(task: Task, incumbent: Incumbent) -> Remarks:
    """Run each op once, where that fits the budget.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> solve(problem, 8, method="checkpoint-all").cost
    2.0
    """
    if incumbent.offer(np.eye(len(task.problem.graph.ops), dtype=bool), "checkpoint-all"):
        return Remarks(method="checkpoint-all")
    return Remarks(f"keeping everything takes {format_bytes(task.problem.keep_all_peak)}")


def last_node(task: Task, incumbent: Incumbent) -> Remarks:
    """After each op keep only its outputs. No plan where that exceeds the budget, which it does not adapt to.

    Results of the step and values of pinned ops stay too, as in every method.

    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> solve(chain, 3, method="last-node").cost
    8.0
    """
    last = {t: op.outputs for t, op in enumerate(task.problem.graph.ops)}
    sweep = cheapest(task, incumbent, "last-node", 1, lambda _: on_demand(task.problem, last), tries=1)
    return sweep.remarks({}, remedy=", and it has no other schedule")


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
    remedy = f", and it has no other schedule; {PREFIX.get(kind, kind)}-greedy adapts to the budget"

    def run(task: Task, incumbent: Incumbent) -> Remarks:
        return _cheapest(task, incumbent, kind, "sqrt", lambda candidates: [every_kth(candidates)], remedy=remedy)

    return run


def greedy(kind: str) -> Callable[..., Remarks]:
    """The method that keeps a candidate where the bytes since the last exceed b, for the best b. As `sqrt` otherwise.

    Its option ``tries`` says how many b are simulated.
    """

    def run(task: Task, incumbent: Incumbent, *, tries: int = TRIES) -> Remarks:
        def choices(candidates: Sequence[int]) -> list[tuple[int, ...]]:
            chosen = selections(_filled(task.problem, candidates))
            return [tuple(candidates[i] for i in places) for places in chosen]

        return _cheapest(task, incumbent, kind, "greedy", choices, tries=tries)

    return run


def _cheapest(
    task: Task,
    incumbent: Incumbent,
    kind: str,
    rule: str,
    choose: Callable[[Sequence[int]], list[tuple[int, ...]]],
    *,
    tries: int = 1,
    remedy: str = "",
) -> Remarks:
    """The cheapest of several choices of candidates to keep."""
    problem = task.problem
    if kind == "chain" and (no := does_not_apply(task, f"ap-{rule} and linearized-{rule}")):
        return no
    candidates = CANDIDATES[kind](problem)
    choices = choose(candidates)

    def runs(i: int) -> np.ndarray:
        return kept_by_the_forward(problem, kept(problem, choices[i]))

    sweep = cheapest(task, incumbent, f"{PREFIX.get(kind, kind)}-{rule}", len(choices), runs, tries=tries)
    details, best = {"candidates": len(candidates)}, sweep.best
    if rule == "sqrt":
        best = 0  # there is no other
    else:
        details["selections"] = len(choices)
    if best is not None:
        details["checkpoints"] = len(choices[best])
    return sweep.remarks(details, remedy=remedy)


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
