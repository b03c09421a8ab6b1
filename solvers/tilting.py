"""Search over tilts: each value's worth in the eviction pass times a factor of its own, changed at random.

Close to the smallest budget the order of evictions decides, and no formula for it is right everywhere. A change counts
if the pass it gives is no dearer; large values are tried more often, since they decide what fits. A few plans are
improved side by side, and from time to time the worst of them starts over from the best.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from checkmate.solvers.eviction import Stuck, Weights, run_pass
from checkmate.solvers.next_use import Guide, as_matrix, variants
from checkmate.solvers.tables import Tables

POOL = 6  # plans improved side by side
ROUND = 200  # passes, after which the worst plan starts over from the best
COUNTS = (1, 2, 4, 8, 16)  # values changed at once
STEPS = (1.0, 3.0)  # standard deviations of a change, in the logarithm
QUIET = 12  # rounds without progress after which the search ends


@dataclass
class _Plan:
    cost: float  # seconds
    weights: Weights
    tilt: np.ndarray  # (V,) float64, logarithms
    stages: list[list[int]]


def tilted(
    tables: Tables, budget: int, *, deadline: float, seed: int = 0, guide: Guide | None = None
) -> np.ndarray | None:
    """R (T, T) bool, the runs of the cheapest pass that was found, or None where none fits the budget.

    Args:
        tables: of the problem.
        budget: bytes.
        deadline: of `time.perf_counter`.
        seed: of the changes. The same seed gives the same plan where the deadline does not bind.
        guide: what a bound's answer keeps; half of the first passes follow it.

    >>> from checkmate.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> tilted(Tables.of(problem), 3, deadline=time.perf_counter() + 1).sum(axis=0)
    array([1, 1, 1, 1])
    """
    rng = np.random.default_rng(seed)
    V = len(tables.producer)
    pool: list[_Plan] = []
    for weights in [*variants(None), *(variants(guide) if guide else ())]:
        if time.perf_counter() > deadline:
            break
        pool += _plan(tables, budget, weights, np.zeros(V))
    pool = sorted(pool, key=lambda plan: plan.cost)[:POOL]
    if not pool:
        return None
    chances = _chances(tables)
    best, quiet = pool[0].cost, 0
    while chances.any() and quiet < QUIET:
        for _ in range(ROUND):
            if time.perf_counter() > deadline:
                return as_matrix(min(pool, key=lambda plan: plan.cost).stages)
            i = int(rng.integers(len(pool)))
            changed = rng.choice(V, rng.choice(COUNTS), p=chances)
            tilt = pool[i].tilt.copy()
            tilt[changed] += rng.normal(0.0, rng.choice(STEPS), len(changed))
            pool[i : i + 1] = [
                plan for plan in _plan(tables, budget, pool[i].weights, tilt) if plan.cost <= pool[i].cost
            ] or [pool[i]]
        pool.sort(key=lambda plan: plan.cost)
        quiet = 0 if pool[0].cost < best * (1 - 1e-9) else quiet + 1
        best = pool[0].cost
        pool[-1] = pool[0]
    return as_matrix(pool[0].stages)


def _plan(tables: Tables, budget: int, weights: Weights, tilt: np.ndarray) -> list[_Plan]:
    """The plan of one pass, if it fits."""
    stages = run_pass(tables, budget, replace(weights, tilt=np.exp(tilt)))
    if isinstance(stages, Stuck):
        return []
    return [_Plan(sum(tables.seconds[k] for ops in stages for k in ops), weights, tilt, stages)]


def _chances(tables: Tables) -> np.ndarray:
    """(V,) float64: how likely each value is changed, in proportion to its bytes; 0 for those that never go."""
    sizes = [
        size if users and not result and made_by >= 0 and not tables.pinned[made_by] else 0
        for size, users, result, made_by in zip(tables.size, tables.users, tables.result, tables.producer, strict=True)
    ]
    return np.array(sizes) / max(1, sum(sizes))
