"""Plans of heuristics that swap values, and the simplest of these: send all, and make nothing again.

The heuristic says which values are swapped, which are made again, and where; `unroll` makes a plan of that. The ops run
in order. A swapped value is sent after one op and fetched before another; a dropped one goes after an op and is made
again when an op misses it. What is on its way there goes as soon as room is needed for something else, and only then do
ops wait for it.

"offload-all" is what frameworks do that move activations to the host's memory (`torch.autograd.graph.save_on_cpu` at
once, others by streams): a value goes after its last use in the forward, and comes back when the op before its first
use in the backward runs. Nothing is chosen, so it is a yardstick.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from checkmate.core import simulator
from checkmate.core.plan import Drop, Fetch, Plan, Run, Send, Wait
from checkmate.core.problem import Problem
from checkmate.solvers.common.fetch_ops import sendable
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.place_transfers import Outward
from checkmate.solvers.common.task import OutOfTime, Task
from checkmate.units import exact_bytes

LOOK = 500  # steps between two looks at the clock


@dataclass(frozen=True)
class Swap:
    """A value is sent after one op and needed by another; its fetch is asked for before op ``fetch``."""

    value: int
    after: int
    fetch: int


def offload_all(task: Task, incumbent: Incumbent, *, threshold: int = 0, ahead: int = 1) -> Remarks:
    """The plan that sends all larger values which the backward reads. No plan where it does not fit.

    Args:
        threshold: bytes above which a value is sent.
        ahead: how many ops before its first use in the backward a value is asked for.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 2.0, 2.0)), 8, method="offload-all").cost
    5.0
    """
    problem, host = task.problem, task.problem.host
    assert host is not None
    swaps = [swap for swap in every_swap(problem, ahead) if problem.sizes[swap.value] > threshold]
    plan = unroll(task, swaps, {})
    if incumbent.offer_plan(plan, "offload-all"):
        return Remarks(details={"sent": len(plan.sent)})
    usage = simulator.simulate(plan, problem)
    there = f" and {exact_bytes(usage.peak_there)} there" if usage.peak_there > host.budget else ""
    return Remarks(f"its only plan takes {exact_bytes(usage.peak)} here{there}", {"sent": len(plan.sent)})


def every_swap(problem: Problem, ahead: int) -> list[Swap]:
    """Each value of the forward that the backward reads, if there are ops to run while it is away."""
    first, found = problem.graph.forward_length, []
    for v in sendable(problem):
        touched = accesses(problem, v)
        early, late = [k for k in touched if k < first], [k for k in touched if k >= first]
        if early and late and late[0] - ahead > early[-1]:
            found.append(Swap(v, early[-1], late[0] - ahead))
    return found


def accesses(problem: Problem, v: int) -> list[int]:
    """The ops that make or read a value, ascending."""
    made_by = problem.graph.values[v].producer
    assert made_by is not None
    return [made_by, *problem.graph.users[v]]


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


class _Unrolling(Outward):
    def __init__(self, task: Task, swaps: Collection[Swap], dropped: Mapping[int, int]) -> None:
        super().__init__(task.problem, task.budget)
        self.clock, self.dropped = task.clock, dropped
        graph, self.looked_at = self.problem.graph, 0  # steps when the clock was looked at
        self.coming, self.results = set[int](), set(graph.outputs)
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
        self.run_and_free(k, gone)
        for v in self.sent_after.get(k, ()):
            if v in self.here:
                self.add(Send(v))
                self.leaving[v], self.sending[v] = None, 0.0

    def have(self, values: Collection[int], needed: set[int]) -> None:
        """Have values at hand: wait for those on their way, fetch what has a copy, make the others again."""
        for v in values:
            if v in self.here or v in self.given:
                continue
            if v not in self.coming and v in self.there:
                self.fetch(v)
            if v in self.coming:
                self.add(Wait(v))
                self.add(Drop(v))
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
        self.run_and_free(producer, new | others)

    def run_and_free(self, k: int, gone: set[int]) -> None:
        """Run an op, after which values go."""
        dying = sorted(v for v in gone if v not in self.leaving)
        saved = self.problem.saved(k, [v for v in dying if v in self.problem.graph.ops[k].inputs])
        self.run(Run(k, None if saved is None else saved[0]))
        for v in dying:
            if v in self.here:
                self.free(v)

    def fetch(self, v: int) -> None:
        """Ask for a value that is there; one that has not gone yet need not come back."""
        if v in self.leaving:
            self.add(Wait(v))
            self.add(Drop(v))
            del self.leaving[v], self.sending[v]
        elif v in self.there and v not in self.coming and v not in self.here:
            self.make_room(self.sizes[v])
            self.add(Fetch(v))
            self.coming.add(v)
            self.bytes_here += self.sizes[v]

    def plan(self) -> Plan:
        """What was unrolled, once all is waited for."""
        for v in [*self.leaving]:
            self.arrive(v)
        self.steps += [Wait(v) for v in sorted(self.coming)] + [Drop(v) for v in sorted(self.there)]
        fits = self.problem.graph.forward_length < len(self.problem.graph.ops)
        return Plan(tuple(self.steps), self.boundary if fits else len(self.steps))
