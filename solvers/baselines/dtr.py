"""A plan of the runs that dynamic tensor rematerialization (Kirisame et al., ICLR 2021) would do at run time.

The runtime meets one op after the other and knows nothing of those to come. Before an op runs, its inputs are locked
and the missing ones made again, recursively; under pressure the value with the least score goes. With c the seconds of
the op that makes a value, m its bytes and s the seconds since it was last touched, the paper's scores are

    h_full  (c + seconds of the evicted neighbourhood) / (m s)    what must run to bring it back, and what waits for it
    h_eq    the same, the neighbourhood taken from classes        cheap to keep up to date, and roughly right
    local   c / (m s)
    LRU     1 / s
    size    1 / m
    MSPS    (c + seconds of the evicted ancestors) / m

Ops that the simulated runtime runs between the first executions of two ops in turn belong to the later one's stage. A
value that no op of the program still reads is evicted at once (the paper's eager eviction) and can come back; it is
dropped, and counts in no neighbourhood, once nothing can need it to come back. The value of a pinned op cannot come
back. When the program is done with such a value but others are made from it, it is held, or goes for good if what is
made from it stays instead (the paper's banishing): whichever takes fewer bytes.

We differ from the paper:

1. A stage of a static plan runs each op once, in the order of the graph; runs that nobody uses are left out; memory is
   freed by liveness. So the plan takes less memory than the runtime saw, or more, and the budget that the runtime is
   told is searched for, until the simulated peak of the plan fits ours.
2. h_full and MSPS count an op with several evicted outputs once; h_eq counts each output.
3. An op that may write over a value (`checkmate.core.inplace`) does so where that goes right after it.
4. A re-run drops the old copies of its outputs first; a result of the step is held, so that a second copy counts.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Incumbent, OutOfTime, Remarks, Task
from checkmate.solvers.common.schedules import Stages, as_matrix, cost_of, without_forbidden, without_useless
from checkmate.solvers.search.greedy import DeadEnd
from checkmate.units import format_bytes

METHOD = "dtr"
TRIES = 5  # budgets that the runtime is told, for each heuristic
MOST_RUNS = 50  # for each op of the graph, on average; beyond it a run goes round in circles


def dtr(task: Task, incumbent: Incumbent, *, heuristic: str | None = None) -> Remarks:
    """A plan of the runs of dynamic tensor rematerialization. No plan where no run fits.

    Args:
        heuristic: one of `HEURISTICS`; None tries them all, for as much time each, and the cheapest plan counts.
            ``details`` says which it was, and what each of them cost.

    Raises:
        ValueError: if there is no such heuristic.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, 3, method="dtr", heuristic="h_eq").cost
    4.0
    """
    if heuristic is not None and heuristic not in HEURISTICS:
        raise ValueError(f"There is no heuristic {heuristic!r}. They are {', '.join(HEURISTICS)}.")
    problem, tables = task.problem, Tables.of(task.problem)
    names = tuple(HEURISTICS) if heuristic is None else (heuristic,)
    costs = dict.fromkeys(names, float("inf"))  # seconds of the cheapest plan that fits
    told_for: dict[str, int] = {}  # bytes, for that plan
    stuck, out_of_time = None, False
    for i, name in enumerate(names):
        clock = replace(task.clock, seconds=task.clock.seconds * (i + 1) / len(names))
        # Tell the runtime the budget, and then by bisection more or less, as its plan fits or not. Where everything can
        # be kept, tell it that there is no pressure: it would evict for what it holds of pinned ops beyond their use.
        low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
        told = task.budget if task.budget < high else problem.resident + int(problem.sizes.sum()) + high
        for _ in range(TRIES):
            try:
                stages = Runtime(tables, told, HEURISTICS[name], clock).run()
            except OutOfTime:
                out_of_time = True
                break
            fits = True
            if isinstance(stages, DeadEnd):
                stuck = stages
            else:
                R = without_useless(problem.graph, without_forbidden(problem, as_matrix(stages)))
                if fits := incumbent.fits(R):
                    if (cost := cost_of(problem, R)) < costs[name]:
                        costs[name], told_for[name] = cost, told
                    incumbent.offer(R, METHOD)
            low, high = (told + 1, high) if fits else (low, told - 1)
            if low > high:
                break
            told = (low + high) // 2
    if incumbent.R is not None:
        best = min(names, key=lambda name: costs[name])
        return Remarks(details={"heuristic": best, "costs": costs, "told": told_for.get(best, 0)})
    reasons = []
    if stuck is not None:
        op = problem.graph.ops[stuck.op].name
        reasons.append(f"nothing was left to evict at {op}, {format_bytes(stuck.missing_bytes)} short")
    if incumbent.least_peak is not None:
        reasons.append(f"the plan of least peak takes {format_bytes(incumbent.least_peak)}")
    if out_of_time:
        reasons.append("a run passed the time limit or went round in circles")
    return Remarks("; ".join(reasons), stuck=None if stuck is None else stuck.op)


class Around:
    """Seconds of the evicted neighbourhood of a value in memory, by graph search: ancestors, descendants, both or none.

    A sum is kept until something that belongs to it, or would, comes or goes.
    """

    def __init__(self, tables: Tables, *, ancestors: bool = False, descendants: bool = False) -> None:
        made_of = [() if p < 0 else tables.inputs[p] for p in tables.producer]  # per value, others
        makes = [tuple(w for j in users for w in tables.outputs[j]) for users in tables.users]
        # pairs of neighbours: those that a value searches, and those that find it by searching
        ways = [(made_of, makes), (makes, made_of)]
        self.ways = [way for way, wanted in zip(ways, (ancestors, descendants), strict=True) if wanted]
        self.tables, self.evicted = tables, set[int]()
        self.sums = np.full(len(tables.producer), np.nan)  # (V,) seconds; nan: to be found again

    def mark(self, v: int, *, evicted: bool) -> None:
        """Mark value v as evicted, or as no longer evicted: it is back, or nothing will need it again."""
        (self.evicted.add if evicted else self.evicted.discard)(v)
        for _, back in self.ways:
            self.sums[[*self._reached(v, back)]] = np.nan

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the evicted ops around each of the values (N,), all resident; each op once per direction."""
        for v in values[np.isnan(self.sums[values])].tolist():
            self.sums[v] = 0.0
            for neighbours, _ in self.ways:
                ops = {self.tables.producer[w] for w in self._reached(v, neighbours) if w in self.evicted}
                self.sums[v] += sum(self.tables.seconds[k] for k in sorted(ops))
        return self.sums[values]

    def _reached(self, v: int, neighbours: list[tuple[int, ...]]) -> set[int]:
        """Value v and those reached from it through evicted ones."""
        seen, todo = {v}, [v]
        while todo:
            new = set(neighbours[todo.pop()]) - seen
            seen |= new
            todo += [w for w in new if w in self.evicted]
        return seen


