"""Plans that PyTorch's partitioner can follow: forward ops that run again, once, when the backward first needs them.

Nothing runs twice in the forward. The backward gets what the other ops made, the *kept* ones; what else it reads is
made again just before its first reader, with all that this takes, and then stays until its last. So the set says all:
the seconds are those of what runs again, the peak is the largest of the bytes at hand at any moment.

The plan of fewest seconds within a budget is searched for, with a number of plans that does not depend on the clock:
every process finds the same one. First minimum cuts for more and more bytes (`checkmate.solvers.baselines.min_cut`),
and plans by three numbers, as Chen et al. 2016 divide a chain: the forward is divided into so many parts of equal bytes
where the fewest bytes pass on, which are kept; in the first so many parts, which wait longest, all ops run again but
those that take the most seconds for their bytes. Then op by op: less that runs again, and others in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.baselines.min_cut import candidates, cut, most_seconds
from checkmate.solvers.common.flat_problem import Tables

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the ops of a part, which run again
MOST_PARTS = 32  # into which the forward is divided
FEW = 8  # ops, of which all plans are tried
CUTS = 16  # allowances of bytes, from everything to nothing
STARTS, MOST_PLANS = 3, 1500  # from which it goes on op by op, and plans that each may try
GIVEN_UP, AMONG = 4, 6  # ops that may run again so that one need not; each the best of so many


@dataclass(frozen=True)
class Choice:
    """A plan: the forward ops that run again, with its peak and seconds."""

    again: frozenset[int]
    kept: frozenset[int]  # the others, of which the backward gets what it reads
    peak: int  # bytes, with all that is there before the step
    seconds: float  # of what runs again
    at: int = field(default=0, repr=False)  # the op of the backward at which the peak is, or before which


class KeptOps:
    """The plans of a problem; thousands can be evaluated in a second.

    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> plans = KeptOps(chain)
    >>> plans.free, plans.of([]).peak, plans.of([1]).again
    ((0, 1, 2), 4, frozenset({1}))
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tables = problem, Tables.of(problem)
        tables, last = self.tables, len(self.tables.inputs) - 1
        self.forward = range(tables.boundary)
        self.backward = range(tables.boundary, last + 1)
        self._reads = [  # the ops that make what each reads, but for results: these are at hand anyway
            tuple(dict.fromkeys(tables.producer[v] for v in vs if not tables.result[v])) for vs in tables.inputs
        ]
        needed: set[int] = set()  # ops that make what the backward reads, or lead to it
        for k in reversed(range(last + 1)):
            if k >= tables.boundary or k in needed:
                needed.update(self._reads[k])
        again = [not pinned and stage == last for pinned, stage in zip(tables.pinned, tables.last_stage, strict=True)]
        self.free = tuple(k for k in self.forward if k in needed and again[k])
        self.bytes_of = [sum(tables.size[v] for v in made) for made in tables.outputs]  # of what each op makes

    def of(self, ops: Iterable[int]) -> Choice:
        """The plan in which these ops, and no others, run again where their results are missing."""
        tables, may = self.tables, {*ops}
        runs: list[int] = []
        again: set[int] = set()
        kept: set[int] = set()
        for k in self.backward:
            missing: set[int] = set()
            stack = [*self._reads[k]]
            while stack:
                j = stack.pop()
                if j in may and j < tables.boundary and j not in again and j not in missing:
                    missing.add(j)
                    stack += self._reads[j]
                elif j not in may and j < tables.boundary:
                    kept.add(j)
            runs += sorted(missing)
            again |= missing
            runs.append(k)
        # The peak, and the place at which it is. ~v is the copy of v that is made again, which the backward reads; of a
        # result it reads the first.
        order, border, size, result = [*self.forward, *runs], tables.boundary, tables.size, tables.result
        second = {v: ~v for k in again for v in tables.outputs[k] if not result[v]}
        last = {v: i for i, k in enumerate(self.forward) for v in tables.inputs[k]}
        for i in range(border, len(order)):
            for v in tables.inputs[order[i]]:
                last[second.get(v, v)] = i
        freed = [0] * len(order)
        for v, i in last.items():
            freed[i] += 0 if v >= 0 and result[v] else size[max(v, ~v)]
        live, peak, at = tables.resident, tables.resident, 0
        for i, k in enumerate(order):
            live += self.bytes_of[k]
            if live + tables.workspace[k] > peak:
                peak, at = live + tables.workspace[k], i
            live -= freed[i]
            # Free what nobody reads, and second copies of results.
            if i >= border and k in again:
                live -= sum(size[v] for v in tables.outputs[k] if ~v not in last)
            else:
                live -= sum(size[v] for v in tables.outputs[k] if v not in last and not result[v])
        op = runs[max(at - border, 0)] if runs else 0
        return Choice(frozenset(again), frozenset(kept), peak, sum(tables.seconds[k] for k in again), op)

    @cached_property
    def everything(self) -> Choice:
        """The plan in which nothing runs again."""
        return self.of(())

    @cached_property
    def borders(self) -> list[tuple[int, frozenset[int]]]:
        """Places in the forward that the fewest bytes of free ops cross, with the ops that made those values."""
        of, reads = {*self.free}, self._reads
        passing = [
            frozenset(j for k in self.forward[at:] for j in reads[k] if j < at and j in of) for at in self.forward
        ]
        weight = [sum(self.bytes_of[k] for k in ops) for ops in passing]
        inner = range(1, len(weight) - 1)
        return [(k, passing[k]) for k in inner if weight[k] <= weight[k - 1] and weight[k] < weight[k + 1]]


