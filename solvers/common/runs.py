"""From what is kept to a schedule: rematerialize on demand, free by liveness.

Checkpointing heuristics choose what to keep; a schedule says what runs. Published code writes S by a formula that holds
for symmetric chains; here an event simulation fills in the runs, for any graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from checkmate.core.problem import Problem


def on_demand(problem: Problem, kept_after: Mapping[int, Iterable[int]]) -> np.ndarray:
    """R (T, T) bool: the runs of a step that lets go of values after some stages, and makes again what it misses.

    After stage t of ``kept_after`` all values go but those listed there, results of the step, values that no op makes
    and those of pinned ops. What a later op misses runs again just before it, from what is at hand, and then stays
    until the next such stage; that is, until its last use, as `checkmate.core.schedule.Schedule.from_runs` frees it.

    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> on_demand(chain, {2: [0, 2]}).sum(axis=0)  # op 3 misses the value of op 1
    array([1, 2, 1, 1, 1])
    """
    graph = problem.graph
    always = {v for v, value in enumerate(graph.values) if value.producer is None} | set(graph.outputs)
    always.update(v for op in graph.ops if op.pinned is not None for v in op.outputs)
    R = np.eye(len(graph.ops), dtype=bool)
    at_hand = {v for v in always if graph.values[v].producer is None}
    for t, op in enumerate(graph.ops):
        missing = [v for v in op.inputs if v not in at_hand]
        while missing:
            k = graph.values[missing.pop()].producer
            if k is not None and not R[t, k]:
                R[t, k] = True
                at_hand.update(graph.ops[k].outputs)
                missing += [v for v in graph.ops[k].inputs if v not in at_hand]
        at_hand.update(op.outputs)
        if t in kept_after:
            at_hand &= always.union(kept_after[t])
    return R


def kept_by_the_forward(problem: Problem, kept: Iterable[int]) -> np.ndarray:
    """R (T, T) bool: of all that the forward makes, only ``kept`` (indices of values) reaches the backward.

    Within the forward nothing runs again: each value stays until its last use there.
    """
    return on_demand(problem, {problem.graph.forward_length - 1: kept})
