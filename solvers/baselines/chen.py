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

import time
from collections.abc import Sequence
from itertools import accumulate
from math import isqrt

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.solvers.baselines.checkpoint_places import CANDIDATES, droppable
from checkmate.solvers.baselines.sweep import answer, cheapest, does_not_apply
from checkmate.solvers.common.runs import kept_by_the_forward

TRIES = 64  # values of b that are simulated
MOST_SELECTIONS = 4096  # values of b that are thought of


def chen_sqrt(problem: Problem, budget: int) -> Solution:
    """Every ⌊√n⌋-th op of a chain of n is a checkpoint. NOT_FOUND where the forward is no chain or it does not fit.

    >>> deps = [[], [0], [1], [2], [3], [2, 4], [1, 5], [0, 6]]
    >>> chain = Problem.from_dag(deps, seconds=[1] * 8, sizes=[1] * 8, forward=5)
    >>> chen_sqrt(chain, budget=4).cost, chen_sqrt(chain, budget=3).status
    (10.0, Status.NOT_FOUND)
    """
    return _every_kth(problem, budget, "chen", "chain")


def chen_greedy(problem: Problem, budget: int, *, tries: int = TRIES, time_limit: float = 60.0) -> Solution:
    """A checkpoint wherever the bytes since the last exceed b, on a chain, for the best b. NOT_FOUND as `chen_sqrt`."""
    return _by_bytes(problem, budget, "chen", "chain", tries, time_limit)


def ap_sqrt(problem: Problem, budget: int) -> Solution:
    """Every ⌊√n⌋-th of n articulation points of the forward is a checkpoint. NOT_FOUND where that does not fit."""
    return _every_kth(problem, budget, "ap", "ap")


def ap_greedy(problem: Problem, budget: int, *, tries: int = TRIES, time_limit: float = 60.0) -> Solution:
    """An articulation point is a checkpoint where the bytes since the last exceed b, for the best b."""
    return _by_bytes(problem, budget, "ap", "ap", tries, time_limit)


def linearized_sqrt(problem: Problem, budget: int) -> Solution:
    """Every ⌊√n⌋-th of n forward ops is a checkpoint. NOT_FOUND where that does not fit."""
    return _every_kth(problem, budget, "linearized", "linearized")


def linearized_greedy(problem: Problem, budget: int, *, tries: int = TRIES, time_limit: float = 60.0) -> Solution:
    """A forward op is a checkpoint where the bytes since the last exceed b, for the best b."""
    return _by_bytes(problem, budget, "linearized", "linearized", tries, time_limit)


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


def _every_kth(problem: Problem, budget: int, prefix: str, kind: str) -> Solution:
    began, method = time.perf_counter(), f"{prefix}-sqrt"
    if kind == "chain" and (no := does_not_apply(problem, budget, method, began, "ap-sqrt and linearized-sqrt")):
        return no
    candidates = CANDIDATES[kind](problem)
    checkpoints = every_kth(candidates)
    sweep = cheapest(problem, budget, 1, lambda _: kept_by_the_forward(problem, kept(problem, checkpoints)), tries=1)
    remedy = f", and it has no other schedule; {prefix}-greedy adapts to the budget"
    details = {"candidates": len(candidates), "checkpoints": len(checkpoints)}
    return answer(sweep, method, began, remedy=remedy, details=details)


def _by_bytes(problem: Problem, budget: int, prefix: str, kind: str, tries: int, time_limit: float) -> Solution:
    began, method = time.perf_counter(), f"{prefix}-greedy"
    if kind == "chain" and (no := does_not_apply(problem, budget, method, began, "ap-greedy and linearized-greedy")):
        return no
    candidates = CANDIDATES[kind](problem)
    choices = [tuple(candidates[i] for i in chosen) for chosen in selections(_filled(problem, candidates))]
    sweep = cheapest(
        problem,
        budget,
        len(choices),
        lambda i: kept_by_the_forward(problem, kept(problem, choices[i])),
        tries=tries,
        time_limit=time_limit - (time.perf_counter() - began),
    )
    details = {"candidates": len(candidates), "selections": len(choices)}
    if sweep.best is not None:
        details["checkpoints"] = len(choices[sweep.best])
    return answer(sweep, method, began, details=details)


def _filled(problem: Problem, candidates: Sequence[int]) -> list[int]:
    """Bytes that the forward makes and may drop, from its start up to and with each candidate."""
    values, graph = droppable(problem), problem.graph
    made = [sum(int(problem.sizes[v]) for v in op.outputs if v in values) for op in graph.ops[: graph.forward_length]]
    so_far = list(accumulate(made))
    return [so_far[k] for k in candidates]