def fewest_seconds(plans: KeptOps, budget: int) -> Choice | None:
    """The plan of the fewest seconds within a budget that is found; None if none is.

    >>> chain = Problem.from_dag([[]] + [[k] for k in range(4)] + [[4], [5, 3], [6, 2], [7, 1], [8, 0]],
    ...     seconds=[1, 2, 2, 2, 2] + [1] * 5, sizes=[4] * 5 + [1] * 5, forward=5)
    >>> plans = KeptOps(chain)
    >>> plans.everything.peak, sorted(fewest_seconds(plans, 18).again)
    (21, [0])
    """
    if plans.everything.peak <= budget:
        return plans.everything
    fitting = [choice for choice in _starts(plans, budget) if choice.peak <= budget]
    if not fitting:
        least = least_peak(plans)
        fitting = [least] if least.peak <= budget else []
    if not fitting:
        return None
    starts = sorted(fitting, key=lambda choice: (choice.seconds, choice.peak))[:STARTS]
    return min((_op_by_op(plans, start, budget) for start in starts), key=lambda choice: choice.seconds)


def least_peak(plans: KeptOps) -> Choice:
    """The plan of the smallest peak that is found; of several, the one of the fewest seconds."""
    best, before = min([plans.everything, *_starts(plans, 0)], key=_peak_first), None
    tried = 0
    while best is not before and tried < MOST_PLANS:
        before = best
        for k in plans.free:
            best = min(best, plans.of(best.again ^ {k}), key=_peak_first)
        tried += len(plans.free)
    return best


def _peak_first(choice: Choice) -> tuple[int, float]:
    return choice.peak, choice.seconds


def _starts(plans: KeptOps, budget: int) -> Iterator[Choice]:
    """Plans to begin the search with; if there are only a few free ops, all plans."""
    if len(plans.free) <= FEW:
        yield from map(plans.of, chain.from_iterable(combinations(plans.free, n) for n in range(FEW + 1)))
        return
    # Minimum cuts, each with the ops that a knapsack picks for an allowance of bytes.
    tables, may, free = plans.tables, candidates(plans.problem), {*plans.free}
    seconds = {k: tables.seconds[k] for k in may}
    weight = {k: plans.bytes_of[k] for k in may}
    for i in range(CUTS):
        saved = cut(plans.problem, most_seconds(seconds, weight, sum(weight.values()) * i // CUTS))
        yield plans.of(free.difference(tables.producer[v] for v in saved))
    # Plans by parts: in the first part of the forward, the first two and so on, a share of the ops runs again, those of
    # the fewest seconds for their bytes, but not those whose results pass on to the next part.
    made = np.cumsum([plans.bytes_of[k] if k in free else 0 for k in plans.forward])
    order = sorted(plans.free, key=lambda k: tables.seconds[k] / max(1, plans.bytes_of[k]))
    seen: set[tuple[int, ...]] = set()
    for parts in range(1, min(MOST_PARTS, len(plans.borders) + 1) + 1):
        ends: list[tuple[int, frozenset[int]]] = []
        for i in range(1, parts):
            aim = made[-1] * i / parts
            place = min(plans.borders, key=lambda border: abs(int(made[border[0]]) - aim), default=None)
            if place is not None and (not ends or place[0] > ends[-1][0]):
                ends.append(place)
        ends.append((tables.boundary, frozenset()))
        checkpoints = frozenset(k for _, ops in ends for k in ops)
        for share in SHARES:
            cheap = {*order[: round(share * len(order))]} - checkpoints
            rows = [tuple(k for k in plans.free if k < end and k in cheap) for end, _ in ends]
            # Bisect for the fewest parts to run again within the budget.
            low, high = 0, len(rows) - 1
            while low <= high and rows[(low + high) // 2] not in seen:
                middle = (low + high) // 2
                seen.add(rows[middle])
                choice = plans.of(rows[middle])
                yield choice
                low, high = (low, middle - 1) if choice.peak <= budget else (middle + 1, high)


def _op_by_op(plans: KeptOps, best: Choice, budget: int) -> Choice:
    """Stop running ops again one by one, the dearest first; cheaper ops may have to run again instead."""
    tables, before, tried = plans.tables, None, 0
    while best is not before and tried < MOST_PLANS:
        before = best
        for k in sorted(best.again, key=lambda k: -tables.seconds[k]):
            if k not in best.again or tried >= MOST_PLANS:
                continue
            choice, given_up = plans.of(best.again - {k}), 0
            tried += 1
            while choice.peak > budget and choice.seconds < best.seconds and given_up < GIVEN_UP:
                choice, given_up = _give_up(plans, choice, k), given_up + 1
                tried += AMONG
            if choice.peak <= budget and choice.seconds < best.seconds:
                best = choice
    return best


def _give_up(plans: KeptOps, choice: Choice, but: int) -> Choice:
    """Run one more op again: the one that costs the fewest seconds per byte off the peak."""
    tables, may = plans.tables, choice.kept.intersection(plans.free) - {but}
    reads = {k: [tables.users[v][-1] for v in tables.outputs[k] if tables.users[v]] for k in may}  # the last of each
    waiting = [k for k in sorted(may) if any(last >= choice.at for last in reads[k])]
    waiting.sort(key=lambda k: tables.seconds[k] / max(1, plans.bytes_of[k]))
    lower = [plan for plan in (plans.of(choice.again | {k}) for k in waiting[:AMONG]) if plan.peak < choice.peak]
    return min(lower, key=lambda plan: (plan.seconds - choice.seconds) / (choice.peak - plan.peak), default=choice)
