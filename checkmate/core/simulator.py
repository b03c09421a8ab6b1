"""Lower a schedule to a plan; check plans and simulate their cost and memory, independently of all solvers.

Both are short, slow and obvious on purpose: they are what a solver's answer is measured by.
On the main path, 13 of 16: see docs/idea.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Start, Step, Wait
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.timing import timing, walk
from checkmate.units import exact_bytes

# Plans of many sizes share their steps.
_run, _free = lru_cache(maxsize=2**14)(Run), lru_cache(maxsize=2**14)(Free)


@dataclass(frozen=True)
class Usage:
    """The result of a simulation: for each `Run`, the most bytes in memory from its begin to that of the next run.

    That of the first begins with the step.
    """

    ops: tuple[int, ...]
    bytes_at: tuple[int, ...]
    host_peak: int = 0  # the most bytes of copies in the second memory

    @property
    def peak(self) -> int:
        """The most bytes in memory at any moment."""
        return max(self.bytes_at)

    @property
    def peak_op(self) -> int:
        """The op that ran at the peak."""
        return self.ops[self.bytes_at.index(self.peak)]


def lower(problem: Problem, schedule: Schedule) -> Plan:
    """The steps of a schedule: each stage's ops in order, each value freed right after its last use in a stage.

    Of the values that go with a run, the op writes over the one by which it saves the most.

    >>> problem = Problem.from_dag([[], [0], [1]], seconds=[1, 1, 1], sizes=[1, 1, 1], over={2: [1]})
    >>> lower(problem, Schedule.from_runs(problem.graph, np.eye(3, dtype=bool))).as_lists()
    [['run', 0], ['run', 1], ['free', 0], ['run', 2, 1]]
    """
    graph, R, S = problem.graph, schedule.R, schedule.S
    steps: list[Step] = []
    boundary, results = 0, np.array(graph.outputs, dtype=np.int64)
    at_hand = np.zeros(len(graph.values), dtype=bool)  # an array, as is kept: what is alive in each of T stages is much
    for t in range(len(graph.ops)):
        ops: list[int] = R[t].nonzero()[0].tolist()
        last_use = {v: k for k in ops for v in (*graph.ops[k].outputs, *graph.ops[k].inputs)}
        kept = S[t + 1].copy() if t + 1 < len(graph.ops) else np.zeros_like(at_hand)
        kept[results] = True
        for k in ops:
            # Run, over an input that dies here if that saves bytes; free the other values that die.
            touched = {*graph.ops[k].inputs, *graph.ops[k].outputs}
            at_hand[[*graph.ops[k].outputs]] = True
            dying = sorted(v for v in touched if at_hand[v] and last_use[v] == k and not kept[v])
            saved = problem.saved(k, dying)
            over = None if saved is None else saved[0]
            steps.append(_run(k, over))
            steps += [_free(v) for v in dying if v != over]
            at_hand[dying] = False
        steps += map(_free, (at_hand & ~kept).nonzero()[0].tolist())  # kept though nothing in this stage needed them
        at_hand &= kept
        if t + 1 == graph.forward_length:
            boundary = len(steps)
    return Plan(tuple(steps), boundary)


def lower_runs(problem: Problem, stages: Sequence[Sequence[int]]) -> Plan:
    """The plan of the ops that run in each stage, in any order and number; values live only until their last read.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> lower_runs(problem, [[0], [1], [2], [0, 3]]).runs
    (0, 1, 2, 0, 3)
    """
    graph, results = problem.graph, set(problem.graph.outputs)
    movable = {v for v, value in enumerate(graph.values) if value.producer is not None}
    reversed_steps: list[Step] = []
    read_later: set[int] = set()
    of_backward = 0
    for t in reversed(range(len(graph.ops))):
        for k in reversed(stages[t]):
            op = graph.ops[k]
            dying = sorted(movable.intersection((*op.inputs, *op.outputs)) - read_later - results, reverse=True)
            saved = problem.saved(k, dying)
            over = None if saved is None else saved[0]
            reversed_steps += [*(Free(v) for v in dying if v != over), Run(k, over)]
            read_later = read_later.difference(op.outputs).union(movable.intersection(op.inputs))
        if t == graph.forward_length:
            of_backward = len(reversed_steps)
    return Plan(tuple(reversed(reversed_steps)), len(reversed_steps) - of_backward)


def without_slower_ways(plan: Plan, problem: Problem, budget: int) -> Plan:
    """The plan with slower in-place runs made plain, where the budget has room.

    >>> from dataclasses import replace
    >>> problem = Problem.from_dag([[], [0], [1]], seconds=[1, 1, 1], sizes=[1, 1, 1], over={2: [1]})
    >>> slowly = replace(problem.profile, ways=tuple(replace(way, slower=True) for way in problem.profile.ways))
    >>> problem = replace(problem, profile=slowly)
    >>> plan = lower(problem, Schedule.from_runs(problem.graph, np.eye(3, dtype=bool)))
    >>> [without_slower_ways(plan, problem, budget).runs_over for budget in (1, 2)]
    [1, 0]
    """
    if not any(isinstance(step, Run) and (step.op, step.over) in problem.slower for step in plan.steps):
        return plan
    parts: list[tuple[Step, ...]] = []
    for event in walk(plan, problem):
        step = event.step
        part: tuple[Step, ...] = (step,)
        if isinstance(step, Run) and step.over is not None and (step.op, step.over) in problem.slower:
            fits = event.device_bytes + dict(problem.savings[step.op])[step.over] <= budget
            part = (Run(step.op), Free(step.over)) if fits else part
        parts.append(part)
    return Plan(tuple(chain.from_iterable(parts)), sum(map(len, parts[: plan.boundary])))


def without_idle_values(plan: Plan, problem: Problem) -> Plan:
    """The plan that frees values nothing reads before they are remade; the same object if it has none.

    The modules of a plan do not hold such values, whatever the plan says: so the peak is that of the modules.
    """
    graph = problem.graph
    idle: dict[int, list[int]] = {}  # values, by the step after which they may go
    last: dict[int, int] = {}  # step that used a value which is here
    started: set[int] = set()
    # A value whose last use lies before its next making, or before the end, is idle in between.
    for i, step in enumerate(plan.steps):
        if isinstance(step, (Run, Start)):
            op = graph.ops[step.op]
            if step.op not in started:
                for v in set(op.outputs).difference(graph.outputs).intersection(last):
                    idle.setdefault(last[v], []).append(v)
            last.update(dict.fromkeys((*op.inputs, *op.outputs), i))
            if isinstance(step, Start):
                started.add(step.op)
                continue
            started.discard(step.op)
            if step.over is not None:
                del last[step.over]
        elif isinstance(step, Free):
            last.pop(step.value, None)
        elif not isinstance(step, Drop):
            last[step.value] = i
    for v in last.keys() - graph.outputs:
        if graph.values[v].producer is not None or v in problem.homes - problem.kept:
            idle.setdefault(last[v], []).append(v)
    # Free each right after its last use.
    if not idle:
        return plan
    steps = [part for i, step in enumerate(plan.steps) for part in (step, *map(Free, sorted(idle.get(i, ()))))]
    return Plan(tuple(steps), plan.boundary + sum(len(values) for i, values in idle.items() if i < plan.boundary))


def simulate(plan: Plan, problem: Problem) -> Usage:
    """The bytes that a plan takes, here and in the second memory, as `checkmate.core.timing.walk` counts them."""
    ops, bytes_at, host_peak, begin = list[int](), list[int](), problem.homes_bytes, problem.begin_bytes
    for event in walk(plan, problem):
        host_peak = max(host_peak, event.host_bytes)
        if isinstance(event.step, Run):
            ops.append(event.step.op)
            bytes_at.append(event.device_bytes if bytes_at else max(begin, event.device_bytes))
        elif isinstance(event.step, (Fetch, Start)):
            if bytes_at:
                bytes_at[-1] = max(bytes_at[-1], event.device_bytes)
            begin = max(begin, event.device_bytes)
    return Usage(tuple(ops), tuple(bytes_at), host_peak)


def cost(plan: Plan, problem: Problem) -> float:
    """The seconds of the step: the sum over all runs, plus waits for links."""
    if plan.moves or plan.started:
        return timing(plan, problem).seconds
    return float(sum(problem.seconds[k] for k in plan.runs))


def check_plan(plan: Plan, problem: Problem, budget: int | None = None, usage: Usage | None = None) -> list[str]:
    """Everything that is wrong with a plan, in words; empty if nothing is.

    Each op runs at least once, pinned ones exactly once, for the first time in the order of the graph and on its own
    side of the boundary; every input is at hand; only what is at hand is freed, and no result of the step; an op writes
    over what one of its ways writes over, and nothing reads that afterwards; no op runs after another has overwritten
    what it reads; the results are at hand in the end; no op runs more often than a rule allows, and what a rule has
    made again in the backward is not at hand when that begins; what goes to the second memory is at hand, comes back
    from a copy that is complete, is not touched while its transfer is under way, and leaves no copy behind; what is at
    home there has its place there all the time, is freed only while its copy there is current, which an op that
    overwrites it ends and a send that was waited for restores, and is there and current in the end, here only what is
    kept; what is started is carried by a link, begins at its turn at the latest, and before it only where all that it
    reads is there before the step begins, ends at its turn at the earliest and on the same side of the boundary, and
    what it reads and makes is not touched in between; the simulated peaks are within the budgets of both memories.

    ``usage``: of `simulate`, where the plan was simulated already.
    """
    return list(_faults(plan, problem, budget, usage))


def _faults(plan: Plan, problem: Problem, budget: int | None, usage: Usage | None) -> Iterator[str]:
    graph = problem.graph
    resident = {v for v, value in enumerate(graph.values) if value.producer is None} - problem.homes
    at_hand = resident | problem.kept
    times = [0] * len(graph.ops)
    turn = 0  # the op whose turn it is to run, or to start, for the first time
    results, limits = set(graph.outputs), problem.limits
    links = _Links(problem)
    started = links.started
    for i, step in enumerate(plan.steps):
        # At the boundary no op is under way, and what a rule has made again is gone.
        if i == plan.boundary:
            for k in sorted(started):
                yield f"{graph.ops[k].name} is under way when the backward begins"
            for v in sorted(limits.recomputed & at_hand):
                yield f"{graph.values[v].name} is at hand when the backward begins, though a rule has it made again"
        if isinstance(step, (Send, Fetch, Wait, Drop)):
            yield from (f"step {i} {fault}" for fault in links.follow(step, at_hand))
            continue
        yield from (f"step {i} {fault}" for fault in links.touched(step))
        # A value goes: it is at hand, not for good, no result, and current at home.
        if isinstance(step, Free):
            if step.value not in at_hand or step.value in resident:
                yield f"step {i} frees {graph.values[step.value].name}, which is not at hand"
            if step.value in problem.homes - links.in_host:
                yield f"step {i} frees {graph.values[step.value].name}, whose copy at home is old"
            if step.value in results:
                yield f"step {i} frees {graph.values[step.value].name}, a result of the step"
            at_hand.discard(step.value)
            continue
        # An op reads what is at hand.
        op, does = graph.ops[step.op], "starts" if isinstance(step, Start) else "runs"
        for v in op.inputs:
            if v not in at_hand:
                yield f"step {i} {does} {op.name} without its input {graph.values[v].name}"
        # Ops run for the first time in the order of the graph; what reads inputs only may start sooner.
        begun = step.op in started
        soon = isinstance(step, Start) and resident.issuperset(op.inputs)
        if times[step.op] == 0 and ((step.op > turn and not soon) or (step.op < turn and not begun)):
            yield f"step {i} {does} {op.name} before {graph.ops[min(turn, len(times) - 1)].name}"
        # No op reads what another one has overwritten.
        for v in op.inputs:
            by = graph.overwritten_by.get(v, step.op)
            if step.op < by and times[by]:
                yield f"step {i} {does} {op.name} after {graph.ops[by].name} has overwritten {graph.values[v].name}"
        # Each phase has its own ops.
        if i < plan.boundary and op.phase == "backward":
            yield f"step {i} {does} {op.name} of the backward in the forward"
        if i >= plan.boundary and op.phase == "forward" and times[step.op] == 0:
            yield f"step {i} {does} {op.name} of the forward for the first time in the backward"
        # Its outputs are in memory once it ends.
        if isinstance(step, Start):
            if not op.link:
                yield f"step {i} starts {op.name}, which no link carries"
            if at_hand.intersection(op.outputs):
                yield f"step {i} starts {op.name}, which has made what is at hand"
            started.add(step.op)
        else:
            times[step.op] += 1
            started.discard(step.op)
            at_hand.update(op.outputs)
            links.in_host.difference_update(op.overwrites)  # copies there are old
        while turn < len(times) and (times[turn] or turn in started):
            turn += 1
        if isinstance(step, Start):
            continue
        # The value that it writes over is gone.
        if step.over is not None:
            if step.over not in dict(problem.savings[step.op]):
                yield f"step {i} runs {op.name} over {graph.values[step.over].name}, which no way of it does"
            at_hand.discard(step.over)
    # In the end every op has run, as often as it may, and the results are at hand.
    for k, op in enumerate(graph.ops):
        if times[k] == 0:
            yield f"{op.name} never runs"
        if times[k] > 1 and op.pinned:
            yield f"{op.name} runs {times[k]} times though it {op.pinned}"
        if k in limits.max_runs and times[k] > limits.max_runs[k]:
            yield f"{op.name} runs {times[k]} times though a rule allows {limits.max_runs[k]}"
    for k in sorted(started):
        yield f"{graph.ops[k].name} is under way when the step ends"
    for v in graph.outputs:
        if v not in at_hand:
            yield f"{graph.values[v].name}, a result of the step, is not at hand in the end"
    for v in sorted({*links.going, *links.in_host} - problem.homes):
        yield f"{graph.values[v].name} is on a link or in the second memory when the step ends"
    for v in sorted(problem.homes):
        name = graph.values[v].name
        if v in links.going:
            yield f"{name} is on a link when the step ends"
        elif v not in links.in_host:
            yield f"{name}, whose copy at home is old, was not sent there when the step ends"
        elif (v in at_hand) != (v in problem.kept):
            is_kept = v in problem.kept
            yield f"{name} is {'not ' * is_kept}at hand when the step ends, though it is {'not ' * (not is_kept)}kept"
    # Both memories hold what the simulator counts.
    if not plan.runs or (budget is None and problem.host is None):
        return
    usage = usage or simulate(plan, problem)
    if problem.host is not None and usage.host_peak > problem.host.budget:
        most, room = exact_bytes(usage.host_peak), exact_bytes(problem.host.budget)
        yield f"copies in the second memory take {most}, more than its budget of {room}"
    if budget is not None and usage.peak > budget:
        where, most = graph.ops[usage.peak_op].name, exact_bytes(budget)
        yield f"the peak of {exact_bytes(usage.peak)} at {where} exceeds the budget of {most}"


class _Links:
    """The transfers under way, the copies in the second memory, and the ops under way on links."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.going: dict[int, Send | Fetch] = {}  # value -> its transfer that nobody has waited for
        self.in_host = set(problem.homes)  # copies that are current, or on their way
        self.started: set[int] = set()

    def follow(self, step: Send | Fetch | Wait | Drop, at_hand: set[int]) -> Iterator[str]:
        """Faults of a step concerning transfers; the step then counts as done."""
        v = step.value
        value, at_home = self.problem.graph.values[v], v in self.problem.homes
        if self.problem.host is None:
            yield f"sends or fetches {value.name}, though there is no second memory"
        # Wait: the transfer must be under way.
        if isinstance(step, Wait):
            if v not in self.going:
                yield f"waits for {value.name}, which is on no link"
            elif isinstance(self.going.pop(v), Fetch):
                at_hand.add(v)
            return
        if v in self.going:
            yield f"handles {value.name} while its transfer is under way"
        # Send: a value of the step, or one at home there, that is in memory, without a copy there.
        if isinstance(step, Send):
            if v not in at_hand or (value.producer is None and not at_home):
                yield f"sends {value.name}, which is not at hand"
            if v in self.in_host:
                yield f"sends {value.name}, of which a copy is there"
            if v in self.problem.graph.only_here:
                yield f"sends {value.name}, which others hold"
            if v in self.problem.limits.recomputed:
                yield f"sends {value.name}, which a rule has made again in the backward"
            self.going[v] = step
            self.in_host.add(v)
            return
        # Drop and fetch: there must be a copy.
        if v not in self.in_host:
            yield f"asks for {value.name}, of which no {'current ' * at_home}copy is there"
        if isinstance(step, Drop):
            if at_home:
                yield f"drops {value.name}, which is at home there"
            else:
                self.in_host.discard(v)
            return
        if v in at_hand:
            yield f"fetches {value.name}, which is at hand"
        self.going[v] = step

    def touched(self, step: Run | Start | Free) -> Iterator[str]:
        """Faults of a step that frees, makes or overwrites a value on a link, or one that an op there uses."""
        graph, over = self.problem.graph, [step.over] if isinstance(step, Run) and step.over is not None else []
        values = [step.value] if isinstance(step, Free) else [*graph.ops[step.op].outputs, *over]
        touched = {*values, *(() if isinstance(step, Free) else graph.ops[step.op].overwrites)}
        for v in sorted(touched & self.going.keys()):
            does = "lets go of {}, or makes it," if v in values else "overwrites {}"
            yield f"{does.format(graph.values[v].name)} while its transfer is under way"
        if isinstance(step, Start):
            if step.op in self.started:
                yield f"starts {graph.ops[step.op].name}, which is under way"
            return
        for k in self.started:
            op = graph.ops[k]
            if isinstance(step, Free) or k != step.op:
                for v in sorted({*op.inputs, *op.outputs} & touched):
                    yield f"touches {graph.values[v].name} while {op.name} is under way"
            elif over:
                yield f"runs {op.name} over {graph.values[over[0]].name}, though it was started"
