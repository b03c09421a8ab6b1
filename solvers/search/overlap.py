"""Plans for steps with ops on links, such as collectives, beside the processor's ops.

A step takes at least the seconds of all that the processor runs, and of all that each link carries. So for any shares
of one, w of the processor and w_l of each link,

    seconds >= sum over runs of w(k) C_k        w(k) = w of what carries op k

and the least of the right side over all schedules is a bound: it is that of the same step whose ops take w(k) C_k,
which any method for recomputation finds. The shares that prove the most make the processor and its busiest link take
the same time, where that is possible; they are looked for by halving. The processor runs nothing beside the first
gather, or beside the last sum over ranks: these seconds count on top of its own (`Exposed`).

The schedules that come with it are lowered, and what links carry is started early and waited for late (`place_starts`).
What an op makes from what is there before the step, such as a parameter gathered from all ranks, is started as late as
the link allows for it to be there in time, and where there is no room for it so early, as early as there is. Any op of
a link is waited for when it has ended, before its result is read, or where there is no room any more for what it reads:
so a gradient is summed over ranks while the backward goes on. For there to be room, some plans are made for less than
the budget.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from checkmate.core.graph import Graph
from checkmate.core.plan import Free, Plan, Run, Start, Step
from checkmate.core.problem import Problem
from checkmate.core.timing import timing, walk
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Solver, Task
from checkmate.solvers.common.schedules import lowered

LEAST = 1e-4  # share of a link's seconds where the processor takes longer: of equal plans the one with less on links
SHARE = 0.3  # of what is left of the time, for one search
HALVINGS = 6  # of the share of the busiest link
SHARES = (0.5, 0.2)  # more of them: of one half, plans are those of a step in which nothing overlaps
ROOMS = (0, 1, 2, 4, 8, 16, 32)  # ops of links, of the usual bytes: what plans leave free for them
ROUNDS = 4  # in each of which starts and waits go by when steps were reached in the one before
log = logging.getLogger("checkmate.solve")


def overlap(task: Task, incumbent: Incumbent, recompute: Solver, *, proves: bool) -> Remarks:
    """Plans, and a bound, for a problem whose graph has links.

    Args:
        recompute: finds plans for a problem without links, within the time of its task.
        proves: whether it proves bounds, too, so that more time is of use.
    """
    if task.problem.host is not None:  # both at once is not planned: links wait, and nothing more is proven
        inner = Incumbent(replace(task, problem=replace(task.problem, graph=task.problem.graph.without_links())))
        remarks = recompute(inner.task, inner)
        if inner.R is not None:
            incumbent.offer(_of(inner, task.problem), "links wait")
        return remarks
    search = _Search(task, incumbent, recompute)
    incumbent.prove(search.exposed.bound)
    remarks = search.attempt(LEAST)
    share, low, high = LEAST, 0.0, 1.0  # between shares with which the processor, and the link, takes longer
    for _ in range(HALVINGS if proves and search.balance > 0 else 0):
        low, high = (share, high) if search.balance > 0 else (low, share)
        share = (low + high) / 2
        search.attempt(share)
    for room in ROOMS if proves else ():
        for candidate in dict.fromkeys((share, *SHARES)):
            search.attempt(candidate, room)
    return remarks


class _Search:
    """The plans tried so far."""

    def __init__(self, task: Task, incumbent: Incumbent, recompute: Solver) -> None:
        self.task, self.incumbent, self.recompute = task, incumbent, recompute
        problem, links = task.problem, task.problem.graph.links
        self.busiest = max(links, key=lambda name: float(problem.seconds[[*links[name]]].sum()))
        carried = [int(problem.sizes[[*problem.graph.ops[k].outputs]].sum()) for ops in links.values() for k in ops]
        largest = np.sort(carried)[::-1]  # the usual size: half of all bytes are in larger ones
        self.usual = int(largest[np.searchsorted(2 * largest.cumsum(), largest.sum())])
        self.exposed = Exposed.of(problem)
        self.balance = 0.0  # seconds of the busiest link beyond the processor's, in the last plan
        self.tried: set[tuple[float, int]] = set()

    def attempt(self, share: float, room: int = 0) -> Remarks:
        """Solve with the busiest link's seconds weighted by ``share``; space for ``room`` usual outputs stays free."""
        task, best, problem, graph = self.task, self.incumbent, self.task.problem, self.task.problem.graph
        budget = task.budget - room * self.usual
        if (share, room) in self.tried or budget < problem.unavoidable_bytes.max():
            return Remarks()
        if self.tried and (best.is_infeasible or task.clock.is_over or best.gap <= task.gap):
            return Remarks()
        self.tried.add((share, room))
        # The shares of the links and of the processor, "", add up to one.
        shares = {name: share if name == self.busiest else LEAST / len(graph.links) for name in graph.links}
        shares[""] = 1.0 - sum(shares.values())
        seconds = problem.seconds * [shares[op.link] for op in graph.ops]
        weighted = replace(problem, graph=graph.without_links(), profile=replace(problem.profile, seconds=seconds))
        inner = Incumbent(task.within(SHARE * task.clock.left, problem=weighted, budget=budget))
        try:
            return self.recompute(inner.task, inner)
        finally:  # an interruption loses nothing
            if not room:
                best.prove(inner.bound + shares[""] * self.exposed.seconds)
            if inner.R is not None:
                plan = _of(inner, problem)
                best.offer(place_starts(problem, task.budget, plan), f"overlap at {share:.2g}")
                times = np.bincount(plan.runs, minlength=len(graph.ops)) * problem.seconds
                on_link = times[[*graph.links[self.busiest]]].sum()
                of_processor = times[[not op.link for op in graph.ops]].sum()
                self.balance = float(on_link - of_processor)
                log.info("share %.3g: %.4g s of the processor, %.4g of the busiest link", share, of_processor, on_link)


