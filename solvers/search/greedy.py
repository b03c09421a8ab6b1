"""Passes over the ops under a budget: rematerialize on demand, under pressure evict cheap values with a far next use.

The offline cousin of dynamic tensor rematerialization (Kirisame et al. 2021): the future is known, so the time to the
next use takes the place of staleness, as in Belady's rule for caches. A pass goes stage by stage: in stage t the
missing ancestors of op t run in ascending order, then op t. What it runs is a schedule in the sense of
`checkmate.core.schedule`, and the memory it counts is never below that schedule's.

Where room lacks for an op that may write over one of its inputs (`checkmate.core.inplace`), that input goes with the
run if nothing needs it any more. If something does, letting it go with the run competes with the evictions of others.

One pass takes milliseconds, so a step of a thousand ops has its first plan in a fraction of a second. `next_use` makes
a pass for each of a grid of weights, and improves the best by local search.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import Stages, as_matrix, as_stages, cost_of
from checkmate.solvers.search.local_search import exchange
from checkmate.units import format_bytes

NEVER = 2**31 - 1  # a stage after all others
METHOD = "next-use"
PASSES_TAKE = 0.5  # of the time, at most
FIRST_TAKES = 3.0  # seconds that the first pass may take, however little time there is
CLEARLY = 0.99  # of the seconds of the best pass so far: what takes less is offered at once
MOST_IMPROVED = 3  # plans that local search starts from


@dataclass(frozen=True)
class Weights:
    """Evict the value with the smallest seconds**a / (bytes**b * stages-to-next-use**c)."""

    a: float = 1.0
    b: float = 1.0
    c: float = 1.0
    outside: np.ndarray | None = None  # (n, V) bool: in each of the first n stages those values go first


GRID = tuple(Weights(a, b, c) for b, c, a in itertools.product((1.0, 0.5), (0.5, 0.0, 1.0, 2.0), (1.0, 0.5, 2.0)))


@dataclass(frozen=True)
class DeadEnd:
    """The end of a pass that got stuck: at which op, and the bytes it lacks."""

    op: int
    missing_bytes: int


def run_pass(tables: Tables, budget: int, weights: Weights, clock: Clock | None = None) -> Stages | DeadEnd:
    """The ops that run in each stage, ascending; or the dead end that the pass got into.

    It ends once the clock is over, too: a pass that makes much again, from what it makes again, is slow and of no use.
    """
    state = PassState(tables, budget, weights)
    inputs, outputs, at_hand = tables.inputs, tables.outputs, state.at_hand
    stages: Stages = []
    for t, reads in enumerate(inputs):
        if clock is not None and clock.is_over:
            return DeadEnd(t, 0)
        state.now = t
        # The missing ancestors of op t run, and of what cannot be made again after this stage and is needed then.
        closing = tables.closing.get(t, ())
        last_chances = [v for v in closing if not at_hand[v]]
        if last_chances:
            later = (v for v, us in enumerate(tables.users) if us and us[-1] > t > tables.producer[v] >= 0)
            needed_later = state.missing_ancestors(later)
            last_chances = [v for v in last_chances if tables.producer[v] in needed_later]
        again = sorted(state.missing_ancestors((*reads, *last_chances)))
        ops = [*again, t]
        for k in ops:
            for v in inputs[k]:
                state.claims[v] += 1
        # Other results of these ancestors that are still at hand are made anew.
        for k in again:
            if state.spent[k]:
                return DeadEnd(k, 0)
            for v in outputs[k]:
                if at_hand[v] and not tables.result[v]:
                    state.drop(v)
        for v in closing:
            state.spent[tables.producer[v]] = state.only_copy[v] = True
            state.changed.add(v)
        for k in ops:
            # Make room: op k writes over an input that nothing needs any more, and values are evicted.
            lacking = sum(tables.size[v] for v in outputs[k]) + tables.workspace[k] - state.room
            for v, saved in tables.savings[k] if lacking > 0 else ():
                if state.next_need(v, k) == NEVER and not (state.only_copy[v] and state.makes_more(v)):
                    state.overwritten = v
                    lacking -= saved
                    break
            if lacking > 0 and not state.make_room(k, lacking):
                return DeadEnd(k, lacking)
            # Run op k; the inputs of op t are needed next by their next user, and what op k wrote over is gone.
            for v in inputs[k]:
                state.claims[v] -= 1
            for v in outputs[k]:
                if not at_hand[v]:
                    state.arrive(v)
            if k in state.runs_left:
                state.runs_left[k] -= 1
                state.spent[k] |= not state.runs_left[k]
                state.changed.update(outputs[k])
            if k == t:
                for v in reads:
                    state.user_index[v] += 1
                    users, i = tables.users[v], state.user_index[v]
                    state.next_use[v] = users[i] if i < len(users) else NEVER
            if state.overwritten >= 0:
                v, state.overwritten = state.overwritten, -1
                if state.is_needed(v):
                    state.claim_ancestors(v)
                state.drop(v)
        # Values that a rule has remade in the backward go after their last read in the forward.
        for v in state.going.get(t, ()):
            if at_hand[v]:
                state.claim_ancestors(v)
                state.drop(v)
        stages.append(ops)
    return stages


class PassState:
    """The state of a pass: values in memory, their next uses, and the seconds to bring each back."""

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
        self.worth = np.full(V, np.inf)  # seconds-back**a / bytes**b
        self.only_copy = [p >= 0 and tables.pinned[p] for p in tables.producer]
        self.changed: set[int] = set()  # values that came or went since worth was right
        self.spent = [*tables.pinned]  # per op: it must not run again
        self.runs_left = dict(tables.max_runs)
        self.overwritten = -1  # the value that the op to run writes over
        self.scale = (np.maximum(1.0, np.array(tables.size)) ** -weights.b).tolist()
        # By rules some values go before the backward (after which stage), which is to make them again: for an op that
        # reads them, or to make again another one of them. What they are made from is needed there.
        self.going: dict[int, list[int]] = {}
        for v in tables.recomputed:
            last = max((k for k in tables.users[v] if k < tables.boundary), default=tables.producer[v])
            for t in {min(last, tables.boundary - 1), tables.boundary - 1}:
                self.going.setdefault(t, []).append(v)
        spans: dict[int, tuple[int, int]] = {}
        for v in sorted(tables.recomputed, key=lambda v: -tables.producer[v]):
            needed = [k for k in tables.users[v] if k >= tables.boundary]
            outputs = (w for k in tables.users[v] for w in tables.outputs[k] if w in spans)
            needed += [stage for w in outputs for stage in spans[w]]
            if needed:
                first, last = spans[v] = min(needed), max(needed)
                for u in tables.inputs[tables.producer[v]]:
                    self.shadow_first[u] = min(first, int(self.shadow_first[u]))
                    self.shadow_last[u] = max(last, int(self.shadow_last[u]))

    def missing_ancestors(self, values: Iterable[int]) -> set[int]:
        """The ops that must run to make these values."""
        again: set[int] = set()
        todo = [v for v in values if not self.at_hand[v]]
        while todo:
            k = self.tables.producer[todo.pop()]
            if k not in again:
                again.add(k)
                todo += [v for v in self.tables.inputs[k] if not self.at_hand[v]]
        return again

    def arrive(self, v: int) -> None:
        """Allocate value v."""
        self.at_hand[v] = True
        self.room -= self.tables.size[v]
        self.movable[v] = self.tables.size[v] > 0 and not self.tables.result[v]
        self.changed.add(v)

    def drop(self, v: int) -> None:
        """Free value v."""
        self.at_hand[v] = self.movable[v] = False
        self.room += self.tables.size[v]
        self.changed.add(v)

    def claim_ancestors(self, v: int) -> None:
        """Note when evicted value v has to come back for its op's inputs, and so on for missing ancestors."""
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

    def next_need(self, v: int, k: int) -> int:
        """The next stage that needs input v of op k after this run; NEVER if none does, 0 for this stage."""
        if self.claims[v] > 1:
            return 0
        users, i = self.tables.users[v], self.user_index[v] + 1
        use = int(self.next_use[v]) if k < self.now else users[i] if i < len(users) else NEVER
        first, last = int(self.shadow_first[v]), int(self.shadow_last[v])
        return min(use, first if first > self.now else last if last > self.now else NEVER)

    def is_needed(self, v: int) -> bool:
        """Tell whether a later stage needs the value, itself or to remake another."""
        first = self.shadow_first[v]
        return bool(self.next_use[v] < NEVER or (first < NEVER if first > self.now else self.shadow_last[v] > self.now))

    def makes_more(self, v: int) -> bool:
        """Tell whether values made from v alone, directly or not, that are in memory and needed have more bytes than v.

        A mask of bits is made from noise, say, and noise from a random state: then it is better to keep the smaller.
        """
        tables, total, todo = self.tables, 0, [v]
        while todo:
            for j in tables.users[todo.pop()]:
                if j > self.now:
                    break
                for w in tables.outputs[j]:
                    if self.movable[w] and self.is_needed(w):
                        total += tables.size[w]
                        if total > tables.size[v]:
                            return True
                    elif len(tables.inputs[j]) == 1:
                        todo.append(w)
        return False

    def make_room(self, k: int, lacking: int) -> bool:
        """Evict values until the bytes that op k lacks are free; tell whether that is possible."""
        now, goal, savings = self.now, self.room + lacking, self.tables.savings[k]
        # First go values that no stage needs any more. Only copies that larger values are made of are spared: with
        # them the larger ones can come back.
        free = np.flatnonzero(self.movable & (self.claims == 0))
        first, last = self.shadow_first[free], self.shadow_last[free]
        needed = np.minimum(self.next_use[free], np.where(first > now, first, np.where(last > now, last, NEVER)))
        spared = []
        for v in free[needed == NEVER].tolist():
            if self.room >= goal:
                break
            if self.only_copy[v] and self.makes_more(v):
                spared.append(v)
            else:
                self.drop(v)
        if self.room >= goal:
            return True
        # The others compete by worth times urgency. So do inputs that op k may write over although they are needed, or
        # only copies: `ways` has the bytes that each saves beyond what is saved already.
        urgency = np.full(len(self.worth), np.inf)
        alive = needed < NEVER
        urgency[free[alive]] = (needed[alive] - now + 1.0) ** -self.weights.c
        before, ways = self.overwritten, dict[int, int]()
        saved = dict(savings).get(before, 0)
        for v, more in savings:
            if more > saved and (need := self.next_need(v, k)):
                ways[v] = more - saved
                urgency[v] = (need - now + 1.0) ** -self.weights.c
                if need == NEVER:
                    spared.append(v)
        if self.weights.outside is not None and now < len(self.weights.outside):
            urgency[self.weights.outside[now]] *= 1e-9
        # The least goes until there is room, and what was spared if nothing else is left.
        evictions: list[tuple[float, int]] = []
        written = 0  # bytes that are saved by writing over what is needed later
        while self.room < goal:
            self.refresh_worth()
            scores = self.worth * urgency
            v = int(scores.argmin())
            score = float(scores[v])
            if score == np.inf:
                if not spared:
                    return False
                v = spared.pop()
            more = ways.get(v, 0)
            if more:
                self.overwritten, goal = v, goal - more
                ways = {other: saved - more for other, saved in ways.items() if saved > more}
            else:
                if score < np.inf:
                    self.claim_ancestors(v)
                self.drop(v)
            if score < np.inf:
                urgency[v] = np.inf
                evictions.append((score, v))
                if more:
                    written += more
                    urgency[[u for u, _ in savings if u not in ways]] = np.inf
        # Values that need not have gone come back, the worthiest first.
        for _, v in sorted(evictions, reverse=True):
            if self.at_hand[v]:
                if v == self.overwritten and self.room - written >= goal:
                    self.overwritten, goal = before, goal + written
            elif self.room - self.tables.size[v] >= goal:
                self.arrive(v)
        return True

    def refresh_worth(self) -> None:
        """Update `worth` of changed values in memory, and of those remade from changed ones through evicted values."""
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
        self.changed.clear()
        for v in stale:
            if not self.movable[v]:
                continue
            # Seconds to make v again from values in memory: its op and missing ancestors; infinite if one is pinned.
            seconds, todo = 0.0, [tables.producer[v]]
            seen = set(todo)
            while todo:
                k = todo.pop()
                if self.spent[k]:
                    seconds = inf
                    break
                seconds += tables.seconds[k]
                for w in tables.inputs[k]:
                    p = tables.producer[w]
                    if not at_hand[w] and p not in seen:
                        seen.add(p)
                        todo.append(p)
            self.worth[v] = max(seconds, 1e-30) ** self.weights.a * self.scale[v]


