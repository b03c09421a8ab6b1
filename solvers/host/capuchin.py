"""Capuchin: swap what has time to go and come back while it is not used, and recompute what is cheap for its bytes.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020. From the times of all
accesses, measured in a step that keeps everything: of each value, the pair of accesses with the longest time between,

    free time = back access - swap time in - (evicted access + swap time out)

Values are taken by free time, the most first. As long as it is not negative a swap costs nothing, and is what is done.
Of the others each is swapped or made again, whichever costs less: a swap what its free time lacks, recomputation what
its ops take; those of the most memory saving per second (MSPS) come first, and what is taken changes the others', which
may have been made from it. It ends when the plan fits.

Where we differ: the paper adds up the bytes that values save, at the peak; here the plan itself is simulated after each
value. Its in-trigger, the access before which a fetch is asked for, is the last one that leaves the time of the fetch;
the paper corrects it at run time by what is measured. Where that leaves no room, fetches wait for the access, as
the paper's on-demand ones. Links carry one transfer at a time here as there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Task
from checkmate.solvers.host.stages import host_of
from checkmate.solvers.host.unroll import Swap, unroll
from checkmate.units import exact_bytes

METHOD = "capuchin"


@dataclass(frozen=True)
class Candidate:
    """A value that may be evicted, between two of its accesses."""

    swap: Swap
    free_time: float  # seconds that are left over beside its transfers
    back: int  # the op that accesses it again


def capuchin(task: Task, incumbent: Incumbent) -> Remarks:
    """The plan of its policy that is the first to fit. No plan where none does.

    Raises:
        ValueError: if the problem has no second memory.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 2.0, 2.0)), 6, method="capuchin").cost
    6.0
    """
    policy, least = Policy(task), task.problem.keep_all_peak
    while incumbent.R is None:
        for swaps in (policy.swaps, policy.swaps_on_access):
            plan = unroll(task.problem, task.budget, swaps, policy.dropped)
            peak = simulator.simulate(plan, task.problem).peak
            least = min(least, peak)
            if peak <= task.budget and not simulator.verify(plan, task.problem, task.budget):
                incumbent.offer_plan(plan, METHOD)
                break
        if task.clock.is_over or not policy.take():
            break
    figures = {"swapped": len(policy.swaps), "recomputed": len(policy.dropped)}
    return Remarks("" if incumbent.R is not None else _why(least), figures)


class Policy:
    """What is swapped and what is made again so far, and what may be next."""

    def __init__(self, task: Task) -> None:
        self.problem = task.problem
        self.left = sorted(candidates(self.problem), key=lambda candidate: -candidate.free_time)
        self.room = host_of(self.problem).budget
        self.swaps: list[Swap] = []
        self.dropped: dict[int, int] = {}
        self.back: dict[int, int] = {candidate.swap.value: candidate.back for candidate in self.left}

    @property
    def swaps_on_access(self) -> list[Swap]:
        """The swaps, whose fetches are asked for when their values are accessed: where no room is for them before."""
        return [replace(swap, fetch=self.back[swap.value]) for swap in self.swaps]

    def take(self) -> bool:
        """Take one value more; whether there was one."""
        if self.left and self.left[0].free_time >= 0:
            self._swap(self.left.pop(0))
            return True
        best, most = None, -1.0
        for candidate in self.left:  # the most bytes for a second, by whichever of the two takes less
            again = self._seconds_again(candidate)
            size = float(self.problem.sizes[candidate.swap.value])
            least = min(again, -candidate.free_time if self._has_room(candidate) else float("inf"))
            rate = size / least if least > 0 else float("inf")
            if least < float("inf") and rate > most:
                best, most = (candidate, again), rate
        if best is None:
            return False
        candidate, again = best
        self.left.remove(candidate)
        if self._has_room(candidate) and max(0.0, -candidate.free_time) < again:
            self._swap(candidate)
        else:
            self.dropped[candidate.swap.value] = candidate.swap.after
        return True

    def _swap(self, candidate: Candidate) -> None:
        if self._has_room(candidate):
            self.swaps.append(candidate.swap)
            self.room -= int(self.problem.sizes[candidate.swap.value])
        else:
            self.left.append(Candidate(candidate.swap, -float("inf"), candidate.back))  # it can only be made again

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
        if v in graph.outputs or graph.values[v].producer is None or any(swap.value == v for swap in self.swaps):
            return False
        after, users = self.dropped.get(v), graph.users[v]
        return users[-1] < at or (after is not None and after < at)


def candidates(problem: Problem) -> list[Candidate]:
    """The values with two accesses or more, each with the longest time between two."""
    graph, host = problem.graph, host_of(problem)
    begins = np.concatenate([[0.0], np.cumsum(problem.seconds)])
    found = []
    for v, value in enumerate(graph.values):
        if value.producer is None or v in graph.outputs or v in problem.limits.gone or not problem.sizes[v]:
            continue
        accesses = [value.producer, *graph.users[v]]
        gaps = [(begins[b] - begins[a + 1], a, b) for a, b in pairwise(accesses) if b > a + 1]
        if not gaps:
            continue
        seconds, evicted, back = max(gaps)
        size = int(problem.sizes[v])
        free = float(seconds) - host.seconds_to_send(size) - host.seconds_to_fetch(size)
        trigger = bisect_right(begins.tolist(), begins[back] - host.seconds_to_fetch(size)) - 1
        found.append(Candidate(Swap(v, evicted, min(back, max(trigger, evicted + 1))), free, back))
    return found


def _why(least: int) -> str:
    return f"with all that it swaps and makes again, its plan takes {exact_bytes(least)}"