def _of(inner: Incumbent, problem: Problem) -> Plan:
    """The best plan of the problem without links, as a plan with links."""
    assert inner.plan is not None
    assert inner.R is not None
    return lowered(problem, inner.R) if inner.plan.is_a_schedule else inner.plan


@dataclass(frozen=True)
class Exposed:
    """A lower bound for every plan, from ops that wait for one another and first run in PyTorch's order.

    The first run of an op on a link begins after the last of the processor's ops that it is made from, and ends before
    the first one that reads it. So a stretch of the step, [from, to), takes at least as long as all that a link carries
    within, whatever runs there beside it. Of stretches that do not overlap

        seconds >= sum over the processor's ops C_k + sum over stretches (what a link carries within - sum of C_k there)
    """

    bound: float  # seconds of the step at least, by what runs once
    seconds: float  # in which the processor runs nothing, before its first op and after its last one

    @classmethod
    def of(cls, problem: Problem) -> Exposed:
        """Find the bound for a problem whose graph has links.

        The processor's last run that takes time is its last op's, or makes something again that is read: else it could
        be left out. So after it a link carries at least what is made from the last op, or the shortest of all ops that
        read what the processor makes; or nothing, if an op that takes no time comes later and reads such a value.
        """
        graph, seconds = problem.graph, problem.seconds
        of_links = [[*ops] for ops in graph.links.values()]
        cost = np.array([0.0 if op.link else seconds[k] for k, op in enumerate(graph.ops)])
        own = np.flatnonzero(cost)
        if not own.size:
            return cls(problem.least_cost, 0.0)
        begin, end = _between(graph)
        first = max(seconds[[k for k in ops if end[k] <= own[0]]].sum() for ops in of_links)
        last = max(seconds[[k for k in ops if begin[k] > own[-1]]].sum() for ops in of_links)
        reads = [any(not graph.ops[i].link for i in deps) for deps in graph.deps]  # some of what the processor makes
        reading = [
            seconds[k] if op.link else 0.0 for k, op in enumerate(graph.ops) if reads[k] and (op.link or k > own[-1])
        ]
        waits = _waits(begin, end, np.concatenate([[0.0], cost.cumsum()]), [(ops, seconds[ops]) for ops in of_links])
        return cls(float(cost.sum() + waits), float(first + min([last, *reading])))


