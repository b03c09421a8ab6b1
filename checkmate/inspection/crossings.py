"""What crosses to a second memory and back while a plan runs, and how many bytes are there meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.plan import Drop, Fetch, Plan, Run, Send, Wait
from checkmate.core.problem import Problem
from checkmate.core.timing import Timing


@dataclass(frozen=True)
class Crossing:
    """A transfer to or from the second memory. Seconds are since the begin of the step."""

    value: int  # index in the graph
    name: str  # of the value
    bytes: int
    back: bool  # whether it comes from there
    asked: float  # seconds; from then on it may wait for its link
    begin: float
    end: float
    waited: float  # seconds in which no op runs, since it has not ended
    after: int  # index of the execution after which it is asked for
    born: int  # the tick from which on it is under way
    died: int  # the tick from which on the plan knows that it has ended


def clock(plan: Plan) -> list[int]:
    """For each step the tick in which it is: a new one begins with each run and with each fetch.

    >>> from checkmate.core.plan import Free
    >>> clock(Plan((Run(0), Send(0), Run(1), Wait(0), Free(0), Fetch(0), Wait(0), Drop(0), Run(2)), 5))
    [0, 0, 1, 1, 1, 2, 2, 2, 3]
    """
    ticks, now = [], -1
    for step in plan.steps:
        now += isinstance(step, (Run, Fetch))
        ticks.append(now)
    return ticks


def crossings(plan: Plan, problem: Problem, seen: Timing) -> tuple[Crossing, ...]:
    """The transfers of a plan, in the order in which they are asked for."""
    ticks, waited = clock(plan), dict(seen.stalls)
    last: dict[int, int] = {}  # of each value the number of its last transfer
    asked: list[tuple[int, int, int]] = []  # value, execution, tick
    died, lost, runs = [], [], -1
    for position, (step, tick) in enumerate(zip(plan.steps, ticks, strict=True)):
        if isinstance(step, Run):
            runs += 1
        elif isinstance(step, (Send, Fetch)):
            last[step.value] = len(asked)
            asked.append((step.value, runs, tick + isinstance(step, Send)))
            died.append(ticks[-1] + 1)
            lost.append(0.0)
        elif isinstance(step, Wait):
            number = last[step.value]
            died[number], lost[number] = tick + 1, waited.get(position, 0.0)
    found = []
    for (value, after, born), end, stall, moved in zip(asked, died, lost, seen.transfers, strict=True):
        name, size = problem.graph.values[value].name, int(problem.sizes[value])
        when = moved.asked, moved.begin, moved.end
        found.append(Crossing(value, name, size, moved.back, *when, stall, after, born, end))
    return tuple(found)


def bytes_there(plan: Plan, problem: Problem, seen: Timing) -> tuple[tuple[int, ...], tuple[tuple[float, int], ...]]:
    """The most bytes in the second memory from each execution to the next; and (seconds, bytes) of each change."""
    there, most, levels = 0, list[int](), [(0.0, 0)]
    for step, now in zip(plan.steps, seen.at, strict=True):
        if isinstance(step, Run):
            most.append(there)
        elif isinstance(step, (Send, Drop)):
            there += int(problem.sizes[step.value]) * (1 if isinstance(step, Send) else -1)
            most[-1] = max(most[-1], there)
            levels.append((now, there))
    return tuple(most), tuple(levels)
