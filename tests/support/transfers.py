"""Plans that send values to a second memory at random: for tests of what checks, shows and runs such plans."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np

from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem


def with_transfers(problem: Problem, plan: Plan, rng: np.random.Generator, *, share: float = 0.5) -> Plan:
    """The plan, without transfers so far, with values away between two of their uses; its peak is not above the plan's.

    Sends, fetches and the waits for them stand at random legal places; a copy may stay there and be fetched twice.

    Args:
        problem: that the plan is for; with a second memory of enough room, the new plan is valid.
        plan: one without transfers.
        rng: that draws.
        share: of the times between two uses, those in which the value is away.
    """
    before: dict[int, list[Step]] = defaultdict(list)  # by position in the plan, what is done just before
    lives = [life for life in _lives(problem, plan) if len(life) > 1]
    for i in rng.permutation(len(lives)):
        _send(lives[i], before, rng, share)
    inserted = [before[p] for p in range(len(plan.steps) + 1)]
    steps = [step for p, step in enumerate(plan.steps) for step in (*inserted[p], step)] + inserted[-1]
    return Plan(tuple(steps), plan.boundary + sum(map(len, inserted[: plan.boundary])))


def as_run(problem: Problem, plan: Plan) -> Plan:
    """The plan where each value goes as soon as its code lets go of it: right behind the step that needs it last."""
    behind: list[list[Step]] = [[step] for step in plan.steps]
    for position, step in enumerate(plan.steps):
        if isinstance(step, Free):
            last = max(p for p, other in enumerate(plan.steps[:position]) if step.value in _needs(problem, other))
            behind[position].remove(step)
            behind[last].append(step)
    return Plan(tuple(step for steps in behind for step in steps), sum(map(len, behind[: plan.boundary])))


def _needs(problem: Problem, step: Step) -> tuple[int, ...]:
    if isinstance(step, Run):
        return (*problem.graph.ops[step.op].inputs, *problem.graph.ops[step.op].outputs)
    return (step.value,) if isinstance(step, (Send, Wait)) else ()


class _Life(list[int]):
    """Positions in a plan where a copy of a value is made and read, in order; it goes where ``end`` stands."""

    def __init__(self, value: int, made: int) -> None:
        super().__init__([made])
        self.value, self.end = value, made


def _lives(problem: Problem, plan: Plan) -> list[_Life]:
    """List the copies of each value that may be sent, one after another. A result is never let go of."""
    graph = problem.graph
    barred = {*graph.outputs, *graph.only_here, *problem.limits.recomputed, *graph.overwritten_by}
    open_: dict[int, _Life] = {}
    closed: list[_Life] = []

    def close(value: int, position: int) -> None:
        if life := open_.pop(value, None):
            life.end = position
            closed.append(life)

    for position, step in enumerate(plan.steps):
        if isinstance(step, Free):
            close(step.value, position)
        elif isinstance(step, Run):
            op = graph.ops[step.op]
            for v in op.inputs:
                if v in open_:
                    open_[v].append(position)
            for v in (*op.outputs, *(() if step.over is None else (step.over,))):
                close(v, position)
            open_.update({v: _Life(v, position) for v in op.outputs if v not in barred})
    for v in [*open_]:
        close(v, len(plan.steps))
    return closed


def _send(life: _Life, before: dict[int, list[Step]], rng: np.random.Generator, share: float) -> None:
    """Have the value away between some of its uses, and its copy there gone when the value goes."""
    v, there, waited = life.value, False, life[0]
    for use, following in pairwise(life):
        if rng.random() >= share:
            continue
        begin = int(rng.integers(waited, use + 1)) + 1 if not there else use + 1  # it may go while it is read
        if begin > following:
            continue
        sent = int(rng.integers(begin, following + 1))
        freed, fetched, arrived = (int(p) for p in np.sort(rng.integers(max(sent, use + 1), following + 1, size=3)))
        if not there:
            before[begin].append(Send(v))
            before[sent].append(Wait(v))
        before[freed].append(Free(v))
        before[fetched].append(Fetch(v))
        before[arrived].append(Wait(v))
        there = bool(rng.random() < 0.5)
        waited = arrived
        if not there:
            waited = int(rng.integers(arrived, following + 1))
            before[waited].append(Drop(v))
    if there:
        before[int(rng.integers(waited, life.end + 1))].append(Drop(v))