def _between(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each op: one past the last processor op that it depends on, and the first processor op that reads it.

    These are for ops of links: between both a link has to carry the op.
    """
    count = len(graph.ops)
    begin, end = np.zeros(count, dtype=np.int64), np.full(count, count)
    for k, deps in enumerate(graph.deps):
        for j in deps:
            begin[k] = max(begin[k], begin[j] if graph.ops[j].link else j + 1)
    for k in reversed(range(count)):
        for j in graph.deps[k]:
            end[j] = min(end[j], end[k] if graph.ops[k].link else k)
    return begin, end


def _waits(
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    before: NDArray[np.float64],
    links: list[tuple[list[int], NDArray[np.float64]]],
) -> float:
    """Seconds that the processor is proven idle, by stretches of the step that do not overlap.

    Args:
        begin, end: (ops,) of what links carry, as `_between` gives it.
        before: (ops + 1,) seconds of the processor's ops before each.
        links: of each the ops that it carries, and their seconds.
    """
    froms, tos = (np.unique(where[[k for ops, _ in links for k in ops]]) for where in (begin, end))
    within = np.zeros((len(froms), len(tos)))
    for ops, seconds in links:
        carried = np.zeros_like(within)
        np.add.at(carried, (np.searchsorted(froms, begin[ops]), np.searchsorted(tos, end[ops])), seconds)
        within = np.maximum(within, carried[::-1].cumsum(axis=0)[::-1].cumsum(axis=1))
    gain = within - (before[tos][None, :] - before[froms][:, None])
    gain[froms[:, None] > tos[None, :]] = -np.inf
    earlier = np.searchsorted(tos, froms)  # how many stretches' ends are before: another one lies between
    best = np.zeros(len(tos) + 1)
    for i in range(len(tos)):
        best[i + 1] = max(best[i], (best[earlier] + gain[:, i]).max())
    return float(best[-1])


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
    steps = ((step, i not in moves) for i, step in enumerate(plan.steps))
    seconds = [float(problem.seconds[step.op]) if isinstance(step, Run) and own else 0.0 for step, own in steps]
    reached = np.cumsum([0.0, *seconds]).tolist()  # by each step, and by the end, if nothing was waited for
    best, least = plan, timing(plan, problem).seconds
    for _ in range(ROUNDS if moves else 0):
        placed, position = _placed(plan, moves, budget, live.copy(), reached)
        times = timing(placed, problem)
        if times.seconds >= least * (1 - 1e-9):
            break
        best, least = placed, times.seconds
        reached = [(*times.at, times.seconds)[i] for i in position]
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
    at_hand = dict[int, bool]()  # values that were made: whether they are at hand
    freed_at = [0] * len(graph.values)  # per value, the position after the step that freed it
    for i, step in enumerate(steps):
        if isinstance(step, Free):
            at_hand[step.value], freed_at[step.value] = False, i + 1
            continue
        assert isinstance(step, Run)
        op = graph.ops[step.op]
        if op.link and step.over is None and not any(at_hand.get(v) for v in op.outputs):
            # How early it may start, and by when it must have ended, within its half of the step.
            half, end = (0, plan.boundary) if i < plan.boundary else (plan.boundary, len(steps))
            free_to_start = all(graph.values[v].producer is None for v in op.inputs)
            first = max([half, *(freed_at[v] for v in op.outputs)]) if free_to_start else i
            last = next((j for j in range(i + 1, end) if _ends(problem, steps[j], step.op)), end)
            # The bytes that it holds until then.
            going = [(j, free.value) for j, free in enumerate(steps[i + 1 : last], i + 1) if isinstance(free, Free)]
            frees = tuple((j, sizes[v]) for j, v in going if v in op.inputs)
            workspace = int(problem.workspace[step.op])
            makes, seconds = workspace + sum(sizes[v] for v in op.outputs), float(problem.seconds[step.op])
            yield Move(step.op, op.link, i, first, last, frees, makes, workspace, seconds)
        at_hand.update(dict.fromkeys(op.outputs, True))
        if step.over is not None:
            at_hand[step.over], freed_at[step.over] = False, i + 1


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
        target = min(move.at, max(move.first, bisect_right(reached, busy[move.link]) - 1))
        full = np.flatnonzero(live[target : move.at] + move.makes > budget)
        starts[move.at] = target + int(full[-1]) + 1 if len(full) else target
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
