"""Improve a plan within its budget by single runs: drop one, and if that breaks the budget, rerun cheaper ops instead.

Any set of runs is a schedule; only memory limits it (`checkmate.core.schedule.Schedule.from_runs`). A value is at hand
from a run of its producer to its last reader before the next such run. So a move changes the intervals of a few values,
and the bytes at hand along them: microseconds, where a simulation takes milliseconds.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Task
from checkmate.solvers.common.schedules import Stages, as_matrix

DEPTH = 6  # runs added at most in exchange for one
MOST_PLACES = 8  # times the ops, beside those that run
LESS = 1 - 1e-12  # times a cost: what is not below may be the same sum in another order
TRIES = 5  # values tried at most for each of these


def exchange(task: Task, stages: Stages, *, quiet: int = 5) -> Stages:
    """The ops that run in each stage within the budget, no dearer than these; runs out of order stay, or are dropped.

    Args:
        quiet: end after so many new starts, from the best with random changes, that came to nothing.
    """
    line = Line(task.problem, task.budget, as_matrix(stages), stages)
    rng = np.random.default_rng(task.seed)
    best, best_cost = line.on.copy(), line.cost
    starts = 0
    while starts <= quiet and not task.clock.is_over:
        # Try to save each run that could be, the dearest first.
        before = line.cost
        again = np.flatnonzero(line.on & ~line.fixed)
        for p in again[np.argsort(-line.seconds[again], kind="stable")].tolist():
            if line.on[p]:
                _save(line, p, line.cost * LESS)
            if task.clock.is_over:
                break
        if line.cost < best_cost * LESS:
            best, best_cost, starts = line.on.copy(), line.cost, 0
        if line.cost < before * LESS:
            continue
        # Start anew: from the best, drop a few runs at any price, or run a few more places where that still fits.
        starts += 1
        line.become(best)
        drop = rng.random() < 0.5
        for p in rng.permutation(np.flatnonzero(line.on & ~line.fixed if drop else ~line.on))[: 2 + starts].tolist():
            if drop and line.on[p]:
                _save(line, p, float("inf"))
            elif not drop:
                line.flip(p)
                if not line.fits():
                    line.flip(p)
    line.become(best)
    return line.runs_in_stages()


def _save(line: Line, p: int, limit: float) -> None:
    """Drop the run at p and the runs only it needed, and add other runs where bytes are short.

    Undone if that does not fit, or the cost does not end below the limit.
    """
    line.flip(p)
    undo = [p]
    # Drop runs before p whose values nobody reads any more.
    todo = [p]
    while todo:
        for v in line.tables.inputs[line.op_at[todo.pop()]]:
            q = max((q for q, makes in line.touches[v] if makes and q < p and line.on[q]), default=None)
            if q is None or line.fixed[q]:
                continue
            outputs = line.tables.outputs[line.op_at[q]]
            if not any(first == q < last for w in outputs for first, last in line.intervals(w)):
                line.flip(q)
                undo.append(q)
                todo.append(q)
    # At the place with most bytes at hand, let a value go until it is read next, and run its producer again there.
    for _ in range(DEPTH):
        if line.fits():
            break
        worst = int(line.bytes_at.argmax())
        peak = int(line.bytes_at[worst])
        for q in itertools.islice(line.offers(worst), TRIES):
            if line.cost + line.seconds[q] >= limit:
                continue
            line.flip(q)
            if line.bytes_at[worst] < peak:
                undo.append(q)
                break
            line.flip(q)
        else:
            break
    if not line.fits() or line.cost >= limit:
        for q in reversed(undo):
            line.flip(q)


def places_of(problem: Problem, R: np.ndarray) -> np.ndarray:
    """(P, 2) int: (stage, op) in execution order, of R (T, T) and where more runs can be useful.

    In stage t those are the ops whose values op t reads, the ops that may not run after stage t and whose values may be
    read later, the ops whose values these read, and so on; the ones farthest from t are left out if there are too many.
    """
    graph, until, T = problem.graph, problem.limits.last_stage, len(problem.graph.ops)
    free = {k for k, op in enumerate(graph.ops) if op.pinned is None}
    deps = [[d for d in ds if d in free] for ds in graph.deps]
    closes = {t: free.intersection(graph.values[v].producer for v in vs) for t, vs in problem.limits.closing.items()}
    layers: list[list[tuple[int, int]]] = []  # by distance from the stage's own op
    reached = [{t} for t in range(T)]
    border = [[t] for t in range(T)]
    while sum(map(len, layers)) <= MOST_PLACES * T and any(border):
        for t, ks in enumerate(border):
            following = {d for k in ks for d in deps[k] if t <= until.get(d, T)}.union(closes.pop(t, ()))
            border[t] = sorted(following - reached[t])
            reached[t].update(border[t])
        layers.append([(t, k) for t, ks in enumerate(border) for k in ks])
    if sum(map(len, layers)) > MOST_PLACES * T and len(layers) > 1:
        layers.pop()
    places = np.eye(T, dtype=bool) | R
    t, k = np.array([place for layer in layers for place in layer], dtype=np.int64).reshape(-1, 2).T
    places[t, k] = True
    return np.argwhere(places)


class Line:
    """Places in execution order, each on or off, and the bytes in memory at each."""

    def __init__(self, problem: Problem, budget: int, R: np.ndarray, stages: Sequence[list[int]] = ()) -> None:
        """Take R (T, T); or R with ``stages``, whose runs out of order get no other places."""
        tables, T = Tables.of(problem), len(R)
        self.tables, self.T, self.room = tables, T, budget - tables.resident
        # The places: every stage and op that may run there, in the order in which they would.
        places = places_of(problem, R)
        for t in reversed([t for t, ops in enumerate(stages) if ops != sorted(set(ops))]):
            begin, end = np.searchsorted(places[:, 0], [t, t + 1])
            places = np.concatenate([places[:begin], [(t, k) for k in stages[t]], places[end:]])
        self.stage, self.op = places.T
        self.op_at: list[int] = self.op.tolist()
        self.switches = bytearray(R[self.stage, self.op])  # one for each place: fast to read one at a time
        self.on = np.frombuffer(self.switches, dtype=bool)
        self.fixed = self.stage == self.op
        self.seconds = np.array(tables.seconds)[self.op]
        self.cost = float(self.seconds[self.on].sum())
        self.place = {(t, k): p for p, (t, k) in enumerate(places.tolist())}
        # Per value the places that read or make it; the values that may go, cheapest seconds per byte first.
        self.touches = tables.touches(self.op_at)
        movable = [
            v
            for v, k in enumerate(tables.producer)
            if k >= 0 and tables.size[v] and self.touches[v] and not tables.result[v] and not tables.pinned[k]
        ]
        self.cheap = np.array(sorted(movable, key=lambda v: tables.seconds[tables.producer[v]] / tables.size[v]), int)
        self.begins = np.array([touches[0][0] if touches else 0 for touches in self.touches])
        self.ends = np.array([touches[-1][0] if touches else 0 for touches in self.touches])
        # For offers at one place.
        self.asked_at, self.around = -1, self.cheap  # the place that offers were last for, and values touched around it
        self.barred = np.zeros(len(tables.producer), dtype=bool)  # values that are not at hand or not idle there
        # The bytes at each place, counted value by value.
        self.bytes_at = np.zeros(len(places), dtype=np.int64)
        self.max_runs, self.runs_of = tables.max_runs, np.bincount(self.op[self.on], minlength=T)
        self.forward_ends = self.place.get((tables.boundary - 1, tables.boundary - 1), 0)
        self.size = [size or int(v in tables.recomputed) for v, size in enumerate(tables.size)]  # absence counts
        self.saves: dict[int, dict[int, int]] = {}  # per value that ops may write over, the bytes that each saves
        for k, savings in enumerate(tables.savings):
            for v, saved in savings:
                self.saves.setdefault(v, {})[k] = saved
        self.saved: dict[int, list[int]] = {}  # per place, by each value that goes with its run
        for v in range(len(tables.producer)):
            self._count(v, 1, self._held(v))
        self.bytes_at[self.on] += np.array(tables.workspace)[self.op[self.on]]

    def runs_in_stages(self) -> Stages:
        """The ops that run in each stage, in order."""
        stages: Stages = [[] for _ in range(self.T)]
        for t, k in zip(self.stage[self.on].tolist(), self.op[self.on].tolist(), strict=True):
            stages[t].append(k)
        return stages

    def fits(self) -> bool:
        """Tell whether no place exceeds the budget and no rule is broken."""
        often = any(self.runs_of[k] > most for k, most in self.max_runs.items())
        return bool(self.bytes_at.max() <= self.room) and not often

    def become(self, on: np.ndarray) -> None:
        """Set the switches of all places."""
        for p in np.flatnonzero(self.on != on).tolist():
            self.flip(p)

    def flip(self, p: int) -> None:
        """Switch place p."""
        tables, k = self.tables, int(self.op[p])
        touched = [v for v in (*tables.inputs[k], *tables.outputs[k]) if self.size[v] or v in self.saves]
        self.barred[touched] = False
        parts = [(v, *self._between_runs(v, p)) for v in touched]
        before = [self._held(*part) for part in parts]
        sign = -1 if self.on[p] else 1
        self.on[p] = not self.on[p]
        self.cost += sign * float(self.seconds[p])
        self.bytes_at[p] += sign * tables.workspace[k]
        self.runs_of[k] += sign
        # Values that stay where they were need no counting.
        after = [self._held(*part) for part in parts]
        changed = [(v, old, new) for v, old, new in zip(touched, before, after, strict=True) if old != new]
        for v, old, _ in changed:
            self._count(v, -1, old)
        for v, _, new in changed:
            self._count(v, 1, new)

    def _between_runs(self, v: int, p: int) -> tuple[int, int]:
        """The touches of v, begin and end, from the last run of its producer before place p up to the next behind p."""
        touches, on = self.touches[v], self.switches
        if self.tables.result[v]:
            return 0, len(touches)
        begin = end = bisect_left(touches, (p, False))
        while begin > 0:
            begin -= 1
            q, makes = touches[begin]
            if makes and on[q]:
                break
        while end < len(touches):
            q, makes = touches[end]
            if makes and q > p and on[q]:
                break
            end += 1
        return begin, end

    def _held(self, v: int, begin: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """The first and last places of v in memory, of these touches; of results each run again counts by itself."""
        if not self.tables.result[v]:
            return self.intervals(v, begin, end)
        runs = [p for p, makes in self.touches[v] if makes and self.switches[p]]
        return [(runs[0], len(self.bytes_at) - 1), *((p, p) for p in runs[1:])]

    def _count(self, v: int, sign: int, held: list[tuple[int, int]]) -> None:
        """Add the bytes of v where it is in memory; with sign -1 subtract them."""
        size, is_result = sign * self.size[v], self.tables.result[v]
        gone, saves = v in self.tables.recomputed and not is_result, None if is_result else self.saves.get(v)
        for first, last in held:
            self.bytes_at[first : last + 1] += size
            if gone and first <= self.forward_ends < last:  # as if nothing had room for it there
                self.bytes_at[self.forward_ends] += (abs(self.room) + 1) * sign
            if saves and (saved := saves.get(self.op_at[last])):
                # The value goes with the last run, or no longer; of several the best counts.
                savings = self.saved.setdefault(last, [])
                if sign < 0:
                    savings.remove(saved)
                self.bytes_at[last] -= sign * max(0, saved - max(savings, default=0))
                if sign > 0:
                    savings.append(saved)

    def intervals(self, v: int, begin: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """The intervals of v in memory: from each run of its producer to the last reader before the next run.

        Args:
            begin, end: only of these touches.
        """
        spans: list[tuple[int, int]] = []
        first = last = -1
        on = self.switches
        for p, makes in self.touches[v][begin:end]:
            if on[p]:
                if makes:
                    if first >= 0:
                        spans.append((first, last))
                    first = p
                last = p
        if first >= 0:
            spans.append((first, last))
        return spans

    def offers(self, p: int) -> Iterator[int]:
        """Places that are off at which a value idle at p could be remade, the cheapest per byte first."""
        if p != self.asked_at:
            self.asked_at, self.barred[:] = p, False
            self.around = self.cheap[(self.begins[self.cheap] < p) & (self.ends[self.cheap] > p)]
        ways = dict(self.tables.savings[int(self.op[p])])
        for v in self.around[~self.barred[self.around]].tolist():
            following = self._following(v, p)
            if following is not None and following[0] == p and v in ways:  # it can go with the run
                following = self._following(v, p + 1)
            if following is None or following[1] or following[0] == p:
                self.barred[v] = True
                continue
            k = self.tables.producer[v]
            q = self.place.get((min(int(self.stage[following[0]]), self.tables.last_stage[k]), k))
            if q is not None and p < q and not self.on[q]:
                yield q

    def _following(self, v: int, p: int) -> tuple[int, bool] | None:
        """The first touch of v at or after place p that is on."""
        touches, on = self.touches[v], self.switches
        for i in range(bisect_left(touches, (p, False)), len(touches)):
            if on[touches[i][0]]:
                return touches[i]
        return None
