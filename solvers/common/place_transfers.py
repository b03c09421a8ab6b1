"""Put transfers into a given order of runs: when each send and fetch begins, and where it is waited for.

What is sent is sent when it is made. Where it would be let go of before it is there, it stays until its transfer ends
or its room is needed; only then do ops wait for the link. What is fetched comes as late as the link allows for it to be
there in time, and where there is no room for it so early, as early as there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem
from checkmate.core.timing import Timing, timing
from checkmate.solvers.common.fetch_ops import Event, MustBeBack


def place_transfers(problem: Problem, budget: int, happens: Sequence[Event], boundary: int) -> Plan | None:
    """A plan with these runs in this order; None where even waiting at each transfer does not make room.

    Args:
        problem: with a second memory.
        budget: bytes.
        happens: runs, values that go, and those that must be back.
        boundary: how many of these belong to the forward.
    """
    out = _sends(problem, budget, happens, boundary)
    if out is None:
        return None
    best, least = None, float("inf")
    for _ in range(ROUNDS):
        plan = _fetches(problem, budget, out)
        when = timing(plan, problem)
        if when.seconds >= least:
            break
        best, least = plan, when.seconds
        out.reached(plan, when)
    return best


ROUNDS = 4  # in each of which fetches go by when steps were reached in the one before


@dataclass
class _Outward:
    """A plan whose fetches take no time: each `Fetch` is where its value is needed, with a `Wait` behind."""

    steps: list[Step] = field(default_factory=list)
    boundary: int = 0
    live: list[int] = field(default_factory=list)  # bytes at hand at each step, workspace of runs included
    now: list[float] = field(default_factory=list)  # seconds since the step began when each step is reached

    def add(self, step: Step, live: int, now: float) -> None:
        self.steps.append(step)
        self.live.append(live)
        self.now.append(now)

    def reached(self, plan: Plan, when: Timing) -> None:
        """Take over when each step is reached where its fetches are elsewhere: what is waited for leaves time."""
        rest = iter([at for step, at in zip(plan.steps, when.at, strict=True) if not isinstance(step, Fetch)])
        self.now = [0.0 if isinstance(step, Fetch) else next(rest) for step in self.steps]
        for i, step in enumerate(self.steps):
            if isinstance(step, Fetch):
                self.now[i] = self.now[i + 1]  # of its Wait


def _sends(problem: Problem, budget: int, happens: Sequence[Event], boundary: int) -> _Outward | None:
    graph, sizes, host = problem.graph, problem.sizes, problem.host
    assert host is not None
    last_back = {event.value: i for i, event in enumerate(happens) if isinstance(event, MustBeBack)}
    plan = _Outward()
    at_hand: set[int] = set()
    there: set[int] = set()
    sending: dict[int, float] = {}  # value -> where its transfer ends, in the order of the link
    leaving: dict[int, None] = {}  # of these, what goes as soon as it is there
    live, now, busy = problem.resident, 0.0, 0.0

    def arrive(v: int) -> None:
        """Its copy is there: wait for that."""
        nonlocal now, live
        plan.add(Wait(v), live, now)
        now = max(now, sending.pop(v))
        there.add(v)
        if v in leaving:
            del leaving[v]
            let_go(v)

    def let_go(v: int) -> None:
        nonlocal live
        plan.add(Free(v), live, now)
        at_hand.discard(v)
        live -= int(sizes[v])

    for i, event in enumerate(happens):
        if i == boundary:
            plan.boundary = len(plan.steps)
        if isinstance(event, Free):
            if event.value not in at_hand or event.value in leaving:
                continue
            if sending.get(event.value, 0.0) > now:
                leaving[event.value] = None
            elif event.value in sending:
                leaving[event.value] = None
                arrive(event.value)
            else:
                let_go(event.value)
            continue
        for v in [v for v, end in sending.items() if end <= now and v in leaving]:
            arrive(v)
        if isinstance(event, MustBeBack):
            v = event.value
            if v in leaving:  # it has not gone yet
                del leaving[v]
                continue
            if v in at_hand:
                continue
            if v in sending:
                arrive(v)
            while live + int(sizes[v]) > budget and leaving:
                arrive(next(iter(leaving)))
            live += int(sizes[v])
            at_hand.add(v)
            plan.add(Fetch(v), live, now)
            plan.add(Wait(v), live, now)
            if last_back[v] == i:
                plan.add(Drop(v), live, now)
                there.discard(v)
            continue
        k = event.op
        op = graph.ops[k]
        for v in (*op.outputs, *(() if event.over is None else (event.over,))):
            if v in sending:
                arrive(v)
        saved = 0 if event.over is None else dict(problem.savings[k]).get(event.over, 0)
        during = sum(int(sizes[v]) for v in op.outputs) + int(problem.workspace[k]) - saved
        while live + during > budget and leaving:
            arrive(next(iter(leaving)))
        if live + during > budget:
            return None
        plan.add(event, live + during, now)
        now += float(problem.seconds[k])
        live += sum(int(sizes[v]) for v in op.outputs if v not in at_hand)
        at_hand.update(op.outputs)
        if event.over is not None and event.over in at_hand:
            at_hand.discard(event.over)
            live -= int(sizes[event.over])
        for v in op.outputs:
            if last_back.get(v, -1) > i and v not in there and v not in sending:
                busy = max(busy, now) + host.seconds_to_send(int(sizes[v]))
                sending[v] = busy
                plan.add(Send(v), live, now)
    if boundary >= len(happens):
        plan.boundary = len(plan.steps)
    for v in list(sending):
        arrive(v)
    for v in sorted(there):  # needed again before it had gone
        plan.add(Drop(v), live, now)
    return plan


def _fetches(problem: Problem, budget: int, plan: _Outward) -> Plan:
    """Move each fetch to where it begins early enough, or as early as there is room."""
    host, sizes, steps = problem.host, problem.sizes, plan.steps
    assert host is not None
    live = np.array(plan.live, dtype=np.int64)
    since: dict[int, int] = {}  # value -> the step after which its copy is there and itself gone
    needs: list[tuple[int, int]] = []  # (position of the fetch, first position that it may have)
    for position, step in enumerate(steps):
        if isinstance(step, (Free, Run)):
            gone = step.value if isinstance(step, Free) else step.over
            if gone is not None:
                since[gone] = position + 1
        elif isinstance(step, Fetch):
            needs.append((position, since[step.value]))
    begins: dict[int, list[Step]] = {}
    busy = float("inf")
    for position, first in reversed(needs):
        step = steps[position]
        assert isinstance(step, Fetch)
        size = int(sizes[step.value])
        busy = min(busy, plan.now[position]) - host.seconds_to_fetch(size)
        wanted = max(first, bisect_right(plan.now, busy) - 1)
        full = np.flatnonzero(live[wanted:position] + size > budget)
        begin = wanted + int(full[-1]) + 1 if len(full) else wanted
        live[begin:position] += size
        begins.setdefault(begin, []).insert(0, step)
    moved: list[Step] = []
    boundary = 0
    for position, step in enumerate(steps):
        if position == plan.boundary:
            boundary = len(moved)
        moved += begins.get(position, [])
        if not isinstance(step, Fetch):
            moved.append(step)
    return Plan(tuple(moved), boundary if plan.boundary < len(steps) else len(moved))
