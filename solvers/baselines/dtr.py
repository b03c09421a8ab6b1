"""A plan of what the runtime of dynamic tensor rematerialization (Kirisame et al., ICLR 2021) would run.

The runtime meets one op after the other and knows nothing of those to come. Before an op runs, its inputs are locked
and the missing ones made again, recursively; under pressure the value with the least score goes. With c the seconds of
the op that makes a value, m its bytes and s the seconds since it was last touched, the paper's scores are

    h_full  (c + seconds of the evicted neighbourhood) / (m s)    what must run to bring it back, and what waits for it
    h_eq    the same, the neighbourhood taken from classes        cheap to keep up to date, and roughly right
    local   c / (m s)
    LRU     1 / s
    size    1 / m
    MSPS    (c + seconds of the evicted ancestors) / m

Here the runtime is simulated under a budget; ops that it runs between the first executions of two ops in turn belong to
the later one's stage. We differ from the paper in what a static plan allows and asks for: a stage runs each op once, in
the order of the graph; runs that nobody uses are left out; memory is freed by liveness. So the plan takes less memory
than the runtime saw, or more, and the budget that the runtime is told is searched for, until the simulated peak of the
plan fits ours. And h_full and MSPS count an op with several evicted outputs once; h_eq counts each output.

What is let go without pressure: a value that no op of the program still reads is evicted at once (the paper's eager
eviction) and can come back; it is forgotten, and counts in no neighbourhood, once nothing can need it to come back.
What a pinned op makes cannot come back. When the program is done with such a value but others are made from it, it
stays, or goes for good if what is made from it stays instead (the paper's banishing): whichever takes fewer bytes.
An op that may write over a value (`checkmate.core.ways`) does so where that is evicted or forgotten right after it.
A re-run drops the old copies of its outputs first; a result of the step is held, so that a second copy counts.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import as_matrix, cost_of, without_forbidden, without_useless
from checkmate.solvers.common.task import Clock, OutOfTime, Task
from checkmate.solvers.search.greedy import Stuck
from checkmate.units import format_bytes

METHOD = "dtr"
TRIES = 5  # budgets that the runtime is told, for each heuristic
MOST_RUNS = 50  # for each op of the graph, on average; beyond it a run goes round in circles
SMALL = 0.01  # of the mean size: what `ignore_small` leaves alone


def dtr(
    task: Task, incumbent: Incumbent, *, heuristic: str | None = None, ignore_small: bool = False, sample: bool = False
) -> Remarks:
    """What dynamic tensor rematerialization would run, as a plan. No plan where no run fits.

    Args:
        heuristic: one of `HEURISTICS`; None tries them all, for as much time each, and the cheapest plan counts.
            ``details`` says which it was, and what each of them cost.
        ignore_small: evict no value smaller than a hundredth of the mean, unless there is nothing else.
        sample: look at √n of the n values that could go, drawn at random.

    Raises:
        ValueError: if there is no such heuristic.

    >>> from checkmate import solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, 3, method="dtr", heuristic="h_eq").cost
    4.0
    """
    if heuristic is not None and heuristic not in HEURISTICS:
        raise ValueError(f"There is no heuristic {heuristic!r}. They are {', '.join(HEURISTICS)}.")
    names = tuple(HEURISTICS) if heuristic is None else (heuristic,)
    tried = []
    for i, name in enumerate(names):
        rng = np.random.default_rng(task.seed) if sample else None
        within = replace(task.clock, limit=task.clock.limit * (i + 1) / len(names))
        tried.append(_try(replace(task, clock=within), incumbent, name, ignore_small, rng))
    if incumbent.R is None:
        return _explain(task.problem, incumbent, tried)
    best = min(tried, key=lambda one: one.cost)
    costs = {one.name: one.cost for one in tried}
    return Remarks(details={"heuristic": best.name, "costs": costs, "told": best.told})


@dataclass
class Tried:
    """What came of one heuristic, over the budgets that its runtime was told."""

    name: str
    cost: float = float("inf")  # seconds, of its cheapest plan that fits
    told: int = 0  # bytes, for that plan
    stuck: Stuck | None = None
    out_of_time: bool = False


def _try(task: Task, incumbent: Incumbent, name: str, ignore_small: bool, rng: np.random.Generator | None) -> Tried:
    """Tell the runtime the budget, and then by bisection more or less, as its plan fits or not.

    Where everything can be kept the runtime is told that there is no pressure: it may hold what a pinned op made
    beyond its last use, and would evict to make room for that.
    """
    problem, tables, tried = task.problem, Tables.of(task.problem), Tried(name)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    told = task.budget if task.budget < high else problem.resident + int(problem.sizes.sum()) + high
    for _ in range(TRIES):
        runtime = Runtime(tables, told, HEURISTICS[name], clock=task.clock, ignore_small=ignore_small, rng=rng)
        fits = True
        try:
            stages = runtime.run()
        except OutOfTime:
            tried.out_of_time = True
            break
        if isinstance(stages, Stuck):
            tried.stuck = stages
        else:
            R = without_useless(problem.graph, without_forbidden(problem, as_matrix(stages)))
            fits = incumbent.fits(R)
            if fits and (cost := cost_of(problem, R)) < tried.cost:
                tried.cost, tried.told = cost, told
            if fits:
                incumbent.offer(R, METHOD)
        low, high = (told + 1, high) if fits else (low, told - 1)
        if low > high:
            break
        told = (low + high) // 2
    return tried


def _explain(problem: Problem, incumbent: Incumbent, tried: list[Tried]) -> Remarks:
    """Why there is no plan, and the op in the way where one is known."""
    stuck = next((one.stuck for one in reversed(tried) if one.stuck is not None), None)
    reasons = []
    if stuck is not None:
        op = problem.graph.ops[stuck.op].name
        reasons.append(f"nothing was left to evict at {op}, {format_bytes(stuck.missing_bytes)} short")
    if incumbent.least_peak is not None:
        reasons.append(f"the plan of least peak takes {format_bytes(incumbent.least_peak)}")
    if any(one.out_of_time for one in tried):
        reasons.append("a run passed the time limit or went round in circles")
    return Remarks("; ".join(reasons), stuck=None if stuck is None else stuck.op)


class Neighbours:
    """Follows what is evicted, and says how many seconds of it hang together with a value at hand; here, none."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.evicted = [False] * len(tables.producer)
        self.made_of = [() if p < 0 else tables.inputs[p] for p in tables.producer]  # per value, others
        self.makes = [tuple(w for j in users for w in tables.outputs[j]) for users in tables.users]

    def mark(self, v: int, *, evicted: bool) -> None:
        """Value v is gone and can be made again; or it is evicted no longer: back, or nothing will ever need it."""
        self.evicted[v] = evicted

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """For each of these values (N,), all at hand, the seconds (N,) beyond those of its own op."""
        return np.zeros(len(values))


