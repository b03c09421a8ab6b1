"""Beam search from the last op to the first over sets of values in memory: cheap plans for tight budgets.

As in `checkmate.solvers.search.backward_search` a state is the set of values that what runs later needs, and going
backwards each of them is made again or was kept from before. Here the cost counts: of the states of a stage those go on
that are promising, by the seconds that run after it and an estimate, the price, of having at hand what they need. The
memory of each state is exact, so that what reaches the first stage fits: close to the smallest budget, where passes of
eviction get stuck or let the wrong value go, this finds what they do not. (Beam search; the states are those of a
decision diagram: Bergman, Cire, van Hoeve and Hooker, "Decision Diagrams for Optimization", 2016.)

The states of a known plan go along, so that a detour from it counts as soon as it needs no more than the plan does.
What a byte is worth in which stage nobody knows: where the plan is close to the budget it is worth more. So `detours`
draws the prices at random around that, again and again, and its beams become wider as narrow ones find nothing more.
What a beam finds is improved by exchanges of single runs, and is the plan to go along with from then on.

With each value free to be made again in each stage, and two states merged into one that needs what both need and has
taken what the cheaper one has, nothing is lost that a schedule could do: the least seconds of a state at the first
stage are a bound (a relaxed decision diagram). Where nothing had to be merged the cheapest state is the best schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from operator import and_, or_

import numpy as np

from checkmate.core.schedule import Schedule
from checkmate.solvers.common.incumbent import Clock, Incumbent, OutOfTime, Task
from checkmate.solvers.common.schedules import Stages, as_matrix, as_stages, bytes_in_stages, cost_of, obeys_limits
from checkmate.solvers.search.backward_search import CHUNK, KNOWN, Backward, Pending, State, States, Waiting, stages_of
from checkmate.solvers.search.local_search import exchange
from checkmate.solvers.search.value_sets import ValueSets, grain_of

LEAST_GROUP = 4  # states; fewer are not merged
WIDTHS = (64, 256, 1024, 4096)  # states of the bound that go on, unmerged: more of them prove more, in more time
BEHIND = 0.25  # of the seconds that are proven to run again: what proves less of them does not catch up when wider
GRAIN = 5e-4  # of the budget: what all values below the grain have together
WORTH = 10.0  # times the forward: the price of all bytes in all stages, that says what is merged
MOST_OPS_IN_ANY_ORDER = 24  # in larger graphs all orders are too many, and what is proven is proven of schedules
NEVER = 1e3  # times the step: the price of keeping what does not fit
FIRST_WIDTH, WIDER, WIDEST = 16, 2, 2048  # states of the first beams, how many times as many then, and at most
ROUND = 4  # beams without progress, after which they become wider
POWERS = (1.0, 2.0, 4.0, 16.0)  # of how full a stage is: what a byte is worth there
WORTHS = (2.0, 60.0)  # times the forward: all bytes in all stages, at least and at most
NOISES = (0.0, 0.5, 1.0)  # standard deviations, in the logarithm, of the price of each value
SHARE_OF_EXCHANGE = 0.25  # of the time left


@dataclass
class Beam(Backward):
    """A search within a budget, for a cheap plan or for a lower bound of all costs."""

    sets: ValueSets
    budget: int
    width: int  # states that go on at most
    price: np.ndarray  # (values with a bit, T + 1) float32, as `prices` gives it
    clock: Clock
    most: float = float("inf")  # seconds of what runs again, less than which is looked for
    # make any value again in any stage, not only what op t and its reruns read: with no state dropped, the plan is the
    # best there is
    every: bool = False
    merge: bool = False  # of too many states two become one; else the least promising are dropped
    any_order: bool = False  # within a stage ops run again in any order, and as often as need be; else once, in theirs
    complete: bool = True  # no state was dropped so far but for a better one, or merged
    known: np.ndarray | None = None  # (T, T) R of a known plan, whose states go along
    beside: list[tuple[int, State]] = field(default_factory=list)  # per stage, the set it needs at the begin, its state

    def search(self, R: np.ndarray | None = None) -> np.ndarray | None:
        """R (T, T) of the cheapest plan found, never dearer than the known one; None without time or plan."""
        self.known, self.beside = R, []
        if R is not None:
            S = Schedule.from_runs(self.sets.problem.graph, R).S[:, self.sets.values]
            packed = np.packbits(S, axis=1, bitorder="little")
            held = (S @ np.array(self.sets.size, dtype=np.int64)).tolist()
            once = np.array(self.sets.tables.seconds)
            again = np.where(R.sum(axis=1) > 1, (R * once).sum(axis=1) - once, 0.0)
            for t, later in enumerate(again[::-1].cumsum()[::-1].tolist()):
                needed = int.from_bytes(packed[t].tobytes(), "little")
                self.beside.append((needed, (later, held[t], (None, t, KNOWN))))
            self.most = self.beside[0][1][0]
        _, stages = self._cheapest()
        return None if stages is None else as_matrix(stages)

    def bound(self) -> tuple[float, Stages | None]:
        """Seconds that every schedule spends on reruns, at most ``most``; and the stages of one that takes just that.

        With ``any_order`` the bound holds for every plan. 0.0 where the time is over.
        """
        self.every = self.merge = True
        seconds, stages = self._cheapest()
        return seconds, stages if self.complete else None

    def _cheapest(self) -> tuple[float, Stages | None]:
        """Seconds of the cheapest plan's reruns, and its stages.

        Where none is left, ``most`` and None; 0.0 and None where the time is over.
        """
        states: States = {}
        try:
            for states in self.back_from(self.sets.T - 1):
                if not states:
                    return self.most, None
        except OutOfTime:
            return 0.0, None
        seconds, _, trail = min(states.values(), key=lambda state: state[0])
        return seconds, stages_of(self.sets, trail, self.known)

    def _begin(self, t: int, states: States, waiting: Waiting) -> None:
        sets, bytes_of, room = self.sets, self.sets.bytes_of, self.budget - self.sets.base[t]
        reads, writes, ways = sets.inputs[t], sets.outputs[t], sets.savings[t]
        earlier, asked_for = sets.free[t] & sets.below[t], reads | sets.closing[t]
        for needed, (seconds, held, trail) in states.items():
            short = held + bytes_of((reads | writes) & ~needed) + sets.working[t] - room
            if short <= 0 or (ways and short <= sets.saved(t, t, needed)):
                held += bytes_of(reads & ~needed) - bytes_of(needed & writes)
                before = needed & ~writes | reads
                candidates = (before if self.every else before & asked_for) & earlier
                waiting.add(before, candidates, (seconds, held, trail))

    def _decide(self, t: int, k: int, pending: Pending, waiting: Waiting) -> None:
        sets, bytes_of, room = self.sets, self.sets.bytes_of, self.budget - self.sets.base[t]
        reads, writes, takes, working = sets.inputs[k], sets.outputs[k], sets.tables.seconds[k], sets.working[k]
        ways, earlier = sets.savings[k], sets.free[t] & sets.below[t]
        for (needed, candidates, must), state in pending.items():
            kept = candidates & ~writes
            if not self.every or self._fits(t - 1, needed & ~(kept | must)):
                waiting.add(needed, kept, state, must)
            seconds, held, trail = state
            seconds += takes
            if seconds >= self.most:
                continue
            missing = bytes_of(reads & ~needed)
            short = held + missing + bytes_of(writes & ~needed) + working - room
            gone, fits = bytes_of(needed & writes), short <= 0 or (ways and short <= sets.saved(t, k, needed))
            if fits:
                again = seconds, held + missing - gone, (trail, t, k)
                waiting.add(needed & ~writes | reads, kept | must | reads & earlier, again)
            if self.any_order and (must or sets.has_savings or not fits or missing > gone):
                waiting.add(needed, kept, state, must | candidates & writes)

    def _end(self, t: int, states: States) -> States:
        states = {needed: state for needed, state in states.items() if self._fits(t - 1, needed)}
        # Keep the most promising, without those dominated in bytes and seconds; or merge the others into them.
        if len(states) > 1:
            needed_sets = list(states)
            order = (needed_sets[i] for i in self._by_promise(needed_sets, [state[0] for state in states.values()], t))
            best = list(islice(self._undominated(states, order), None if self.merge else self.width + 1))
            self.complete &= len(best) <= self.width
            if self.merge and len(best) > self.width:
                states = {needed: state for needed, (state, _) in self._merged(best, states, self.width, t).items()}
            else:
                states = {needed: states[needed] for needed in best[: self.width]}
        # The known plan's own state goes on where none is as good.
        if self.beside:
            needed, state = self.beside[t]
            if needed not in states or state[0] < states[needed][0] * (1 - 1e-12):
                states[needed] = state
        return states

    def _fits(self, t: int, needed: int) -> bool:
        """Tell whether op t fits if ``needed`` is in memory after it; true before the first stage."""
        return t < 0 or self.sets.at(t, t, needed) <= self.budget

    def _thin_waiting(self, t: int, waiting: Waiting) -> None:
        self.complete = False
        if not self.merge:
            keys = [(at, key, state[0]) for at, group in waiting.groups.items() for key, state in group.items()]
            order = self._by_promise([key[0] for _, key, _ in keys], [seconds for _, _, seconds in keys], t)
            for i in order[self.width :]:
                at, key, _ = keys[i]
                del waiting.groups[at][key]
            waiting.count = min(waiting.count, self.width)
            return
        # Halve each large group: what one of two may still decide on, both may.
        for at, group in waiting.groups.items():
            if len(group) < LEAST_GROUP:
                continue
            candidates_of: dict[int, int] = {}
            states: States = {}
            for (needed, candidates, must), state in group.items():
                needed &= ~must  # as if it were to be had for nothing
                candidates_of[needed] = candidates_of.get(needed, 0) | candidates
                if needed not in states or state[0] < states[needed][0]:
                    states[needed] = state
            needed_sets = list(states)
            order = self._by_promise(needed_sets, [state[0] for state in states.values()], t)
            merged = self._merged([needed_sets[i] for i in order], states, len(group) // 2, t)
            waiting.groups[at] = {
                (needed, reduce(or_, (candidates_of[part] for part in parts)) & needed, 0): state
                for needed, (state, parts) in merged.items()
            }
        waiting.count = sum(map(len, waiting.groups.values()))

    def _merged(self, needed_sets: list[int], states: States, width: int, t: int) -> dict[int, tuple[State, list[int]]]:
        """Merge the least promising states, which come last, into others: what both need keeps the bound valid.

        Each goes into that with which it has the most left: the cheaper one's seconds, and the price of what both need.
        Gives each new state with the sets that it was merged of.
        """
        bits, seconds = self._bits(needed_sets), np.array([states[needed][0] for needed in needed_sets])
        priced = bits[:width] * self.price[:, t]
        parts = [[needed] for needed in needed_sets[:width]]
        for i in range(width, len(needed_sets), CHUNK):
            chunk = slice(i, i + CHUNK)
            promise = priced @ bits[chunk].T + np.minimum(seconds[:width, None], seconds[chunk])
            for needed, j in zip(needed_sets[chunk], promise.argmax(axis=0).tolist(), strict=True):
                parts[j].append(needed)
        into: dict[int, list[int]] = {}
        for members in parts:
            into.setdefault(reduce(and_, members), []).extend(members)
        return {
            both: ((min(states[part][0] for part in members), self.sets.bytes_of(both), None), members)
            for both, members in into.items()
        }

    def _by_promise(self, needed_sets: list[int], seconds: list[float], t: int) -> list[int]:
        """Order states by the seconds of later reruns plus the price of the values needed before stage t."""
        with np.errstate(invalid="ignore"):  # BLAS may compute with what lies beside a short vector, and drops it
            promise = np.array(seconds) + self._bits(needed_sets) @ self.price[:, t]
        return np.argsort(promise, kind="stable").tolist()

    def _bits(self, needed_sets: list[int]) -> np.ndarray:
        """(n, values with a bit) float32, 0 or 1."""
        count = len(self.sets.values)
        width = (count + 7) // 8
        joined = np.frombuffer(b"".join(needed.to_bytes(width, "little") for needed in needed_sets), dtype=np.uint8)
        bits = np.unpackbits(joined.reshape(len(needed_sets), width), axis=1, count=count, bitorder="little")
        return bits.astype(np.float32)


def prices(sets: ValueSets, budget: int, worth: np.ndarray) -> np.ndarray:
    """(values with a bit, T + 1) float32: the price in seconds of a value in memory at the begin of a stage.

    A value is kept, at the price of its bytes in each stage, or made again from what its op reads, which has a price
    too; whichever is less. What two values are both made from counts for each of them.

    Args:
        worth: (T,) seconds that a byte is worth in each stage.
    """
    tables, problem, T = sets.tables, sets.problem, sets.T
    never, room = NEVER * problem.keep_all_cost, budget - problem.unavoidable_bytes
    place = {v: i for i, v in enumerate(sets.values)}
    of_op = np.zeros((T, T), dtype=np.float32)  # per op: to run it again in each stage
    price = np.zeros((len(sets.values), T + 1), dtype=np.float32)
    for k in range(T):
        # Seconds to run op k again in each stage: its own, and for each input the cheaper of kept or remade.
        again = np.full(T, tables.seconds[k])
        again[tables.last_stage[k] + 1 :] = never
        for u in tables.inputs[k]:
            if u in place:
                again += np.minimum(price[place[u], :T], of_op[tables.producer[u]])
        of_op[k] = np.minimum(again, never)
        for v in tables.outputs[k]:
            if v in place:
                # A value in memory at stage t was made at its op or later, and has been kept since.
                size = tables.size[v]
                full = size > room
                full[list(tables.users[v])] = False  # its readers have it in memory in any case
                keep = np.where(full, never, worth * size)[k + 1 :]
                kept = np.concatenate([[0.0], keep.cumsum()])  # from the stage after its op on
                begun = np.concatenate([[0.0], of_op[k, k + 1 :]])  # at its op, or again in a later stage
                price[place[v], k + 1 :] = np.minimum(kept + np.minimum.accumulate(begun - kept), never)
    return price


def backward_bound(task: Task, incumbent: Incumbent, *, widths: Sequence[int] = WIDTHS) -> None:
    """Prove a lower bound in the time given, with more and more states, merged if there are too many.

    Close to the smallest budget few sets of values fit, and that is where other bounds are far off. Values so small
    that all of them together do not matter count as if they were always at hand once made; only a schedule that fits
    with them as well is offered.

    Args:
        widths: how many states go on, unmerged, in one search after another.

    >>> from checkmate.core.problem import Problem
    >>> task = Task(Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4), budget=3)
    >>> incumbent = Incumbent(task)
    >>> backward_bound(task, incumbent)
    >>> incumbent.cost, incumbent.bound
    (4.0, 4.0)
    """
    problem, budget, once = task.problem, task.budget, task.problem.keep_all_cost
    sets = ValueSets(problem, grain=grain_of(problem, int(GRAIN * budget)))
    R = np.eye(sets.T, dtype=bool) if incumbent.R is None else incumbent.R
    worth = bytes_in_stages(problem, R)[0] / budget
    forward = problem.seconds[: problem.graph.forward_length].sum()
    any_order, plan = sets.T <= MOST_OPS_IN_ANY_ORDER, incumbent.plan
    price = prices(sets, budget, WORTH * forward / (problem.keep_all_peak * worth.sum() or 1.0) * worth)
    for width in widths:
        beam = Beam(sets, budget, width, price, task.clock, any_order=any_order)
        if any_order or plan is None or plan.is_a_schedule:  # else all schedules may be dearer than the known plan
            beam.most = incumbent.cost - once
        again, stages = beam.bound()
        incumbent.prove(once + again)
        if stages is not None and obeys_limits(problem, as_matrix(stages)):
            incumbent.offer(stages, "backward bound")
        if again < BEHIND * (incumbent.bound - once):
            return
        if beam.complete or task.clock.is_over or incumbent.cost - incumbent.bound <= task.gap * incumbent.cost:
            return


def detours(task: Task, R: np.ndarray) -> np.ndarray:
    """A schedule (T, T) within the budget, no dearer than R, which is within the budget too.

    Beams beside R with random prices, wider and wider. The same seed gives the same plans where no clock binds.

    >>> from checkmate.core.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> detours(Task(problem, 3), np.tril(np.ones((4, 4), dtype=bool))).sum(axis=0)
    array([1, 1, 1, 1])
    """
    problem, budget, clock = task.problem, task.budget, task.clock
    sets, rng, width, quiet = ValueSets(problem), np.random.default_rng(task.seed), FIRST_WIDTH, 0
    forward = problem.seconds[: problem.graph.forward_length].sum()
    while not clock.is_over and width <= WIDEST:
        # Draw prices around how full each stage is.
        worth = (bytes_in_stages(problem, R)[0] / budget) ** rng.choice(POWERS)
        worth *= np.exp(rng.uniform(*np.log(WORTHS))) * forward / (problem.keep_all_peak * worth.sum())
        price = prices(sets, budget, worth)
        price *= np.exp(rng.normal(0.0, rng.choice(NOISES), (len(price), 1))).astype(np.float32)
        schedule = Beam(sets, budget, width, price, clock).search(R)
        better = schedule is not None and cost_of(problem, schedule) < cost_of(problem, R) * (1 - 1e-9)
        # a beam knows not how often an op has run
        if schedule is not None and better and obeys_limits(problem, schedule):
            improved = exchange(task.within(SHARE_OF_EXCHANGE * clock.left), as_stages(schedule))
            R, quiet = as_matrix(improved), 0
        else:
            quiet += 1
        if quiet == ROUND:
            width, quiet = WIDER * width, 0
    return R
