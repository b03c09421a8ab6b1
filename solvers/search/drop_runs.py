"""Drop the runs of a plan whose results could have stayed within its budget.

A pass goes through the stages once more, in order. What the plan needs when a stage begins is always at hand; whatever
else there is room for stays as well, and in each stage only that runs which is missing. Where that does not fit, a
stage lets go of what the plan does not need and runs as planned, which fits. So a plan is found wherever there was one.
The plans of small peaks (`checkmate.solvers.search.backward_search`) make everything again in each stage, and need it
most.

Which values stay is decided by their worth. `drop_runs` tries a few: seconds per byte and next use. Close to the
smallest budget no formula is right everywhere. There the relaxation of some moments says what is best kept
(`checkmate.solvers.linear.moments`): `GuidedPasses` multiplies the worth of a value by exp(a X), with X the share of it
that the relaxation keeps at the next moment, and then by factors drawn at random, its tilt. A change counts if the pass
it gives is no dearer; large values are tried more often, since they decide what fits.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkmate.core.inplace import Saving
from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.common.schedules import Stages, as_matrix, obeys_limits, useful_runs

Worth = Callable[[int, int], float]  # of a value in a stage: the higher, the sooner it stays
ROUNDS = 4  # at most: most plans ask for less
WORTH_A_ROUND = 1e-3  # of the cost: after a smaller gain none follows
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of what is there beside the plan's needs, to try to run a stage with
URGENCIES = (0.0, 0.5, 1.0)  # powers of the stages to the next use
TRUST = (0.0, 4.0, 12.0)  # a: in what the relaxation keeps
POOL = 4  # passes improved side by side
ROUND = 100  # passes, after which the dearest starts over from the cheapest
QUIET = 5  # rounds without progress after which the search ends
COUNTS = (1, 2, 4, 8, 16)  # values tilted at once
STEPS = (1.0, 3.0)  # standard deviations of a tilt, in the logarithm


def drop_runs(problem: Problem, budget: int, runs: Stages, clock: Clock) -> Stages:
    """The ops that run in each stage of a plan within the budget: fewer than these, which fit it too; in any order.

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
            candidate = useful_runs(problem.graph, stages.run(worth))
            seconds = stages.tables.seconds_of(candidate)
            if seconds < cost and obeys_limits(problem, as_matrix(candidate)):
                best, cost = candidate, seconds
            if clock.is_over:
                return best
        if cost >= before * (1 - WORTH_A_ROUND):
            break
    return best


@dataclass
class _Pass:
    cost: float  # seconds
    dear: np.ndarray  # (V,) float64: seconds per byte
    urgency: float
    trust: float
    tilt: np.ndarray  # (V,) float64, logarithms
    stages: Stages


