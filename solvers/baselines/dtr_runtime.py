"""A simulation of the runtime of dynamic tensor rematerialization (Kirisame et al., ICLR 2021) on a static graph.

The runtime meets one op after the other and knows nothing of those to come. Before an op runs, its inputs are locked
and the missing ones made again, recursively; under pressure the value with the least score goes (`dtr_scores`).

What is let go without pressure: a value that no op of the program still reads is evicted at once (the paper's eager
eviction) and can come back; it is forgotten, and counts in no neighbourhood, once nothing can need it to come back.
What a pinned op makes cannot come back. When the program is done with such a value but others are made from it, it
stays, or goes for good if what is made from it stays instead (the paper's banishing): whichever takes fewer bytes.

An op that may write over a value (`checkmate.core.ways`) does so where that is evicted or forgotten right after it.

A re-run drops the old copies of its outputs first; a result of the step is held, so that a second copy counts.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

import numpy as np

from checkmate.solvers.baselines.dtr_scores import Heuristic
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.task import Clock, OutOfTime
from checkmate.solvers.search.eviction import Stuck

MOST_RUNS = 50  # for each op of the graph, on average; beyond it a run goes round in circles
SMALL = 0.01  # of the mean size: what `ignore_small` leaves alone


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
        self.evicted = [False] * V
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
        if tables.pinned[t]:
            self._close([t])
        self._close_if_done(t)
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
            self._forget(v)
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
        self.evicted[v] = True
        self.neighbours.evict(v)

    def _forget(self, v: int) -> None:
        self.evicted[v] = False
        self.neighbours.restore(v)

    def _close_if_done(self, k: int) -> None:
        """Op k need not run again where all its outputs are held to the end or needed by nobody."""
        if self.may_run[k] and all(self.tables.result[v] or not self.claims[v] for v in self.tables.outputs[k]):
            self._close([k])

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
                    self._forget(v)
                elif self.at_hand[v]:
                    self._drop(v)
                p = tables.producer[v]
                if self.may_run[p] and all(tables.result[w] or not self.claims[w] for w in tables.outputs[p]):
                    ops.append(p)

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