class Ancestors(Neighbours):
    """The evicted ancestors, exactly: the ops that must run before a value's own op can run again.

    A sum is kept until something that belongs to it, or would, comes or goes.
    """

    directions: tuple[bool, ...] = (True,)  # up

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.sums = np.full(len(tables.producer), np.nan)  # (V,) seconds; nan: to be found again

    def mark(self, v: int, *, evicted: bool) -> None:
        """Value v joins the neighbourhoods around it, or leaves them."""
        super().mark(v, evicted=evicted)
        for up in self.directions:
            self.sums[[*self._reached(v, not up)]] = np.nan

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the evicted neighbourhood of each of these values, each op once in either direction."""
        for v in values[np.isnan(self.sums[values])].tolist():
            self.sums[v] = 0.0
            for up in self.directions:
                ops = {self.tables.producer[w] for w in self._reached(v, up) if self.evicted[w]}
                self.sums[v] += sum(self.tables.seconds[k] for k in sorted(ops))
        return self.sums[values]

    def _reached(self, v: int, up: bool) -> set[int]:
        """The values that are reached from v through evicted ones, with v."""
        seen, todo, around = {v}, [v], self.made_of if up else self.makes
        while todo:
            new = set(around[todo.pop()]) - seen
            seen |= new
            todo += [w for w in new if self.evicted[w]]
        return seen


class Neighbourhood(Ancestors):
    """The evicted ancestors and the evicted descendants, exactly: h_full's e*."""

    directions = (True, False)


