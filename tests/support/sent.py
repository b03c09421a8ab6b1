"""Plans in which values wait in a second memory, at legal places drawn at random."""

from __future__ import annotations

import itertools
import math
import random

from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem
from checkmate.solvers.common.away import sendable


def with_transfers(problem: Problem, plan: Plan, rng: random.Random, *, share: float = 0.7) -> Plan:
    """The plan, where about such a share of the values that could is sent and fetched between two times it is touched.

    Some stay at hand meanwhile; copies go some time after they have come back, and transfers may go on from the forward
    into the backward.
    """
    placed: list[tuple[float, Step]] = [(float(i), step) for i, step in enumerate(plan.steps)]
    for v in sendable(problem):
        gaps = [(a, b) for a, b in _gaps(problem, plan, v) if b - a >= 1]
        if gaps and rng.random() < share:
            placed += [
                (_behind_frees(plan, *at), step) for *at, step in _away(v, *rng.choice(gaps), len(plan.steps), rng)
            ]
    placed.sort(key=lambda pair: pair[0])
    return Plan(tuple(step for _, step in placed), sum(at < plan.boundary - 0.5 for at, _ in placed))


def _gaps(problem: Problem, plan: Plan, v: int) -> list[tuple[int, int]]:
    """Pairs of positions at which a value is touched, with nothing between them, where it is at hand from one on."""
    touched = [i for i, step in enumerate(plan.steps) if v in _touches(problem, step)]
    return [
        (a, b)
        for a, b in itertools.pairwise(touched)
        if isinstance(step := plan.steps[a], Run) and step.over != v and not isinstance(plan.steps[b], Free)
    ]


def _touches(problem: Problem, step: Step) -> tuple[int, ...]:
    if isinstance(step, Run):
        op = problem.graph.ops[step.op]
        return (*op.inputs, *op.outputs, *(() if step.over is None else (step.over,)))
    return (step.value,)


def _away(v: int, a: int, b: int, end: int, rng: random.Random) -> list[tuple[float, float, Step]]:
    """Each step with a place between two positions, and where it is in order between the two."""
    send, arrive, fetch, land = sorted(rng.uniform(a, b) for _ in range(4))
    if rng.random() < 0.2:  # it stays at hand
        steps: list[tuple[float, Step]] = [(send, Send(v)), (arrive, Wait(v)), (fetch, Drop(v))]
    else:
        drop = rng.choice([land, rng.uniform(land, end)])
        steps = [(send, Send(v)), (arrive, Wait(v)), (arrive, Free(v)), (fetch, Fetch(v)), (land, Wait(v))]
        steps.append((drop, Drop(v)))
    return [(at, (at - a) / (end - a), step) for at, step in steps]


def _behind_frees(plan: Plan, at: float, share: float) -> float:
    """A place right before an op runs: between a run and what goes after it, more would be at hand than in the code."""
    runs = (i for i in range(math.ceil(at), len(plan.steps)) if isinstance(plan.steps[i], Run))
    return next(runs, len(plan.steps)) - 0.99 + 0.98 * share
