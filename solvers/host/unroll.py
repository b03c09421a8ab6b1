"""Make a plan of what a swapping heuristic decided: which values are swapped, which are made again, and where.

The ops run in order. A swapped value is sent after one op and fetched before another; a dropped one goes after an op
and is made again when an op misses it. What is on its way there goes as soon as room is needed for something else, and
only then do ops wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.solvers.common.task import OutOfTime, Task

LOOK = 500  # steps between two looks at the clock


@dataclass(frozen=True)
class Swap:
    """A value is sent after one op and needed by another; its fetch is asked for before op ``fetch``."""

    value: int
    after: int
    fetch: int


def unroll(task: Task, swaps: Collection[Swap], dropped: Mapping[int, int]) -> Plan:
    """The plan in which these values are swapped, and those let go of after an op and made again; it may not fit.

    Args:
        task: whose budget says when to wait for what is on its way.
        dropped: value -> the op after which it goes.

    Raises:
        OutOfTime: where so much is made again, from what is itself made again, that the time is over.
    """
    unrolling = _Unrolling(task, swaps, dropped)
    for k in range(len(task.problem.graph.ops)):
        unrolling.advance(k)
    return unrolling.plan()


class _Unrolling:
    def __init__(self, task: Task, swaps: Collection[Swap], dropped: Mapping[int, int]) -> None:
        self.problem, self.budget, self.clock, self.dropped = task.problem, task.budget, task.clock, dropped
        graph = self.problem.graph
        self.steps: list[Step] = []
        self.boundary = self.looked_at = 0  # steps of the forward, and when the clock was looked at
        self.live = self.problem.resident  # bytes
        self.here, self.coming, self.there = set[int](), set[int](), set[int]()
        self.leaving: dict[int, None] = {}  # sent, still here, in the order of the link
        self.results = set(graph.outputs)
        self.last = {v: max((value.producer or 0, *graph.users[v])) for v, value in enumerate(graph.values)}
        self.given = {v for v, value in enumerate(graph.values) if value.producer is None}
        self.sent_after: dict[int, list[int]] = {}
        self.fetched_before: dict[int, list[int]] = {}
        for swap in swaps:
            self.sent_after.setdefault(swap.after, []).append(swap.value)
            self.fetched_before.setdefault(swap.fetch, []).append(swap.value)

    def advance(self, k: int) -> None:
        """Run op k for the first time, with all that goes before and after."""
        graph = self.problem.graph
        if k == graph.forward_length:
            self.boundary = len(self.steps)
        for v in self.fetched_before.get(k, ()):
            self.fetch(v)
        self.have(graph.ops[k].inputs, set(graph.ops[k].inputs))
        touched = {*graph.ops[k].inputs, *graph.ops[k].outputs} - self.results - self.given
        gone = {v for v in touched if self.last[v] == k or self.dropped.get(v) == k}
        self.run(k, gone)
        for v in self.sent_after.get(k, ()):
            if v in self.here:
                self.steps.append(Send(v))
                self.leaving[v] = None

    def have(self, values: Collection[int], needed: set[int]) -> None:
        """Have values at hand: wait for those on their way, fetch what has a copy, make the others again."""
        for v in values:
            if v in self.here or v in self.given:
                continue
            if v not in self.coming and v in self.there:
                self.fetch(v)
            if v in self.coming:
                self.steps += [Wait(v), Drop(v)]
                self.coming.discard(v)
                self.there.discard(v)
                self.here.add(v)
            else:
                self.make(v, needed)

    def make(self, v: int, needed: set[int]) -> None:
        """Run the producer of a value again; what was made for that only goes with it."""
        if len(self.steps) - self.looked_at > LOOK:
            self.looked_at = len(self.steps)
            if self.clock.is_over:
                raise OutOfTime
        producer = self.problem.graph.values[v].producer
        assert producer is not None
        op = self.problem.graph.ops[producer]
        before = self.here | self.coming
        for w in op.outputs:  # a copy on a link must not be made
            if w in self.leaving:
                self.arrive(w)
        self.have(op.inputs, needed | set(op.inputs))
        new = {w for w in op.inputs if w not in before and w not in needed} - self.given
        others = {w for w in op.outputs if w != v and w not in before and w not in needed} - self.results
        self.run(producer, new | others)

    def run(self, k: int, gone: set[int]) -> None:
        """Run an op, after which values go."""
        problem, op = self.problem, self.problem.graph.ops[k]
        dying = sorted(v for v in gone if v not in self.leaving)
        saved = problem.saved(k, [v for v in dying if v in op.inputs])
        made = sum(int(problem.sizes[v]) for v in op.outputs)
        self.make_room(made + int(problem.workspace[k]) - (saved[1] if saved else 0))
        over = None if saved is None else saved[0]
        self.steps.append(Run(k, over))
        self.live += sum(int(problem.sizes[v]) for v in op.outputs if v not in self.here)
        self.here.update(op.outputs)
        for v in dying:
            if v in self.here:
                self.steps += [] if v == over else [Free(v)]
                self.let_go(v)

    def fetch(self, v: int) -> None:
        """Ask for a value that is there; one that has not gone yet need not come back."""
        if v in self.leaving:
            self.steps += [Wait(v), Drop(v)]
            del self.leaving[v]
        elif v in self.there and v not in self.coming and v not in self.here:
            self.make_room(int(self.problem.sizes[v]))
            self.steps.append(Fetch(v))
            self.coming.add(v)
            self.live += int(self.problem.sizes[v])

    def make_room(self, needed: int) -> None:
        """Wait for what is on its way there until so many bytes are free, or nothing is."""
        while self.live + needed > self.budget and self.leaving:
            self.arrive(next(iter(self.leaving)))

    def arrive(self, v: int) -> None:
        """Its copy is complete: let go of it."""
        del self.leaving[v]
        self.steps += [Wait(v), Free(v)]
        self.there.add(v)
        self.let_go(v)

    def let_go(self, v: int) -> None:
        """It is not at hand any more."""
        self.here.discard(v)
        self.live -= int(self.problem.sizes[v])

    def plan(self) -> Plan:
        """What was unrolled, once all is waited for."""
        for v in [*self.leaving]:
            self.arrive(v)
        self.steps += [Wait(v) for v in sorted(self.coming)] + [Drop(v) for v in sorted(self.there)]
        fits = self.problem.graph.forward_length < len(self.problem.graph.ops)
        return Plan(tuple(self.steps), self.boundary if fits else len(self.steps))
