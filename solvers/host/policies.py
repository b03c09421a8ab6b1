"""Published swapping methods: "offload-all" sends all that the backward reads; "capuchin" chooses, and also recomputes.

"offload-all" is what frameworks do that move activations to the host's memory (`torch.autograd.graph.save_on_cpu` at
once, others by streams): a value goes after its last use in the forward, and comes back when the op before its first
use in the backward runs. Nothing is chosen, so it is a yardstick.

"capuchin" is Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020. From the times
of all accesses, measured in a step that keeps everything: of each value, the pair of accesses with the longest time
between,

    free time = back access - swap time in - (evicted access + swap time out)

Values are taken by free time, the most first. As long as none becomes negative, in the queue of the link too, a swap
costs nothing, and is what is done. Of the others each is swapped or made again, whichever costs less: a swap what free
time lacks, recomputation what its ops take; those of the most memory saving per second (MSPS) come first, and what is
taken changes the others', which may have been made from it. It ends when the plan fits.

We differ from the paper:

1. It adds up the bytes that values save, at the peak; here the plan is simulated, whenever another hundredth of the
   bytes goes.
2. Its in-trigger, the access before which a fetch is asked for, is the last one that leaves the time of the fetch, and
   is corrected at run time by what is measured; here there are three plans, of which the best counts: with triggers
   early enough for all that queues for the link, for the fetch alone, and at the access itself.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from checkmate.core import simulator
from checkmate.core.plan import Drop, Fetch, Plan, Run, Send, Wait
from checkmate.core.problem import Problem
from checkmate.solvers.common.fetches import Outward, sendable
from checkmate.solvers.common.incumbent import Incumbent, OutOfTime, Remarks, Task
from checkmate.units import exact_bytes

STEP = 0.01  # of the bytes of keeping all: so much more goes before Capuchin's next plan is tried
LOOK = 500  # steps between two looks at the clock


@dataclass(frozen=True)
class Swap:
    """A value that is sent after one op and read by a later one; its fetch begins before op ``fetch``."""

    value: int
    after: int
    fetch: int


@dataclass(frozen=True)
class Candidate:
    """A value that Capuchin may evict between two of its accesses."""

    swap: Swap
    free_time: float  # seconds that are left over beside its transfers
    back: int  # the op that accesses it again
    seconds: tuple[float, float, float, float]  # into the step when it may go, and is accessed again; there; and back


def offload_all(task: Task, incumbent: Incumbent) -> Remarks:
    """The plan that sends every value that the backward reads, back one op before. No plan if it does not fit.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 2.0, 2.0)), 8, method="offload-all").cost
    5.0
    """
    problem, host = task.problem, task.problem.host
    assert host is not None
    plan = unroll(task, every_swap(problem), {})
    if incumbent.offer(plan, "offload-all"):
        return Remarks(details={"sent": len(plan.sent)})
    usage = simulator.simulate(plan, problem)
    note = f" and {exact_bytes(usage.host_peak)} there" if usage.host_peak > host.budget else ""
    return Remarks(f"its only plan takes {exact_bytes(usage.peak)} here{note}", {"sent": len(plan.sent)})


def every_swap(problem: Problem) -> list[Swap]:
    """A swap for each forward value that the backward reads, if other ops run while it is away."""
    first, swaps = problem.graph.forward_length, []
    for v in sendable(problem):
        touched = accesses(problem, v)
        early, late = [k for k in touched if k < first], [k for k in touched if k >= first]
        if early and late and late[0] - 1 > early[-1]:
            swaps.append(Swap(v, early[-1], late[0] - 1))
    return swaps


def accesses(problem: Problem, v: int) -> list[int]:
    """The ops that make or read a value, ascending."""
    made_by = problem.graph.values[v].producer
    assert made_by is not None
    return [made_by, *problem.graph.users[v]]


def capuchin(task: Task, incumbent: Incumbent) -> Remarks:
    """The first plan of Capuchin's policy that fits. No plan if none does.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 2.0, 2.0)), 6, method="capuchin").cost
    6.0
    """
    problem, policy, message = task.problem, Policy(task), "out of time"
    goal, least = problem.keep_all_peak - task.budget, problem.keep_all_peak
    with contextlib.suppress(OutOfTime):
        while incumbent.R is None:
            evicted = int(problem.sizes[[*policy.dropped, *policy.taken]].sum())
            if evicted >= goal or not policy.left or task.clock.is_over:
                goal = max(goal, evicted + int(STEP * problem.keep_all_peak))
                for swaps in policy.triggers:
                    plan = unroll(task, swaps, policy.dropped)
                    peak = simulator.simulate(plan, problem).peak
                    least = min(least, peak)
                    if peak <= task.budget and not simulator.check_plan(plan, problem, task.budget):
                        incumbent.offer(plan, "capuchin")
            if task.clock.is_over or not policy.take():
                break
        message = f"with all that it swaps and makes again, its plan takes {exact_bytes(least)}"
        message = "" if incumbent.R is not None else message
    return Remarks(message, {"swapped": len(policy.taken), "recomputed": len(policy.dropped)})


class Policy:
    """The values that Capuchin swaps or remakes so far, and the remaining candidates."""

    def __init__(self, task: Task) -> None:
        self.problem, self.clock = task.problem, task.clock
        self.left = sorted(candidates(self.problem), key=lambda candidate: -candidate.free_time)
        self.free = [candidate for candidate in self.left if candidate.free_time >= 0]
        assert self.problem.host is not None
        self.room = self.problem.host.budget
        self.taken: dict[int, Candidate] = {}  # values that are swapped
        self.dropped: dict[int, int] = {}  # values to remake: the op after which each goes

    @property
    def triggers(self) -> list[list[Swap]]:
        """The swaps with fetches early enough for all in the queue, for each alone, and at the access itself."""
        taken = [*self.taken.values()]
        swaps, begins = [candidate.swap for candidate in taken], self._queue(taken)[1]
        ops = np.concatenate([[0.0], np.cumsum(self.problem.seconds)])
        early = (np.searchsorted(ops, begins, side="right") - 1).tolist()
        in_turn = [replace(s, fetch=min(s.fetch, max(at, s.after + 1))) for s, at in zip(swaps, early, strict=True)]
        return [in_turn, swaps, [replace(candidate.swap, fetch=candidate.back) for candidate in taken]]

    def take(self) -> bool:
        """Take one more value; tell whether there was one."""
        sizes, best = self.problem.sizes, None
        # a swap that costs nothing; what would be late now stays so with more in the queue
        while self.free and best is None:
            candidate = self.free.pop(0)
            if sizes[candidate.swap.value] <= self.room and self._late(candidate) <= 0:
                best = candidate, True
        # else the most bytes per second, by the cheaper of swap and recomputation
        if best is None:
            most, late = -1.0, self._late()
            for candidate in self.left:
                size = float(sizes[candidate.swap.value])
                again, swap = self._seconds_again(candidate), float("inf")
                if size <= self.room:
                    swap = self._late(candidate) - late
                rate = size / max(min(again, swap), 1e-12)
                if min(again, swap) < float("inf") and rate > most:
                    best, most = (candidate, swap < again), rate
        if best is None:
            return False
        candidate, swaps = best
        self.left.remove(candidate)
        if swaps:
            self.taken[candidate.swap.value] = candidate
            self.room -= int(sizes[candidate.swap.value])
        else:
            self.dropped[candidate.swap.value] = candidate.swap.after
        return True

    def _late(self, *more: Candidate) -> float:
        """Seconds by which the tightest swap exceeds its free time, with those taken and ``more`` in the queue."""
        if self.clock.is_over:
            raise OutOfTime
        ends, begins = self._queue([*self.taken.values(), *more])
        return float((ends - begins).max(initial=0.0))

    def _queue(self, taken: list[Candidate]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(n,) seconds: the earliest time each value is away, and the latest time its fetch has to begin."""
        gone, needed, out, back = np.array([c.seconds for c in taken]).reshape(-1, 4).T
        return _ends(gone, out), -_ends(-needed, back)

    def _seconds_again(self, candidate: Candidate) -> float:
        """Seconds to remake the value at its back access; infinite if its ops must not run."""
        graph, limits, back = self.problem.graph, self.problem.limits, candidate.back
        seen, todo, seconds = set[int](), [candidate.swap.value], 0.0
        while todo:
            k = graph.values[todo.pop()].producer
            if k is None or k in seen:
                continue
            if graph.ops[k].pinned is not None or limits.last_stage.get(k, back) < back:
                return float("inf")
            seen.add(k)
            seconds += float(self.problem.seconds[k])
            # go on to inputs that are neither at hand then nor in the second memory
            for v in graph.ops[k].inputs:
                may_go = v not in graph.outputs and graph.values[v].producer is not None and v not in self.taken
                if may_go and (graph.users[v][-1] < back or self.dropped.get(v, back) < back):
                    todo.append(v)
        return seconds


