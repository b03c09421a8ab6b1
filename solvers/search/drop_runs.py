"""Shorten a schedule within its budget: drop runs whose results could have stayed in memory.

The plans of the smallest peaks (`checkmate.solvers.search.backward_search`) make everything again in each stage. Here
the stages are gone through once more, in order. What the plan needs when a stage begins is always at hand; whatever
else there is room for stays as well, and in each stage only that runs which is missing. Where that does not fit, a
stage lets go of what the plan does not need and runs as planned, which fits. So a plan is found wherever there was one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from checkmate.core.inplace import Saving
from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock
from checkmate.solvers.common.schedules import as_matrix, obeys_limits, useful_runs

Worth = Callable[[int, int], float]  # of a value in a stage: the higher, the sooner it stays
ROUNDS = 4  # at most: most plans ask for less
WORTH_A_ROUND = 1e-3  # of the cost: after a smaller gain none follows
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of what is there beside the plan's needs, to try to run a stage with


def drop_runs(problem: Problem, budget: int, runs: list[list[int]], clock: Clock) -> list[list[int]]:
    """Fewer ops in each stage of a plan within the budget than these, which are within it too, in any order.

    Stages run in PyTorch's order wherever that fits, and as they were where it does not.

    Args:
        clock: once it is over nothing more is tried; one way through the stages always is.

    >>> five = Problem.from_dag([[], [0], [1], [0, 1], [0, 2]], seconds=[1] * 5, sizes=[3, 4, 2, 1, 1])
    >>> drop_runs(five, 9, [[0], [0, 1], [0, 1, 2], [0, 1, 3], [2, 0, 4]], Clock())
    [[0], [1], [2], [3], [2, 0, 4]]
    """
    best, cost = runs, Tables.of(problem).seconds_of(runs)
    for _ in range(ROUNDS):
        stages, before = _Stages(problem, budget, best), cost
        for worth in stages.worths():
            found = useful_runs(problem.graph, stages.run(worth))
            taken = stages.tables.seconds_of(found)
            if taken < cost and obeys_limits(problem, as_matrix(found)):
                best, cost = found, taken
            if clock.is_over:
                return best
        if cost >= before * (1 - WORTH_A_ROUND):
            break
    return best


class _Stages:
    def __init__(self, problem: Problem, budget: int, runs: list[list[int]]) -> None:
        self.tables = tables = Tables.of(problem)
        self.T, self.planned = len(runs), runs
        self.moving = [k >= 0 and not tables.result[v] for v, k in enumerate(tables.producer)]
        self.needed = [set[int]() for _ in range(self.T + 1)]  # when each stage begins
        for t in reversed(range(self.T)):
            needed = set(self.needed[t + 1])
            for k in reversed(runs[t]):
                needed.difference_update(tables.outputs[k])
                needed.update(v for v in tables.inputs[k] if self.moving[v])
            self.needed[t] = needed
        self.room = budget - np.cumsum(
            [tables.resident, *(sum(tables.size[v] for v in vs if tables.result[v]) for vs in tables.outputs)]
        )
        self.next_use: list[float] = []

    def worths(self) -> tuple[Worth, ...]:
        """Priorities for keeping values: seconds per byte and next use, or next use alone."""
        makers = zip(self.tables.producer, self.tables.size, strict=True)
        dear = [(self.tables.seconds[k] + 1e-12) / max(1, size) for k, size in makers]
        return (
            lambda v, t: dear[v] / (self.next_use[v] - t + 1),
            lambda v, t: dear[v] / (self.next_use[v] - t + 1) ** 0.5,
            lambda v, t: 1.0 / (self.next_use[v] - t + 1),
        )

    def run(self, worth: Worth) -> list[list[int]]:
        runs: list[list[int]] = []
        there: set[int] = set()
        tables, users = self.tables, self.tables.users
        self.next_use = [float(us[0]) if us else np.inf for us in users]
        turn = [0] * len(users)
        for t in range(self.T):
            extra = sorted(there - self.needed[t], key=lambda v: worth(v, t), reverse=True)
            for start, ops in self._ways(t, extra):
                level, idle, over = self._levels(t, start, ops)
                if level.max() <= self.room[t]:
                    break
            runs.append(ops)
            for v in tables.inputs[t]:
                turn[v] += 1
                self.next_use[v] = float(users[v][turn[v]]) if turn[v] < len(users[v]) else np.inf
            # Keep values for the next stage: those that the plan needs, and others that fit.
            slack = self.room[t] - level
            least = int(slack.min(initial=self.room[t + 1]))  # or less: most values fit anywhere
            there = set(self.needed[t + 1])
            going = tables.recomputed if t + 1 == tables.boundary else ()
            useful = [v for v in idle if self.next_use[v] < np.inf and v not in going]
            for v in sorted(useful, key=lambda v: worth(v, t), reverse=True):
                begin, size = idle[v], tables.size[v]
                savings = over.get(begin - 1, [])
                written = next((saving for saving in savings if saving[0] == v), None)
                less = 0  # bytes by which the best saving, which comes first, shrinks without this one
                if written is not None and written == savings[0]:
                    less = written[1] - (savings[1][1] if len(savings) > 1 else 0)
                fits = size <= least or size <= slack[begin:].min(initial=self.room[t + 1])
                if fits and (not less or less <= slack[begin - 1]):
                    slack[begin:] -= size
                    least -= size
                    there.add(v)
                    if written is not None:
                        savings.remove(written)
                        slack[begin - 1] -= less
                        least -= less
        return runs

    def _ways(self, t: int, extra: list[int]) -> Iterator[tuple[set[int], list[int]]]:
        """Yield sets of values that stage t may begin with, and its runs: first most values, last as planned."""
        tables = self.tables
        for share in SHARES:
            start = self.needed[t].union(extra[: int(share * len(extra))])
            # The missing ops run: for op t, and for what the plan needs in the next stage.
            todo = [v for v in (*tables.inputs[t], *self.needed[t + 1]) if tables.producer[v] != t]
            ops = {t}
            while todo:
                v = todo.pop()
                k = tables.producer[v]
                if v not in start and self.moving[v] and k not in ops:
                    ops.add(k)
                    todo += tables.inputs[k]
            missing = sorted(ops)
            yield start, missing
            as_planned = [k for k in self.planned[t] if k in ops]
            if as_planned != missing and set(as_planned).issuperset(missing):
                yield start, as_planned
        yield self.needed[t], self.planned[t]  # values that go within the stage are remade there

    def _levels(
        self, t: int, start: set[int], ops: list[int]
    ) -> tuple[np.ndarray, dict[int, int], dict[int, list[Saving]]]:
        """Bytes in memory beside results while each op runs, and the op from which each value idles in this stage.

        And what each op may write over as long as it is not kept for the next stage, which counts in the bytes.
        """
        tables = self.tables
        change = np.zeros(len(ops) + 1, dtype=np.int64)
        own = np.zeros(len(ops), dtype=np.int64)
        last: dict[int, int] = dict.fromkeys(start, -1)
        born: dict[int, int] = dict.fromkeys(start, 0)
        # Each op's own bytes, and the intervals of movable values that it makes or reads.
        for i, k in enumerate(ops):
            own[i] = tables.workspace[k] + sum(tables.size[v] for v in tables.outputs[k] if not self.moving[v])
            for v in tables.outputs[k]:
                if self.moving[v]:
                    if last.get(v, -1) >= born.get(v, 0):  # it was at hand before, and has gone
                        change[born[v]] += tables.size[v]
                        change[last[v] + 1] -= tables.size[v]
                    born[v] = last[v] = i
            for v in tables.inputs[k]:
                if self.moving[v]:
                    last[v] = i
        # Close the last intervals; values that the next stage needs stay to its end.
        idle = {}
        for v, begin in born.items():
            end = len(ops) - 1 if v in self.needed[t + 1] else last[v]
            if end >= begin:
                change[begin] += tables.size[v]
                change[end + 1] -= tables.size[v]
            if v not in self.needed[t + 1]:
                idle[v] = end + 1
        # An op may write over an input that dies with it.
        over = {}
        for i, k in enumerate(ops):
            dying = [saving for saving in tables.savings[k] if idle.get(saving[0]) == i + 1]
            if dying:
                over[i] = dying
                own[i] -= dying[0][1]
        return change.cumsum()[:-1] + own, idle, over
