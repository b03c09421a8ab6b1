"""Capuchin: swap what has time to go and come back while it is not used, and recompute what is cheap for its bytes.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020. From the times of all
accesses, measured in a step that keeps everything: of each value, the pair of accesses with the longest time between,

    free time = back access - swap time in - (evicted access + swap time out)

Values are taken by free time, the most first. As long as none becomes negative, in the queue of the link too, a swap
costs nothing, and is what is done. Of the others each is swapped or made again, whichever costs less: a swap what free
time lacks, recomputation what its ops take; those of the most memory saving per second (MSPS) come first, and what is
taken changes the others', which may have been made from it. It ends when the plan fits.

Where we differ: the paper adds up the bytes that values save, at the peak; here the plan itself is simulated, whenever
another hundredth of the bytes goes. Its in-trigger, the access before which a fetch is asked for, is the last one that
leaves the time of the fetch, and is corrected at run time by what is measured; here there are three plans, of which the
best counts: with triggers early enough for all that queues for the link, for the fetch alone, and at the access itself.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.solvers.common.fetch_ops import sendable
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import OutOfTime, Task
from checkmate.solvers.host.swapping import Swap, accesses, unroll
from checkmate.units import exact_bytes

STEP = 0.01  # of the bytes of keeping all: so much more goes before the next plan is tried


@dataclass(frozen=True)
class Candidate:
    """A value that may be evicted, between two of its accesses."""

    swap: Swap
    free_time: float  # seconds that are left over beside its transfers
    back: int  # the op that accesses it again
    seconds: tuple[float, float, float, float]  # into the step when it may go, and is accessed again; there; and back


def capuchin(task: Task, incumbent: Incumbent) -> Remarks:
    """The plan of its policy that is the first to fit. No plan where none does.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 2.0, 2.0)), 6, method="capuchin").cost
    6.0
    """
    policy, found = Policy(task), Remarks("out of time")
    with contextlib.suppress(OutOfTime):
        found = _search(task, incumbent, policy)
    return replace(found, details={"swapped": len(policy.taken), "recomputed": len(policy.dropped)})


def _search(task: Task, incumbent: Incumbent, policy: Policy) -> Remarks:
    least = task.problem.keep_all_peak
    wanted = task.problem.keep_all_peak - task.budget
    while incumbent.R is None:
        enough = policy.bytes_evicted >= wanted or not policy.left or task.clock.is_over
        wanted = max(wanted, policy.bytes_evicted + int(STEP * task.problem.keep_all_peak)) if enough else wanted
        for swaps in policy.triggers if enough else ():
            plan = unroll(task, swaps, policy.dropped)
            peak = simulator.simulate(plan, task.problem).peak
            least = min(least, peak)
            if peak <= task.budget and not simulator.verify(plan, task.problem, task.budget):
                incumbent.offer_plan(plan, "capuchin")
        if task.clock.is_over or not policy.take():
            break
    why = f"with all that it swaps and makes again, its plan takes {exact_bytes(least)}"
    return Remarks("" if incumbent.R is not None else why)


class Policy:
    """What is swapped and what is made again so far, and what may be next."""

    def __init__(self, task: Task) -> None:
        self.problem, self.clock = task.problem, task.clock
        self.left = sorted(candidates(self.problem), key=lambda candidate: -candidate.free_time)
        self.free = [candidate for candidate in self.left if candidate.free_time >= 0]
        assert self.problem.host is not None
        self.room = self.problem.host.budget
        self.taken: dict[int, Candidate] = {}  # values that are swapped
        self.dropped: dict[int, int] = {}  # those made again: the op after which each goes

    @property
    def triggers(self) -> list[list[Swap]]:
        """The swaps, their fetches asked for early enough for all in the queue, for themselves, and when accessed."""
        taken = [*self.taken.values()]
        swaps, begins = [candidate.swap for candidate in taken], self._queue(taken)[1]
        ops = np.concatenate([[0.0], np.cumsum(self.problem.seconds)])
        early = (np.searchsorted(ops, begins, side="right") - 1).tolist()
        in_turn = [replace(s, fetch=min(s.fetch, max(at, s.after + 1))) for s, at in zip(swaps, early, strict=True)]
        return [in_turn, swaps, [replace(candidate.swap, fetch=candidate.back) for candidate in taken]]

    def take(self) -> bool:
        """Take one value more; whether there was one."""
        while self.free:  # what would be late now stays so with more in the queue
            candidate = self.free.pop(0)
            if self._has_room(candidate) and self._late(candidate) <= 0:
                self._swap(candidate)
                return True
        best, most = None, -1.0
        late = self._late()
        for candidate in self.left:  # the most bytes for a second, by whichever of the two takes less
            size = float(self.problem.sizes[candidate.swap.value])
            again, swap = self._seconds_again(candidate), float("inf")
            if self._has_room(candidate):
                swap = self._late(candidate) - late
            rate = size / max(min(again, swap), 1e-12)
            if min(again, swap) < float("inf") and rate > most:
                best, most = (candidate, swap < again), rate
        if best is None:
            return False
        candidate, swaps = best
        if swaps:
            self._swap(candidate)
        else:
            self.left.remove(candidate)
            self.dropped[candidate.swap.value] = candidate.swap.after
        return True

    @property
    def bytes_evicted(self) -> int:
        """Of all values taken so far."""
        return int(self.problem.sizes[[*self.dropped, *self.taken]].sum())

    def _swap(self, candidate: Candidate) -> None:
        self.left.remove(candidate)
        self.taken[candidate.swap.value] = candidate
        self.room -= int(self.problem.sizes[candidate.swap.value])

    def _late(self, *more: Candidate) -> float:
        """Seconds by which the free time of a swap is negative, where those taken and more queue for the links."""
        if self.clock.is_over:
            raise OutOfTime
        ends, begins = self._queue([*self.taken.values(), *more])
        return float((ends - begins).max(initial=0.0))

    def _queue(self, taken: list[Candidate]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(n,) seconds: when each value is away at the earliest, and when it has to start back at the latest."""
        gone, needed, there, back = np.array([c.seconds for c in taken]).reshape(-1, 4).T
        return _ends(gone, there), -_ends(-needed, back)

    def _has_room(self, candidate: Candidate) -> bool:
        return int(self.problem.sizes[candidate.swap.value]) <= self.room

    def _seconds_again(self, candidate: Candidate) -> float:
        """Seconds of what has to run for the value at its back access; infinite where that must not."""
        graph, limits = self.problem.graph, self.problem.limits
        seen, todo, seconds = set[int](), [candidate.swap.value], 0.0
        while todo:
            k = graph.values[todo.pop()].producer
            if k is None or k in seen:
                continue
            if graph.ops[k].pinned is not None or limits.until.get(k, candidate.back) < candidate.back:
                return float("inf")
            seen.add(k)
            seconds += float(self.problem.seconds[k])
            todo += [v for v in graph.ops[k].inputs if self._is_away(v, candidate.back)]
        return seconds

    def _is_away(self, v: int, at: int) -> bool:
        """Not at hand before an op, and not in the second memory."""
        graph = self.problem.graph
        if v in graph.outputs or graph.values[v].producer is None or v in self.taken:
            return False
        after, users = self.dropped.get(v), graph.users[v]
        return users[-1] < at or (after is not None and after < at)


def _ends(ready: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) when each is through a link that takes them as they become ready, one after another: from (n,), (n,)."""
    order = np.argsort(ready, kind="stable")
    through = np.cumsum(seconds[order])
    ends = np.empty_like(ready)
    ends[order] = through + np.maximum.accumulate(ready[order] - (through - seconds[order]))
    return ends


def candidates(problem: Problem) -> list[Candidate]:
    """The values with two accesses or more, each with the longest time between two."""
    host = problem.host
    assert host is not None
    begins = np.concatenate([[0.0], np.cumsum(problem.seconds)])
    found = []
    for v in sendable(problem):
        gaps = [(begins[b] - begins[a + 1], a, b) for a, b in pairwise(accesses(problem, v)) if b > a + 1]
        if not gaps:
            continue
        seconds, evicted, back = max(gaps)
        size = int(problem.sizes[v])
        there, again = host.seconds_to_send(size), host.seconds_to_fetch(size)
        trigger = bisect_right(begins.tolist(), begins[back] - again) - 1
        swap = Swap(v, evicted, min(back, max(trigger, evicted + 1)))
        times = float(begins[evicted + 1]), float(begins[back]), there, again
        found.append(Candidate(swap, float(seconds) - there - again, back, times))
    return found