class Classes(Neighbours):
    """Evicted values that hang together, in whatever direction, as classes with one sum of seconds: h_eq's ẽ*.

    Evicting merges the classes around a value. A value that comes back takes its seconds out of its class and leaves
    it; the rest stays one class even where nothing but this value held it together.
    """

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        reads = {(u, w) for w, values in enumerate(self.made_of) for u in values}
        edges = sorted(reads | {(w, u) for u, w in reads})
        self.edge_from, self.edge_to = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        self.class_of = np.full(len(tables.producer), -1, dtype=np.int64)  # its number; -1: not evicted
        self.total: list[float] = []  # seconds of each class there ever was

    def mark(self, v: int, *, evicted: bool) -> None:
        """Merge the classes around v, with v; or take v and its seconds out of its class."""
        super().mark(v, evicted=evicted)
        own = self.tables.seconds[self.tables.producer[v]]
        if not evicted:
            self.total[self.class_of[v]] -= own
            self.class_of[v] = -1
            return
        around = np.unique(self.class_of[self.edge_to[self.edge_from == v]])
        around = around[around >= 0]
        self.class_of[np.isin(self.class_of, around)] = self.class_of[v] = len(self.total)
        self.total.append(own + sum(self.total[c] for c in around.tolist()))

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the classes next to each of these values, each class once."""
        V, total = len(self.class_of), np.array([*self.total, 0.0])
        wanted = np.zeros(V, dtype=bool)
        wanted[values] = True
        edges = wanted[self.edge_from] & (self.class_of[self.edge_to] >= 0)
        pairs = np.unique(self.edge_from[edges] * len(total) + self.class_of[self.edge_to[edges]])
        return np.bincount(pairs // len(total), weights=total[pairs % len(total)], minlength=V)[values]


class Heuristic(NamedTuple):
    """A score: seconds, or 1, over bytes and staleness, or one of them; the exponents are 0 or 1."""

    neighbours: type[Neighbours]
    seconds: int
    bytes: int
    stale: int

    def scores(self, seconds: np.ndarray, size: np.ndarray, stale: np.ndarray) -> np.ndarray:
        """(N,) scores of values of these seconds, bytes above 0, and staleness; infinite where that counts and is 0."""
        fresh = (stale <= 0) & (self.stale > 0)
        score = seconds**self.seconds / size**self.bytes
        return np.where(fresh, np.inf, score / np.where(fresh, 1.0, stale) ** self.stale)


HEURISTICS = {
    "h_full": Heuristic(Neighbourhood, 1, 1, 1),
    "h_eq": Heuristic(Classes, 1, 1, 1),
    "local": Heuristic(Neighbours, 1, 1, 1),
    "LRU": Heuristic(Neighbours, 0, 0, 1),
    "size": Heuristic(Neighbours, 0, 1, 0),
    "MSPS": Heuristic(Ancestors, 1, 1, 0),
}


class Runtime:
    """What is at hand, what may run again, and who still needs what."""

    def __init__(
        self,
        tables: Tables,
        budget: int,
        heuristic: Heuristic,
        *,
        clock: Clock,
        ignore_small: bool = False,
        rng: np.random.Generator | None = None,
    ) -> None:
        V, T = len(tables.producer), len(tables.inputs)
        self.tables, self.heuristic, self.clock, self.rng = tables, heuristic, clock, rng
        self.neighbours = heuristic.neighbours(tables)
        self.evicted = self.neighbours.evicted
        self.room = budget - tables.resident
        self.turn = 0  # the op of the program that is to run
        self.now = 0.0  # seconds that the step has taken
        self.runs_left = MOST_RUNS * T
        self.size = np.array(tables.size, dtype=np.float64)
        made = self.size[[p >= 0 for p in tables.producer]]
        self.small = self.size < (SMALL * made.mean() if ignore_small and len(made) else 0.0)
        self.seconds = np.array([0.0 if p < 0 else tables.seconds[p] for p in tables.producer])
        self.last = np.zeros(V)  # when each value was last touched
        self.at_hand = [p < 0 for p in tables.producer]
        self.locks = np.zeros(V, dtype=np.int64)
        self.evictable = np.zeros(V, dtype=bool)  # at hand, of some size, no result, and its op may run again
        self.to_read = [len(users) for users in tables.users]  # ops of the program that are still to read it
        self.claims = list(self.to_read)  # ops that read it and are still to run, or may run again
        self.may_run = [True] * T  # the first time, or again
        self.held: set[int] = set()  # cannot come back, not read by the program any more, but others are made of them

    def run(self) -> list[list[int]] | Stuck:
        """For each stage the ops that run, in their order, repeats included; or where nothing was left to evict.

        Raises:
            OutOfTime: once the time is over, or after `MOST_RUNS` for each op.
        """
        stages = []
        for t in range(len(self.tables.inputs)):
            ran = self._stage(t)
            if isinstance(ran, Stuck):
                return ran
            stages.append(ran)
        return stages

    def _stage(self, t: int) -> list[int] | Stuck:
        """Run op t for the first time; before it whatever it misses, the deepest first."""
        tables, ran, waiting, self.turn = self.tables, [], [t], t
        self.locks[list(tables.inputs[t])] += 1
        while waiting:
            k = waiting[-1]
            missing = next((v for v in tables.inputs[k] if not self.at_hand[v]), None)
            if missing is not None:
                waiting.append(tables.producer[missing])
                self.locks[list(tables.inputs[waiting[-1]])] += 1
                continue
            lacking = self._make_room(k)
            if lacking > 0:
                return Stuck(k, t, lacking)
            self._execute(k)
            ran.append(waiting.pop())
            self.runs_left -= 1
            if self.runs_left < 0 or self.clock.is_over:
                raise OutOfTime
        for v in tables.inputs[t]:
            self.to_read[v] -= 1
        if tables.pinned[t] or self._is_done(t):
            self._close([t])
        for v in (*tables.inputs[t], *tables.outputs[t]):
            self._settle(v)
        return ran

    def _execute(self, k: int) -> None:
        """Run op k, whose inputs are at hand and for whose outputs there is room."""
        inputs, outputs = self.tables.inputs[k], self.tables.outputs[k]
        self.now += self.tables.seconds[k]
        for v in outputs:
            if not self.at_hand[v]:
                self._arrive(v)
        self.last[[*inputs, *outputs]] = self.now
        self.locks[list(inputs)] -= 1
        for v in (*inputs, *outputs):
            self._settle(v)

    def _make_room(self, k: int) -> int:
        """Evict until op k can run; the bytes that are lacking in the end."""
        outputs = list(self.tables.outputs[k])
        self.locks[outputs] += 1  # the old copy of an output is replaced: evicting it would gain nothing
        if self._lacking(k) > 0:
            self._release(even_at_a_loss=False)
        while self._lacking(k) > 0:
            v = self._choose()
            if v is not None:
                self._evict(v)
            elif not self._release(even_at_a_loss=True):
                break
        self.locks[outputs] -= 1
        return self._lacking(k)

    def _lacking(self, k: int) -> int:
        """Bytes that are missing for op k to run."""
        tables = self.tables
        new = sum(tables.size[v] for v in tables.outputs[k] if not self.at_hand[v] or tables.result[v])
        return new + tables.workspace[k] - self._saved(k) - self.room

    def _saved(self, k: int) -> int:
        """Bytes that op k saves by writing over an input that goes as soon as it has run."""
        tables, reads = self.tables, int(k == self.turn)
        for v, saved in tables.savings[k]:
            if self.locks[v] == 1 and self.to_read[v] == reads and self.may_run[tables.producer[v]]:
                return saved
        return 0

    def _choose(self) -> int | None:
        """The value with the least score, the first of equals; None where nothing can go."""
        able = np.flatnonzero(self.evictable & (self.locks == 0))
        large = able[~self.small[able]]
        able = large if len(large) else able
        if not len(able):
            return None
        if self.rng is not None:
            able = np.sort(self.rng.choice(able, int(np.ceil(np.sqrt(len(able)))), replace=False))
        seconds = self.seconds[able] + self.neighbours.seconds(able)
        scores = self.heuristic.scores(seconds, self.size[able], self.now - self.last[able])
        return int(able[scores.argmin()])

    def _settle(self, v: int) -> None:
        """Let go of a value at hand that the program is done with, where nobody holds it."""
        tables = self.tables
        if not self.at_hand[v] or tables.producer[v] < 0 or tables.result[v] or self.locks[v] or self.to_read[v]:
            return
        if self.claims[v] == 0:
            self._drop(v)
        elif self.may_run[tables.producer[v]]:
            self._evict(v)
        else:
            self.held.add(v)

    def _arrive(self, v: int) -> None:
        tables = self.tables
        if self.evicted[v]:
            self.neighbours.mark(v, evicted=False)
        self.at_hand[v] = True
        self.room -= tables.size[v]
        self.evictable[v] = tables.size[v] > 0 and not tables.result[v] and self.may_run[tables.producer[v]]

    def _drop(self, v: int) -> None:
        self.at_hand[v] = False
        self.evictable[v] = False
        self.held.discard(v)
        self.room += self.tables.size[v]

    def _evict(self, v: int) -> None:
        self._drop(v)
        self.neighbours.mark(v, evicted=True)

    def _is_done(self, k: int) -> bool:
        """Op k need not run again: all its outputs are held to the end, or needed by nobody."""
        return self.may_run[k] and all(self.tables.result[v] or not self.claims[v] for v in self.tables.outputs[k])

    def _close(self, ops: list[int]) -> None:
        """These ops never run again: their inputs are not needed for that, and so on upwards."""
        tables = self.tables
        while ops:
            k = ops.pop()
            self.may_run[k] = False
            self.evictable[list(tables.outputs[k])] = False
            for v in tables.inputs[k]:
                self.claims[v] -= 1
                if self.claims[v] or tables.result[v]:
                    continue
                if self.evicted[v]:
                    self.neighbours.mark(v, evicted=False)
                elif self.at_hand[v]:
                    self._drop(v)
                if self._is_done(tables.producer[v]):
                    ops.append(tables.producer[v])

    def _release(self, *, even_at_a_loss: bool) -> bool:
        """Let go for good of values that cannot come back, where what is made from them stays instead.

        At a loss, only the one that binds the fewest bytes; whether there was any.
        """
        size = self.tables.size
        if even_at_a_loss:
            prices = {v: price - size[v] for v in sorted(self.held) if (price := self._bound_bytes(v)) is not None}
            chosen = sorted(prices, key=lambda v: prices[v])[:1]
        else:
            chosen = sorted(self.held)
        released = False
        for v in chosen:
            price = self._bound_bytes(v) if v in self.held else None
            if price is not None and (even_at_a_loss or price <= size[v]):
                self._close([j for j in self.tables.users[v] if self.may_run[j]])
                released = True
        return released

    def _bound_bytes(self, v: int) -> int | None:
        """Bytes that could not be evicted any more if v went for good; None where something needs v to come back."""
        tables = self.tables
        made = [w for j in tables.users[v] if self.may_run[j] for w in tables.outputs[j]]
        needed = [w for w in made if self.claims[w] and not tables.result[w]]
        if self.locks[v] or not all(self.at_hand[w] for w in needed):
            return None
        return sum(tables.size[w] for w in needed if self.evictable[w])
