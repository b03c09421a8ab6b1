"""Which backward ops run twice where gradients wait to be clipped: they are made again in place of being kept.

A gradient that is clipped by the norm of all waits until the last of them is known. What waits so can be kept, or let
go and made again when it is read: the backward runs twice then, or as much of it as leads there. In between are plans
that keep what is made last, for which the second way would be the longest.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from checkmate.core.problem import Problem

SHARES = (1.0, 63 / 64, 31 / 32, 15 / 16, 7 / 8, 0.75, 0.5, 0.0)  # of the bytes that wait, to make a second time
LONG = 0.25  # of the stages of the backward: what is read sooner does not wait
WORTH = 0.01  # of the smallest budget that could be: what must wait, for a second run to matter


def second_runs(problem: Problem, *, shares: tuple[float, ...] = SHARES) -> list[dict[int, int]]:
    """For each share of the bytes that wait, the ops of the backward to run again, and in which stage; once each.

    What waits is what the backward makes, and reads not for long; of all moments the one counts at which they wait
    longest, all together. An op runs again when something needs it for the first time after that, or before another op
    overwrites what it reads. Steps in which next to nothing waits give no dictionaries.

    >>> step = Problem.from_dag([[], [0], [1], [2], [1, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=1)
    >>> second_runs(step, shares=(1.0, 0.0))  # op 1 makes what op 4 reads
    [{1: 4}, {}]
    """
    moment, waiting = _longest_wait(problem)
    total = sum(problem.sizes[v] for v in waiting)
    if total <= WORTH * problem.unavoidable_bytes.max():
        return []
    made = list(accumulate(int(problem.sizes[v]) for v in waiting))
    chosen = dict.fromkeys(sum(size <= share * total for size in made) for share in shares)
    return [_homes(problem, moment, set(waiting[:n]), set(waiting[n:])) for n in chosen]


def _longest_wait(problem: Problem) -> tuple[int, list[int]]:
    """The stage before which values wait longest, all together, and these, in the order in which they are made.

    Bytes do not count in it: on its way through a step a gradient of activations is large, and read soon.
    """
    graph, results = problem.graph, set(problem.graph.outputs)
    long = LONG * (len(graph.ops) - graph.forward_length)
    begins = graph.forward_length
    made = [(k, v) for k, op in enumerate(graph.ops) if k >= begins and op.pinned is None for v in op.outputs]
    waits = [
        (before, after, v)
        for k, v in made
        if v not in results
        for before, after in pairwise((k, *graph.users[v]))
        if after - before >= long
    ]
    stages = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for before, after, _ in waits:
        stages[before + 1] += after - before
        stages[after + 1] -= after - before
    moment = int(stages.cumsum().argmax())
    return moment, [v for before, after, v in waits if before < moment < after]


def _homes(problem: Problem, moment: int, again: set[int], kept: set[int]) -> dict[int, int]:
    """The ops that make values ``again`` after the moment, with what they need but what is kept, and in which stage."""
    graph, results, until = problem.graph, set(problem.graph.outputs), problem.limits.until
    wanted = {v: min(k for k in graph.users[v] if k > moment) for v in again}
    homes: dict[int, int] = {}
    for k in reversed(range(graph.forward_length, moment)):
        op = graph.ops[k]
        stages = [wanted[v] for v in op.outputs if v in wanted]
        stage = min([*stages, until.get(k, len(graph.ops))])
        if not stages or op.pinned is not None or stage <= moment:
            continue
        homes[k] = stage
        for v in op.inputs:
            if v not in results and v not in kept:
                wanted[v] = min(stage, wanted.get(v, stage))
    return homes