def _ends(ready: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) times at which a link finishes its transfers, served in order as they become ready: from (n,), (n,)."""
    order = np.argsort(ready, kind="stable")
    through = np.cumsum(seconds[order])
    ends = np.empty_like(ready)
    ends[order] = through + np.maximum.accumulate(ready[order] - (through - seconds[order]))
    return ends


def candidates(problem: Problem) -> list[Candidate]:
    """The values with two or more accesses, each with the longest time between two of them."""
    host = problem.host
    assert host is not None
    begins = np.concatenate([[0.0], np.cumsum(problem.seconds)])
    choices = []
    for v in sendable(problem):
        gaps = [(begins[b] - begins[a + 1], a, b) for a, b in pairwise(accesses(problem, v)) if b > a + 1]
        if not gaps:
            continue
        seconds, evicted, back = max(gaps)
        size = int(problem.sizes[v])
        out, again = host.seconds_to_send(size), host.seconds_to_fetch(size)
        trigger = bisect_right(begins.tolist(), begins[back] - again) - 1
        swap = Swap(v, evicted, min(back, max(trigger, evicted + 1)))
        times = float(begins[evicted + 1]), float(begins[back]), out, again
        choices.append(Candidate(swap, float(seconds) - out - again, back, times))
    return choices


def unroll(task: Task, swaps: Collection[Swap], dropped: Mapping[int, int]) -> Plan:
    """The plan that swaps these values, and drops and remakes those; it may not fit.

    The ops run in order. A dropped value is made again when an op misses it. A value on its way there goes as soon as
    room is needed for something else, and only then do ops wait for it.

    Args:
        task: whose budget says when to wait for what is on its way.
        dropped: value -> the op after which it goes.

    Raises:
        OutOfTime: where so much is made again, from what is itself made again, that the time is over.
    """
    graph, results = task.problem.graph, set(task.problem.graph.outputs)
    plan = _Unrolling(task)
    last = {v: max((value.producer or 0, *graph.users[v])) for v, value in enumerate(graph.values)}
    sent_after, fetched_before = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for swap in swaps:
        sent_after[swap.after].append(swap.value)
        fetched_before[swap.fetch].append(swap.value)
    for k, op in enumerate(graph.ops):
        if k == graph.forward_length:
            plan.boundary = len(plan.steps)
        for v in fetched_before[k]:
            plan.fetch(v)
        plan.have(op.inputs, set(op.inputs))
        touched = {*op.inputs, *op.outputs} - results - plan.given
        plan.run_and_free(k, {v for v in touched if last[v] == k or dropped.get(v) == k})
        for v in sent_after[k]:
            if v in plan.on_device:
                plan.add(Send(v))
                plan.leaving[v], plan.sending[v] = None, 0.0
    # wait for all that is on its way, and drop the copies
    for v in [*plan.leaving]:
        plan.arrive(v)
    plan.steps += [Wait(v) for v in sorted(plan.coming)] + [Drop(v) for v in sorted(plan.in_host)]
    return Plan(tuple(plan.steps), plan.boundary if graph.forward_length < len(graph.ops) else len(plan.steps))


class _Unrolling(Outward):
    """A plan under construction, with values on their way back and values to remake."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.problem, task.budget)
        self.clock, self.looked_at = task.clock, 0  # steps when the clock was looked at
        self.coming = set[int]()
        self.given = {v for v, value in enumerate(self.problem.graph.values) if value.producer is None}

    def fetch(self, v: int) -> None:
        """Begin to fetch a value that is away; keep one that has not left yet."""
        if v in self.leaving:
            self.add(Wait(v))
            self.add(Drop(v))
            del self.leaving[v], self.sending[v]
        elif v in self.in_host and v not in self.coming and v not in self.on_device:
            self.make_room(self.sizes[v])
            self.add(Fetch(v))
            self.coming.add(v)
            self.bytes_on_device += self.sizes[v]

    def have(self, values: Collection[int], needed: set[int]) -> None:
        """Wait for values on their way, fetch values with a copy, remake the rest."""
        for v in values:
            if v in self.on_device or v in self.given:
                continue
            self.fetch(v)
            if v in self.coming:
                self.add(Wait(v))
                self.add(Drop(v))
                self.coming.discard(v)
                self.in_host.discard(v)
                self.on_device.add(v)
            else:
                self.make(v, needed)

    def make(self, v: int, needed: set[int]) -> None:
        """Run the producer of a value again; values made only for it go at once."""
        if len(self.steps) - self.looked_at > LOOK:
            self.looked_at = len(self.steps)
            if self.clock.is_over:
                raise OutOfTime
        graph = self.problem.graph
        producer = graph.values[v].producer
        assert producer is not None
        op, before = graph.ops[producer], self.on_device | self.coming
        for w in op.outputs:  # a copy on a link must not be made
            if w in self.leaving:
                self.arrive(w)
        self.have(op.inputs, needed | set(op.inputs))
        new = {w for w in op.inputs if w not in before and w not in needed} - self.given
        spares = {w for w in op.outputs if w != v and w not in before and w not in needed}.difference(graph.outputs)
        self.run_and_free(producer, new | spares)

    def run_and_free(self, k: int, gone: set[int]) -> None:
        """Run an op, then free values."""
        dying = sorted(v for v in gone if v not in self.leaving)
        saved = self.problem.saved(k, [v for v in dying if v in self.problem.graph.ops[k].inputs])
        self.run(Run(k, None if saved is None else saved[0]))
        for v in dying:
            if v in self.on_device:
                self.free(v)