class Classes:
    """Seconds of connected classes of evicted values beside a resident one, directions ignored: h_eq's ẽ*.

    Evicting merges the classes around a value. A value that comes back takes its seconds out of its class and leaves
    it; the rest stays one class even where nothing but this value held it together.
    """

    def __init__(self, tables: Tables) -> None:
        pairs = {(u, w) for k, inputs in enumerate(tables.inputs) for u in inputs for w in tables.outputs[k]}
        edges = sorted(pairs | {(w, u) for u, w in pairs})
        self.edge_from, self.edge_to = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        self.tables, self.evicted = tables, set[int]()
        self.class_of = np.full(len(tables.producer), -1, dtype=np.int64)  # its number; -1: not evicted
        self.total: list[float] = []  # seconds of each class there ever was

    def mark(self, v: int, *, evicted: bool) -> None:
        """Merge v with the classes around it; or, if v is no longer evicted, take v's seconds out of its class."""
        own = self.tables.seconds[self.tables.producer[v]]
        if not evicted:
            self.evicted.discard(v)
            self.total[self.class_of[v]] -= own
            self.class_of[v] = -1
            return
        self.evicted.add(v)
        around = np.unique(self.class_of[self.edge_to[self.edge_from == v]])
        around = around[around >= 0]
        self.class_of[np.isin(self.class_of, around)] = self.class_of[v] = len(self.total)
        self.total.append(own + sum(self.total[c] for c in around.tolist()))

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the classes next to each of these values, each class once."""
        V, total = len(self.class_of), np.array([*self.total, 0.0])
        mask = np.zeros(V, dtype=bool)
        mask[values] = True
        edges = mask[self.edge_from] & (self.class_of[self.edge_to] >= 0)
        pairs = np.unique(self.edge_from[edges] * len(total) + self.class_of[self.edge_to[edges]])
        return np.bincount(pairs // len(total), weights=total[pairs % len(total)], minlength=V)[values]


def _per_stale(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """X / staleness, infinite for values that were touched just now."""
    return np.divide(x, s, out=np.full(len(s), np.inf), where=s > 0)


class Heuristic(NamedTuple):
    """The eviction score: the value with the lowest score goes first."""

    around: Callable[[Tables], Around | Classes]
    score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # of seconds, bytes above 0 and staleness, (N,)


HEURISTICS = {
    "h_full": Heuristic(partial(Around, ancestors=True, descendants=True), lambda c, m, s: _per_stale(c / m, s)),
    "h_eq": Heuristic(Classes, lambda c, m, s: _per_stale(c / m, s)),
    "local": Heuristic(Around, lambda c, m, s: _per_stale(c / m, s)),
    "LRU": Heuristic(Around, lambda c, m, s: _per_stale(np.ones(len(s)), s)),
    "size": Heuristic(Around, lambda c, m, s: 1 / m),
    "MSPS": Heuristic(partial(Around, ancestors=True), lambda c, m, s: c / m),
}


class Runtime:
    """The runtime's state between two ops: values in memory, ops that may run again, remaining users of values."""

    def __init__(self, tables: Tables, budget: int, heuristic: Heuristic, clock: Clock) -> None:
        V, T = len(tables.producer), len(tables.inputs)
        self.tables, self.score, self.clock = tables, heuristic.score, clock
        self.around = heuristic.around(tables)
        self.room = budget - tables.resident
        self.turn = 0  # the op of the program that is to run
        self.now = 0.0  # seconds that the step has taken
        self.runs_left = MOST_RUNS * T
        self.size = np.array(tables.size, dtype=np.float64)
        self.seconds = np.array([0.0 if p < 0 else tables.seconds[p] for p in tables.producer])
        self.last = np.zeros(V)  # when each value was last touched
        self.at_hand = [p < 0 for p in tables.producer]
        self.locks = np.zeros(V, dtype=np.int64)
        self.evictable = np.zeros(V, dtype=bool)  # at hand, of some size, no result, and its op may run again
        self.to_read = [len(users) for users in tables.users]  # ops of the program that are still to read it
        self.claims = list(self.to_read)  # ops that read it and are still to run, or may run again
        self.may_run = [True] * T  # the first time, or again
        self.held: set[int] = set()  # cannot come back, not read by the program any more, but others are made of them

    def run(self) -> Stages | DeadEnd:
        """The ops that run in each stage, in order, repeats included; or the op at which nothing was left to evict.

        Raises:
            OutOfTime: once the time is over, or after `MOST_RUNS` for each op.
        """
        stages = []
        for t in range(len(self.tables.inputs)):
            ran = self.stage(t)
            if isinstance(ran, DeadEnd):
                return ran
            stages.append(ran)
        return stages

    def stage(self, t: int) -> list[int] | DeadEnd:
        """Run op t for the first time, after the ops that remake its missing inputs."""
        tables, ran, waiting, self.turn = self.tables, [], [t], t
        self.locks[list(tables.inputs[t])] += 1
        while waiting:
            # the deepest op that is missing no input runs first
            k = waiting[-1]
            inputs, outputs = tables.inputs[k], tables.outputs[k]
            missing = next((v for v in inputs if not self.at_hand[v]), None)
            if missing is not None:
                waiting.append(tables.producer[missing])
                self.locks[list(tables.inputs[waiting[-1]])] += 1
                continue
            lacking = self._make_room(k)
            if lacking > 0:
                return DeadEnd(k, lacking)
            self.now += tables.seconds[k]
            for v in outputs:
                if not self.at_hand[v]:
                    if v in self.around.evicted:
                        self.around.mark(v, evicted=False)
                    self.at_hand[v] = True
                    self.room -= tables.size[v]
                    self.evictable[v] = tables.size[v] > 0 and not tables.result[v] and self.may_run[k]
            self.last[[*inputs, *outputs]] = self.now
            self.locks[list(inputs)] -= 1
            self._settle((*inputs, *outputs))
            ran.append(waiting.pop())
            self.runs_left -= 1
            if self.runs_left < 0 or self.clock.is_over:
                raise OutOfTime
        for v in tables.inputs[t]:
            self.to_read[v] -= 1
        if tables.pinned[t] or self._is_done(t):
            self._close([t])
        self._settle((*tables.inputs[t], *tables.outputs[t]))
        return ran

    def _make_room(self, k: int) -> int:
        """Evict the values of the lowest scores until op k fits; give the bytes still lacking."""
        outputs = list(self.tables.outputs[k])
        self.locks[outputs] += 1  # the old copy of an output is replaced: evicting it would gain nothing
        if self._lacking(k) > 0:
            self._release(even_at_a_loss=False)
        while self._lacking(k) > 0:
            v = self._choose()
            if v is not None:
                self._let_go(v, evicted=True)
            elif not self._release(even_at_a_loss=True):
                break
        self.locks[outputs] -= 1
        return self._lacking(k)

    def _lacking(self, k: int) -> int:
        """Bytes lacking for op k; it may write over an input that dies with it."""
        tables, reads = self.tables, int(k == self.turn)
        new = sum(tables.size[v] for v in tables.outputs[k] if not self.at_hand[v] or tables.result[v])
        goes = (
            saved
            for v, saved in tables.savings[k]
            if self.locks[v] == 1 and self.to_read[v] == reads and self.may_run[tables.producer[v]]
        )
        return new + tables.workspace[k] - next(goes, 0) - self.room

    def _choose(self) -> int | None:
        """The value with the lowest score, the first of equals; None if nothing may be evicted."""
        able = np.flatnonzero(self.evictable & (self.locks == 0))
        if not len(able):
            return None
        seconds = self.seconds[able] + self.around.seconds(able)
        return int(able[self.score(seconds, self.size[able], self.now - self.last[able]).argmin()])

    def _settle(self, values: tuple[int, ...]) -> None:
        """Free the values that the program no longer uses, unless something holds them."""
        tables = self.tables
        for v in values:
            if self.at_hand[v] and not (tables.result[v] or self.locks[v] or self.to_read[v]):
                if self.claims[v] == 0 or self.may_run[tables.producer[v]]:
                    self._let_go(v, evicted=self.claims[v] > 0)
                else:
                    self.held.add(v)

    def _let_go(self, v: int, *, evicted: bool) -> None:
        """Free a value: evict it if it may come back, else drop it."""
        self.at_hand[v] = self.evictable[v] = False
        self.held.discard(v)
        self.room += self.tables.size[v]
        if evicted:
            self.around.mark(v, evicted=True)

    def _is_done(self, k: int) -> bool:
        """Tell whether op k need not run again: each of its outputs is held to the end or used no more."""
        return self.may_run[k] and all(self.tables.result[v] or not self.claims[v] for v in self.tables.outputs[k])

    def _close(self, ops: list[int]) -> None:
        """Close ops that never run again: release their inputs, and so on upwards."""
        tables = self.tables
        while ops:
            k = ops.pop()
            self.may_run[k] = False
            self.evictable[list(tables.outputs[k])] = False
            for v in tables.inputs[k]:
                self.claims[v] -= 1
                if self.claims[v] or tables.result[v]:
                    continue
                if v in self.around.evicted:
                    self.around.mark(v, evicted=False)
                elif self.at_hand[v]:
                    self._let_go(v, evicted=False)
                if self._is_done(tables.producer[v]):
                    ops.append(tables.producer[v])

    def _release(self, *, even_at_a_loss: bool) -> bool:
        """Drop values that cannot be remade, if everything made from them stays instead.

        At a loss, only the one that binds the fewest bytes; whether there was any.
        """
        tables, released = self.tables, False

        def bound_bytes(v: int) -> int | None:
            """Bytes that would become unevictable if v went for good; None if some needed value is made from v."""
            products = [w for j in tables.users[v] if self.may_run[j] for w in tables.outputs[j]]
            needed = [w for w in products if self.claims[w] and not tables.result[w]]
            if self.locks[v] or not all(self.at_hand[w] for w in needed):
                return None
            return sum(tables.size[w] for w in needed if self.evictable[w])

        # Values that bind no more bytes than they have; at a loss, the one with the least loss.
        chosen = sorted(self.held)
        if even_at_a_loss:
            prices = {v: price - tables.size[v] for v in chosen if (price := bound_bytes(v)) is not None}
            chosen = sorted(prices, key=lambda v: prices[v])[:1]
        for v in chosen:
            price = bound_bytes(v) if v in self.held else None
            if price is not None and (even_at_a_loss or price <= tables.size[v]):
                self._close([j for j in tables.users[v] if self.may_run[j]])
                released = True
        return released