def next_use(task: Task, incumbent: Incumbent, *, patience: float = inf) -> Remarks:
    """The best plan of many passes, improved by local search. No plan if no pass fits.

    Passes take half of the time at most, or ``patience``, in seconds. The same seed gives the same plan where the time
    limit does not bind.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, 3, method="next-use").cost
    4.0
    """
    problem, tables, clock = task.problem, Tables.of(task.problem), Clock(min(PASSES_TAKE * task.clock.left, patience))
    # Keep the plans of the cheapest passes, those that differ.
    best: list[tuple[float, Stages]] = []  # the cheapest first: seconds, and per stage the ops that run
    for passes, weights in enumerate(GRID, 1):
        pass_clock = clock if passes > 1 else Clock(max(FIRST_TAKES, clock.left))
        stages = run_pass(tables, task.budget, weights, pass_clock)
        if isinstance(stages, DeadEnd):
            stuck = stages
        else:
            cost = tables.seconds_of(stages)
            if not best or cost < CLEARLY * best[0][0]:
                incumbent.offer(stages, METHOD)  # a usable plan at once
            if all(abs(cost - other_cost) > 1e-9 * other_cost for other_cost, _ in best):
                best = sorted([*best, (cost, stages)], key=lambda plan: plan[0])[:MOST_IMPROVED]
        if clock.is_over:
            break
    if not best:
        op, short = problem.graph.ops[stuck.op].name, format_bytes(stuck.missing_bytes)
        return Remarks(f"every pass was stuck; the last at {op}, {short} short", stuck=stuck.op)
    # Local search from each of them, and once more from the best that comes of it.
    starts = [stages for _, stages in best]
    R = as_matrix(starts[0])
    incumbent.offer(R, METHOD)
    if cost_of(problem, R) > problem.keep_all_cost * (1 + 1e-12):
        for start, quiet in [*((plan, 4) for plan in starts), (None, 20)]:
            if task.clock.is_over:
                break
            candidate = as_matrix(exchange(task, as_stages(R) if start is None else start, quiet=quiet))
            if cost_of(problem, candidate) < cost_of(problem, R):
                R = candidate
                incumbent.offer(R, METHOD)
    return Remarks(details={"passes": passes, "best pass": best[0][0]})
