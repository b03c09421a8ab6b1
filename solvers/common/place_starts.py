"""Place starts: when each op on a link begins beside the processor's ops, and where it is waited for.

A plan is given in which these ops run at once. What an op makes from what is there before the step, such as a parameter
gathered from all ranks, is started as late as the link allows for it to be there in time, and where there is no room
for it so early, as early as there is. Any op of a link is waited for when it has ended, before its result is read, or
where there is no room any more for what it reads: so a gradient is summed over ranks while the backward goes on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkmate.core.plan import Free, Plan, Run, Start, Step
from checkmate.core.problem import Problem
from checkmate.core.timing import timing, walk

ROUNDS = 4  # in each of which starts and waits go by when steps were reached in the one before


def place_starts(problem: Problem, budget: int, plan: Plan) -> Plan:
    """Split the ops on links of a plan into starts and waits, if that makes the step shorter.

    Args:
        problem: whose graph has links.
        budget: bytes.
        plan: that fits it, without starts and without a second memory.

    >>> from checkmate.core.graph import Graph, Op, Value
    >>> from checkmate.core.problem import Profile
    >>> ops = Op("a", "f", (), (0,)), Op("gather", "f", (1,), (2,), link="ranks"), Op("b", "f", (0, 2), (3,))
    >>> graph = Graph(ops, (Value("x", 4, 0), Value("w", 1, None), Value("g", 2, 1), Value("y", 4, 2)), (3,))
    >>> problem = Problem(graph, Profile(np.array([2.0, 2.0, 1.0]), np.zeros(3)))
    >>> place_starts(problem, 12, Plan((Run(0), Run(1), Run(2), Free(0), Free(2)), 5)).as_lists()
    [['start', 1], ['run', 0], ['run', 1], ['run', 2], ['free', 0], ['free', 2]]
    """
    moves = {move.at: move for move in _moves(problem, plan)}
    let_go = [int(problem.sizes[step.value]) if isinstance(step, Free) else 0 for step in plan.steps]
    at_hand = [event.device_bytes for event in walk(plan, problem)]
    live = np.array(at_hand, dtype=np.int64) + let_go  # before a value goes
    here = ((step, i not in moves) for i, step in enumerate(plan.steps))
    seconds = [float(problem.seconds[step.op]) if isinstance(step, Run) and own else 0.0 for step, own in here]
    reached = np.cumsum([0.0, *seconds]).tolist()  # by each step, and by the end, if nothing was waited for
    best, least = plan, timing(plan, problem).seconds
    for _ in range(ROUNDS if moves else 0):
        placed, position = _placed(plan, moves, budget, live.copy(), reached)
        when = timing(placed, problem)
        if when.seconds >= least * (1 - 1e-9):
            break
        best, least = placed, when.seconds
        reached = [(*when.at, when.seconds)[i] for i in position]
    return best


@dataclass(frozen=True)
class Move:
    """A run of an op on a link. A position in a plan is the index of the step before which something happens."""

    op: int
    link: str
    at: int  # position of the run
    first: int  # the first position where it may start
    last: int  # the last one where it may end
    frees: tuple[tuple[int, int], ...]  # positions of the steps up to there that let go of what it reads, and bytes
    makes: int  # bytes that it holds from its start on
    workspace: int  # the part of ``makes`` that it holds to its end only
    seconds: float


def _moves(problem: Problem, plan: Plan) -> Iterator[Move]:
    """The ops that may start earlier or be waited for later, in the order of the plan."""
    graph, sizes, steps = problem.graph, problem.sizes.tolist(), plan.steps
    here = dict[int, bool]()  # values that were made: whether they are at hand
    gone = [0] * len(graph.values)  # per value, the position after the step that freed it
    for i, step in enumerate(steps):
        if isinstance(step, Free):
            here[step.value], gone[step.value] = False, i + 1
            continue
        assert isinstance(step, Run)
        op = graph.ops[step.op]
        if op.link and step.over is None and not any(here.get(v) for v in op.outputs):
            # How early it may start, and by when it must have ended, within its half of the step.
            half, end = (0, plan.boundary) if i < plan.boundary else (plan.boundary, len(steps))
            free_to_start = all(graph.values[v].producer is None for v in op.inputs)
            first = max([half, *(gone[v] for v in op.outputs)]) if free_to_start else i
            last = next((j for j in range(i + 1, end) if _ends(problem, steps[j], step.op)), end)
            # The bytes that it holds until then.
            going = [(j, free.value) for j, free in enumerate(steps[i + 1 : last], i + 1) if isinstance(free, Free)]
            frees = tuple((j, sizes[v]) for j, v in going if v in op.inputs)
            workspace = int(problem.workspace[step.op])
            makes, seconds = workspace + sum(sizes[v] for v in op.outputs), float(problem.seconds[step.op])
            yield Move(step.op, op.link, i, first, last, frees, makes, workspace, seconds)
        here.update(dict.fromkeys(op.outputs, True))
        if step.over is not None:
            here[step.over], gone[step.over] = False, i + 1


def _ends(problem: Problem, step: Step, k: int) -> bool:
    """Tell whether an op must have ended before a step, which reads, frees or overwrites a value of the op."""
    op = problem.graph.ops[k]
    if not isinstance(step, Run):
        return isinstance(step, Free) and step.value in op.outputs
    other = problem.graph.ops[step.op]
    touched = {*other.outputs, *other.overwrites, step.over}
    return not touched.isdisjoint((*op.inputs, *op.outputs)) or not set(op.outputs).isdisjoint(other.inputs)


def _placed(
    plan: Plan, moves: dict[int, Move], budget: int, live: np.ndarray, reached: Sequence[float]
) -> tuple[Plan, list[int]]:
    """The plan with starts and waits, and for each old step the new positions of its start and its end.

    Args:
        moves: by the position of each run.
        live: (N,) bytes at each step, to which is added what is held for longer.
        reached: seconds when each step is reached, and the end.
    """
    # Wait where the link ends each, or before there is no room any more for what it reads.
    starts, waits = dict[int, int](), dict[int, int]()
    busy = dict.fromkeys((move.link for move in moves.values()), 0.0)
    for move in moves.values():
        busy[move.link] = max(busy[move.link], reached[move.at]) + move.seconds
        wait = min(move.last, max(move.at, bisect_left(reached, busy[move.link])))
        held = np.full(max(0, wait - move.at - 1), move.workspace)
        for j, size in move.frees:
            held[j - move.at - 1 :] += size
        full = np.flatnonzero(live[move.at + 1 : wait] + held > budget)
        held = held[: full[0]] if len(full) else held
        live[move.at + 1 : move.at + 1 + len(held)] += held
        waits[move.at] = move.at + 1 + len(held) if len(held) else move.at
    # From the last one to the first: start each in time for its wait and the next start, or as early as there is room.
    busy = dict.fromkeys(busy, float("inf"))
    for move in reversed(moves.values()):
        busy[move.link] = min(busy[move.link], reached[waits[move.at]]) - move.seconds
        wanted = min(move.at, max(move.first, bisect_right(reached, busy[move.link]) - 1))
        full = np.flatnonzero(live[wanted : move.at] + move.makes > budget)
        starts[move.at] = wanted + int(full[-1]) + 1 if len(full) else wanted
        live[starts[move.at] : move.at] += move.makes
    # Put them before the steps of the plan, with what now goes later.
    until: dict[int, int] = {}  # position of a step that lets go of something -> that where it does so now
    for at, wait in waits.items():
        for j, _ in moves[at].frees:
            if j < wait:
                until[j] = max(wait, until.get(j, 0))
    before: list[tuple[list[Step], list[Step], list[Step]]] = [([], [], []) for _ in range(len(plan.steps) + 1)]
    at_once = {at for at in moves if starts[at] == at == waits[at]}
    for at, move in moves.items():
        begin = starts[at]
        while begin < at and begin in at_once and moves[begin].link == move.link:  # the link is busy until then
            begin += 1
        if begin < at or waits[at] > at:
            before[begin][2].append(Start(move.op))
            if waits[at] > at:
                before[waits[at]][0].append(Run(move.op))
    for j, wait in until.items():
        before[wait][1].append(plan.steps[j])
    steps, position, boundary = list[Step](), list[int](), 0
    for i, (ended, free, begun) in enumerate(before):
        steps += ended + free
        if i == plan.boundary:
            boundary = len(steps)
        steps += begun
        position.append(len(steps))
        if i < len(plan.steps) and i not in until and waits.get(i, i) == i:
            steps.append(plan.steps[i])
    return Plan(tuple(steps), boundary), position
