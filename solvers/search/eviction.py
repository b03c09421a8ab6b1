"""One pass over the ops under a budget: rematerialize on demand, evict on pressure what is cheap and far from its use.

The offline cousin of dynamic tensor rematerialization (Kirisame et al. 2021): the future is known, so the time to the
next use takes the place of staleness, as in Belady's rule for caches. The pass goes stage by stage: in stage t the
missing ancestors of op t run in ascending order, then op t. What it runs is a schedule in the sense of
`checkmate.core.schedule`, and the memory it counts is never below that schedule's.

Where room lacks for an op that may write over one of its inputs (`checkmate.core.ways`), that input goes with the run
if nothing needs it any more. If something does, letting it go with the run competes with the evictions of others.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.task import Clock

NEVER = 2**31 - 1  # a stage after all others


@dataclass(frozen=True)
class Weights:
    """Evict the value with the smallest seconds**a / (bytes**b * stages-to-next-use**c), times its tilt."""

    a: float = 1.0
    b: float = 1.0
    c: float = 1.0
    tilt: np.ndarray | None = None  # (V,) float64, of each value
    outside: np.ndarray | None = None  # (n, V) bool: in each of the first n stages those values go first


@dataclass(frozen=True)
class Stuck:
    """Where a pass ended early: op, and the bytes it lacks."""

    op: int
    stage: int
    missing_bytes: int


def run_pass(tables: Tables, budget: int, weights: Weights, clock: Clock | None = None) -> list[list[int]] | Stuck:
    """For each stage the ops that run, ascending; or where the budget was too small for this order of evictions.

    Or where the clock was over: a pass that makes much again, and that again, is slow, and of no use.
    """
    state = _State(tables, budget, weights)
    stages = []
    for t in range(len(tables.inputs)):
        ran = Stuck(t, t, 0) if clock is not None and clock.is_over else state.stage(t)
        if isinstance(ran, Stuck):
            return ran
        stages.append(ran)
    return stages


class _State:
    """What is at hand, when each value is needed next, and what bringing it back would cost."""

    def __init__(self, tables: Tables, budget: int, weights: Weights) -> None:
        V = len(tables.producer)
        self.tables, self.weights = tables, weights
        self.room = budget - tables.resident
        self.now = 0
        self.at_hand = [p < 0 for p in tables.producer]
        self.movable = np.zeros(V, dtype=bool)  # at hand, of some size, and not a result
        self.claims = np.zeros(V, dtype=np.int32)  # by ops still to run in this stage
        self.next_use = np.array([users[0] if users else NEVER for users in tables.users], dtype=np.int64)
        self.user_index = [0] * V
        self.shadow_first = np.full(V, NEVER, dtype=np.int64)  # first and last stage in which an evicted
        self.shadow_last = np.full(V, -1, dtype=np.int64)  # value needs this one to come back
        self.worth = np.full(V, np.inf)  # seconds-back**a / bytes**b, times the tilt
        self.only_copy = [p >= 0 and tables.pinned[p] for p in tables.producer]
        self.changed: set[int] = set()  # values that came or went since worth was right
        self.spent = [*tables.pinned]  # per op: it must not run again
        self.runs_left = dict(tables.most_runs)
        self.going_with_run = -1  # the value that the op to run writes over
        self.going: dict[int, list[int]] = {}  # after each stage: what nothing of the forward reads any more
        self._foresee()
        tilt = np.ones(V) if weights.tilt is None else weights.tilt
        self.scale = (tilt / np.maximum(1.0, np.array(tables.size)) ** weights.b).tolist()

    def stage(self, t: int) -> list[int] | Stuck:
        """Run op t and what it needs first."""
        tables = self.tables
        self.now = t
        closing = tables.closing.get(t, ())
        again = sorted(self._closure((*tables.inputs[t], *self._last_chances(t, closing))))
        ops = [*again, t]
        for k in ops:
            for v in tables.inputs[k]:
                self.claims[v] += 1
        for k in again:
            if self.spent[k]:
                return Stuck(k, t, 0)
            for v in tables.outputs[k]:
                if self.at_hand[v] and not tables.result[v]:
                    self._drop(v)
        self._close(closing)
        for k in ops:
            lacking = sum(tables.size[v] for v in tables.outputs[k]) + tables.workspace[k] - self.room
            if lacking > 0 and tables.savings[k]:
                lacking = self._write_over_unneeded(k, lacking)
            if lacking > 0 and not self._evict(lacking, k):
                return Stuck(k, t, lacking)
            self._run(k)
            if k < t and self.going_with_run >= 0:
                self._go_with_run()
        self._advance(t)
        if self.going_with_run >= 0:
            self._go_with_run()
        if tables.gone and t < tables.boundary:
            self._let_go(t)
        return ops

    def _last_chances(self, t: int, closing: tuple[int, ...]) -> list[int]:
        """Those of the values, which cannot be made again after stage t, that are missing and that others need then."""
        missing = [v for v in closing if not self.at_hand[v]]
        if not missing:
            return []
        tables = self.tables
        wanted = [v for v, users in enumerate(tables.users) if users and users[-1] > t > tables.producer[v] >= 0]
        ops = self._closure(wanted)
        return [v for v in missing if tables.producer[v] in ops]

    def _close(self, values: tuple[int, ...]) -> None:
        """These values are not made again after this stage, so that none of them goes which is needed then."""
        for v in values:
            self.spent[self.tables.producer[v]] = self.only_copy[v] = True
            self.changed.add(v)

    def _closure(self, values: Iterable[int]) -> set[int]:
        """The ops that must run to have these values."""
        again: set[int] = set()
        todo = [v for v in values if not self.at_hand[v]]
        while todo:
            k = self.tables.producer[todo.pop()]
            if k not in again:
                again.add(k)
                todo += [v for v in self.tables.inputs[k] if not self.at_hand[v]]
        return again

    def _after(self, v: int, k: int) -> int:
        """The next stage that needs input v of op k once k has run in this one; NEVER without one, 0 for this one."""
        if self.claims[v] > 1:
            return 0
        users, i = self.tables.users[v], self.user_index[v] + 1
        use = int(self.next_use[v]) if k < self.now else users[i] if i < len(users) else NEVER
        first, last = int(self.shadow_first[v]), int(self.shadow_last[v])
        return min(use, first if first > self.now else last if last > self.now else NEVER)

    def _write_over_unneeded(self, k: int, lacking: int) -> int:
        """What is still lacking where op k writes over an input that nothing needs any more."""
        for v, saved in self.tables.savings[k]:
            if self._after(v, k) == NEVER and not (self.only_copy[v] and self._makes_more(v)):
                self.going_with_run = v
                return lacking - saved
        return lacking

    def _ways_out(self, k: int) -> dict[int, int]:
        """Bytes more that op k saves by writing over one of these inputs, which are still needed, or only copies."""
        savings = self.tables.savings[k]
        saved = dict(savings).get(self.going_with_run, 0)
        return {v: more - saved for v, more in savings if more > saved and self._after(v, k)}

    def _write_over(self, v: int, ways: dict[int, int]) -> int:
        """Have the op to run write over v; the bytes that it saves thereby, and the ways that would save more yet."""
        self.going_with_run, more = v, ways[v]
        for other, saved in [*ways.items()]:
            if saved <= more:
                del ways[other]
            else:
                ways[other] = saved - more
        return more

    def _go_with_run(self) -> None:
        """What was written over is gone."""
        v, self.going_with_run = self.going_with_run, -1
        if self._is_needed(v):
            self._claim_ancestors(v)
        self._drop(v)

    def _run(self, k: int) -> None:
        for v in self.tables.inputs[k]:
            self.claims[v] -= 1
        for v in self.tables.outputs[k]:
            if not self.at_hand[v]:
                self._arrive(v)
        if k in self.runs_left:
            self.runs_left[k] -= 1
            self.spent[k] = not self.runs_left[k]
            self.changed.update(self.tables.outputs[k])

    def _advance(self, t: int) -> None:
        """Op t has run: its inputs are needed next by their next user."""
        for v in self.tables.inputs[t]:
            self.user_index[v] += 1
            users, i = self.tables.users[v], self.user_index[v]
            self.next_use[v] = users[i] if i < len(users) else NEVER

    def _foresee(self) -> None:
        """What a rule has made again in the backward needs others there, and goes before that."""
        tables = self.tables
        for v, first, last in gone_before_backward(tables):
            for u in tables.inputs[tables.producer[v]]:
                self.shadow_first[u] = min(first, int(self.shadow_first[u]))
                self.shadow_last[u] = max(last, int(self.shadow_last[u]))
        for v in tables.gone:
            in_forward = [k for k in tables.users[v] if k < tables.boundary]
            self.going.setdefault(max(in_forward, default=tables.producer[v]), []).append(v)

    def _let_go(self, t: int) -> None:
        for v in self.tables.gone if t + 1 == self.tables.boundary else self.going.get(t, ()):
            if self.at_hand[v]:
                self._claim_ancestors(v)
                self._drop(v)

    def _arrive(self, v: int) -> None:
        self.at_hand[v] = True
        self.room -= self.tables.size[v]
        self.movable[v] = self.tables.size[v] > 0 and not self.tables.result[v]
        self.changed.add(v)

    def _drop(self, v: int) -> None:
        self.at_hand[v] = self.movable[v] = False
        self.room += self.tables.size[v]
        self.changed.add(v)

    def _stale(self) -> list[int]:
        """Values at hand that came, or are made of what came or went, through what is not at hand: worth is stale."""
        tables, at_hand = self.tables, self.at_hand
        seen, todo = set(self.changed), list(self.changed)
        stale = [v for v in todo if at_hand[v]]
        while todo:
            for j in tables.users[todo.pop()]:
                if j > self.now:
                    break
                for w in tables.outputs[j]:
                    if w not in seen:
                        seen.add(w)
                        (stale if at_hand[w] else todo).append(w)
        return stale

    def _evict(self, lacking: int, k: int) -> bool:
        """Make room for so many bytes more that op k lacks, and put back what need not have gone."""
        goal = self.room + lacking
        free = np.flatnonzero(self.movable & (self.claims == 0))
        needed = self._needed_at(free)
        spared = self._drop_unneeded(free[needed == NEVER].tolist(), goal)
        if self.room >= goal:
            return True
        urgency = np.full(len(self.worth), np.inf)
        alive = needed < NEVER
        urgency[free[alive]] = (needed[alive] - self.now + 1.0) ** -self.weights.c
        ways, before = (self._ways_out(k) if self.tables.savings[k] else {}), self.going_with_run
        for v in ways:
            after = self._after(v, k)
            urgency[v] = (after - self.now + 1.0) ** -self.weights.c
            if after == NEVER:
                spared.append(v)
        if self.weights.outside is not None and self.now < len(self.weights.outside):
            urgency[self.weights.outside[self.now]] *= 1e-9
        gone: list[tuple[float, int]] = []
        written = 0  # bytes that are saved by what is needed later
        while self.room < goal:
            self._refresh()
            scores = self.worth * urgency
            v = int(scores.argmin())
            if not np.isfinite(scores[v]):
                if not spared:
                    return False
                v = spared.pop()
                if v in ways:
                    goal -= self._write_over(v, ways)
                else:
                    self._drop(v)
                continue
            urgency[v] = np.inf
            if v in ways:
                more = self._write_over(v, ways)
                goal, written = goal - more, written + more
                urgency[[u for u, _ in self.tables.savings[k] if u not in ways]] = np.inf
            else:
                self._claim_ancestors(v)
                self._drop(v)
            gone.append((float(scores[v]), v))
        for _, v in sorted(gone, reverse=True):
            if self.at_hand[v]:
                if v == self.going_with_run and self.room - written >= goal:
                    self.going_with_run, goal = before, goal + written
            elif self.room - self.tables.size[v] >= goal:
                self._arrive(v)
        return True

    def _drop_unneeded(self, values: list[int], goal: int) -> list[int]:
        """Let values go that no op needs any more, until there is room; those spared so that others can come back.

        That is the only copy of a value, where larger ones that are still needed can be made from it: a mask of bits,
        say, and the noise it stands for, or the random state that such a mask was drawn with.
        """
        spared = []
        for v in values:
            if self.room >= goal:
                break
            if self.only_copy[v] and self._makes_more(v):
                spared.append(v)
            else:
                self._drop(v)
        return spared

    def _makes_more(self, v: int) -> bool:
        """More bytes, at hand and still needed, were made from v, be it through others that come from it alone."""
        tables, total, todo = self.tables, 0, [v]
        while todo:
            for j in tables.users[todo.pop()]:
                if j > self.now:
                    break
                for w in tables.outputs[j]:
                    if self.movable[w] and self._is_needed(w):
                        total += tables.size[w]
                        if total > tables.size[v]:
                            return True
                    elif len(tables.inputs[j]) == 1:
                        todo.append(w)
        return False

    def _needed_at(self, values: np.ndarray) -> np.ndarray:
        """The next stage that needs each value, for itself or to bring back another; NEVER without one."""
        first, last = self.shadow_first[values], self.shadow_last[values]
        shadow = np.where(first > self.now, first, np.where(last > self.now, last, NEVER))
        return np.minimum(self.next_use[values], shadow)

    def _is_needed(self, v: int) -> bool:
        """Some stage still needs the value, as `_needed_at` says for many."""
        first = self.shadow_first[v]
        return bool(self.next_use[v] < NEVER or (first < NEVER if first > self.now else self.shadow_last[v] > self.now))

    def _claim_ancestors(self, v: int) -> None:
        """Value v leaves and must come back: what its op reads is needed then, and if missing, what that needs."""
        tables = self.tables
        todo = [v]
        while todo:
            w = todo.pop()
            first = min(int(self.next_use[w]), int(self.shadow_first[w]) if self.shadow_first[w] > self.now else NEVER)
            last = max(int(self.next_use[w]) if self.next_use[w] < NEVER else -1, int(self.shadow_last[w]))
            first = min(first, last) if last > self.now else first
            for u in tables.inputs[tables.producer[w]]:
                if first < self.shadow_first[u] or self.shadow_first[u] <= self.now or last > self.shadow_last[u]:
                    stale = self.shadow_first[u] <= self.now
                    self.shadow_first[u] = first if stale else min(first, int(self.shadow_first[u]))
                    self.shadow_last[u] = max(last, int(self.shadow_last[u]))
                    if not self.at_hand[u]:
                        todo.append(u)

    def _refresh(self) -> None:
        """Bring `worth` up to date."""
        a = self.weights.a
        for v in self._stale():
            if self.movable[v]:
                self.worth[v] = max(self._seconds_back(v), 1e-30) ** a * self.scale[v]
        self.changed.clear()

    def _seconds_back(self, v: int) -> float:
        """Seconds to make v again from what is at hand: its op and the missing ancestors; infinite if one is pinned."""
        tables, total = self.tables, 0.0
        seen, todo = {tables.producer[v]}, [tables.producer[v]]
        while todo:
            k = todo.pop()
            if self.spent[k]:
                return float("inf")
            total += tables.seconds[k]
            for w in tables.inputs[k]:
                p = tables.producer[w]
                if not self.at_hand[w] and p not in seen:
                    seen.add(p)
                    todo.append(p)
        return total


def gone_before_backward(tables: Tables) -> list[tuple[int, int, int]]:
    """Values that a rule has made again in the backward, the last made first; the first and last stage for that.

    It is for an op of the backward that reads the value, or to make again another one of these.
    """
    spans: dict[int, tuple[int, int]] = {}
    for v in sorted(tables.gone, key=lambda v: -tables.producer[v]):
        stages = [k for k in tables.users[v] if k >= tables.boundary]
        others = (w for k in tables.users[v] for w in tables.outputs[k] if w in spans)
        stages += [stage for w in others for stage in spans[w]]
        if stages:
            spans[v] = min(stages), max(stages)
    return [(v, first, last) for v, (first, last) in spans.items()]