class GuidedPasses:
    """A random search over the worths of values, beside a plan within the budget; each call of `search` continues it.

    Args:
        task: its seed is that of the changes. The same seed gives the same plans where no clock binds.
        runs: per stage, the ops that run in the plan.
        moments: ops, ascending; none: nothing guides the passes.
        kept: (m, V) float64, the share of each value that a relaxation keeps at each moment.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> everything = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    >>> GuidedPasses(Task(problem, 3), everything, [2], np.ones((1, 4))).search(Clock(1.0))
    [[[0], [1], [2], [3]]]
    """

    def __init__(self, task: Task, runs: Stages, moments: Sequence[int] = (), kept: np.ndarray | None = None) -> None:
        problem = task.problem
        kept = np.zeros((0, len(problem.sizes))) if kept is None else kept
        self.problem, self.stages = problem, _Stages(problem, task.budget, runs)
        self.rng = np.random.default_rng(task.seed)
        tables, T = self.stages.tables, len(runs)
        self.next_moment = [bisect.bisect_left(moments, t + 1) for t in range(T)]
        self.kept = np.vstack([kept, np.zeros((1, kept.shape[1]))])
        # Seconds per byte: of a value's own op, of all that it is made from, and between them.
        made_from = np.eye(T, dtype=bool)
        for k, deps in enumerate(problem.graph.deps):
            for d in deps:
                made_from[k] |= made_from[d]
        makers = np.array(tables.producer)
        own, all_ = (np.where(makers < 0, 0.0, by[makers]) for by in (problem.seconds, made_from @ problem.seconds))
        self.dear = [by / np.maximum(1, problem.sizes) + 1e-30 for by in (all_, own, np.sqrt(own * all_))]
        goes = [k >= 0 and not tables.pinned[k] for k in tables.producer]
        stays = [result or not users for result, users in zip(tables.result, tables.users, strict=True)]
        bytes_that_go = problem.sizes * goes * np.logical_not(stays)
        self.chances = bytes_that_go / max(1, bytes_that_go.sum())  # (V,): how likely each is changed
        none = np.zeros(len(makers))
        trust = TRUST if moments else TRUST[:1]
        self.first = [*itertools.product(self.dear, URGENCIES, trust, [none])]  # still to be tried as they are
        self.pool: list[_Pass] = []  # the cheapest first
        self.given: set[float] = set()  # costs of those that a search gave

    def plain(self, clock: Clock) -> Stages | None:
        """The ops that run in each stage of the cheapest pass without tilts; None if none was made."""
        while self.first and not clock.is_over:
            self.pool += self._pass(*self.first.pop(0))
        self.pool = sorted(self.pool, key=lambda entry: entry.cost)[:POOL]
        return self.pool[0].stages if self.pool else None

    def search(self, clock: Clock) -> list[Stages]:
        """The ops that run in each stage, of a few of the cheapest passes that no call has given before.

        It ends before the clock is over after rounds without progress.
        """
        self.plain(clock)
        quiet = 0  # rounds without progress
        while self.pool and self.chances.any() and quiet < QUIET and not clock.is_over:
            best = self.pool[0].cost
            for _ in range(ROUND):
                # Change a few values' tilts at random; they stay so if the pass they give is no dearer.
                i = int(self.rng.integers(len(self.pool)))
                old, tilt = self.pool[i], self.pool[i].tilt.copy()
                changed = self.rng.choice(len(tilt), self.rng.choice(COUNTS), p=self.chances)
                tilt[changed] += self.rng.normal(0.0, self.rng.choice(STEPS), len(changed))
                for new in self._pass(old.dear, old.urgency, old.trust, tilt):
                    if new.cost <= old.cost:
                        self.pool[i] = new
                if clock.is_over:
                    break
            self.pool.sort(key=lambda entry: entry.cost)
            quiet = 0 if self.pool[0].cost < best * (1 - 1e-9) else quiet + 1
            self.pool[-1] = self.pool[0]
        plans = {entry.cost: entry.stages for entry in self.pool if entry.cost not in self.given}
        self.given.update(plans)
        return [*plans.values()]

    def _pass(self, dear: np.ndarray, urgency: float, trust: float, tilt: np.ndarray) -> list[_Pass]:
        worth = (dear * np.exp(tilt + trust * self.kept)).tolist()  # by the moments before the next stage
        after = self.next_moment

        def worth_of(v: int, t: int) -> float:
            return worth[after[t]][v] / (self.stages.next_use[v] - t + 1) ** urgency

        stages = useful_runs(self.problem.graph, self.stages.run(worth_of))
        if not obeys_limits(self.problem, as_matrix(stages)):
            return []
        return [_Pass(self.stages.tables.seconds_of(stages), dear, urgency, trust, tilt, stages)]


class _Stages:
    def __init__(self, problem: Problem, budget: int, runs: Stages) -> None:
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

    def run(self, worth: Worth) -> Stages:
        runs: Stages = []
        at_hand: set[int] = set()
        tables, users = self.tables, self.tables.users
        self.next_use = [float(us[0]) if us else np.inf for us in users]
        turn = [0] * len(users)
        for t in range(self.T):
            extra = sorted(at_hand - self.needed[t], key=lambda v: worth(v, t), reverse=True)
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
            at_hand = set(self.needed[t + 1])
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
                    at_hand.add(v)
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
