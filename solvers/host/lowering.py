"""From an answer of the exact model to a plan, whose transfers then move to where they are waited for least.

The model knows stages only. A plan has its transfers between any two steps: a `Wait` comes as late as what is read or
what needs the room allows, and a transfer is asked for as early as that makes the step faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Step, Wait
from checkmate.core.problem import Problem
from checkmate.solvers.common.task import Clock


def as_plan(problem: Problem, x: Mapping[str, np.ndarray]) -> Plan:
    """The plan of (T, T) R and (T, V) S, K, H, Out, In, E and F, all bool, as `checkmate.solvers.host.stages` has them.

    Of the transfers that are asked for at once, the first to be waited for is asked for first.
    """
    lowering = _Lowering(problem, x)
    for t in range(len(problem.graph.ops)):
        lowering.wait(t)
        lowering.ask(t)
        lowering.run(t)
        if t + 1 == problem.graph.forward_length:
            lowering.boundary = len(lowering.steps)
    lowering.steps += [Drop(v) for v in sorted(lowering.there)]
    return without_useless_copies(Plan(tuple(lowering.steps), lowering.boundary))


@dataclass
class _Lowering:
    problem: Problem
    x: Mapping[str, np.ndarray]
    steps: list[Step] = field(default_factory=list)
    boundary: int = 0
    here: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)  # complete copies
    sending: dict[int, None] = field(default_factory=dict)
    fetching: dict[int, None] = field(default_factory=dict)

    def wait(self, t: int) -> None:
        """What ends before the ops of stage t run: first what goes, then what comes."""
        x, results = self.x, set(self.problem.graph.outputs)
        self._drop([v for v in self.there if not x["H"][t, v] and not x["F"][t, v]])
        ending = [v for v in self._in_order(self.sending, x["E"][t]) if v not in self.there]
        for v in ending:
            if v not in self.sending:
                self.steps.append(Send(v))
        for v in ending:
            self.steps.append(Wait(v))
            self.sending.pop(v, None)
            self.there.add(v)
        for v in sorted(v for v in self.here - results if not x["S"][t, v] and v not in self.sending):
            self.steps.append(Free(v))
            self.here.discard(v)
        coming = [v for v in self._in_order(self.fetching, x["F"][t]) if v not in self.here]
        for v in coming:
            if v not in self.fetching:
                self.steps.append(Fetch(v))
        for v in coming:
            self.steps.append(Wait(v))
            self.fetching.pop(v, None)
            self.here.add(v)
        self._drop([v for v in self.there if not x["H"][t, v] and v not in self.fetching])

    def ask(self, t: int) -> None:
        """What goes on beside the ops of stage t, as far as it has not begun."""
        for v in self._by_end(self.x["Out"][t], self.x["E"], t):
            if v in self.here and v not in self.sending and v not in self.there:
                self.steps.append(Send(v))
                self.sending[v] = None
        for v in self._by_end(self.x["In"][t], self.x["F"], t):
            if v not in self.fetching and v not in self.here:
                self.steps.append(Fetch(v))
                self.fetching[v] = None

    def run(self, t: int) -> None:
        """The ops of stage t; what is not kept goes behind its last use."""
        problem, graph, kept = self.problem, self.problem.graph, self.x["K"][t]
        ops = np.flatnonzero(self.x["R"][t]).tolist()
        last = {v: k for k in ops for v in (*graph.ops[k].outputs, *graph.ops[k].inputs)}
        stay = set(graph.outputs).union(np.flatnonzero(kept).tolist(), self.sending)
        unread = sorted(v for v in self.here - stay if v not in last)
        self.steps += map(Free, unread)
        self.here.difference_update(unread)
        for k in ops:
            op = graph.ops[k]
            self.here.update(op.outputs)
            touched = {*op.inputs, *op.outputs} & self.here
            dying = sorted(v for v in touched - stay if last[v] == k)
            saved = problem.saved(k, dying)
            over = None if saved is None else saved[0]
            self.steps += [Run(k, over), *(Free(v) for v in dying if v != over)]
            self.here.difference_update(dying)

    def _drop(self, values: list[int]) -> None:
        self.steps += map(Drop, sorted(values))
        self.there.difference_update(values)

    def _in_order(self, going: Mapping[int, None], ends: np.ndarray) -> list[int]:
        """Those that end now, first the ones under way, as they were asked for."""
        found = [v for v in going if ends[v]]
        return found + [v for v in np.flatnonzero(ends).tolist() if v not in going]

    def _by_end(self, goes: np.ndarray, ends: np.ndarray, t: int) -> list[int]:
        return sorted(np.flatnonzero(goes).tolist(), key=lambda v: int(np.argmax(ends[t + 1 :, v])))


def without_useless_copies(plan: Plan) -> Plan:
    """The plan without transfers to the second memory of what is not fetched from there.

    >>> print(without_useless_copies(Plan((Run(0), Send(0), Run(1), Wait(0), Drop(0)), 5)))
    forward
         0  run 0
         1  run 1
    """
    gone: set[int] = set()
    for i, step in enumerate(plan.steps):
        if isinstance(step, Send):
            life = [i]
            for j, other in enumerate(plan.steps[i + 1 :], i + 1):
                if isinstance(other, (Wait, Drop, Fetch)) and other.value == step.value:
                    life.append(j)
                    if not isinstance(other, Wait):
                        break
            if not isinstance(plan.steps[life[-1]], Fetch):
                gone.update(life)
    steps = tuple(step for i, step in enumerate(plan.steps) if i not in gone)
    return Plan(steps, plan.boundary - sum(i < plan.boundary for i in gone))


def polished(plan: Plan, problem: Problem, budget: int, clock: Clock) -> Plan:
    """A plan with the same runs that is no slower: waits as late as can be, transfers asked for earlier or later.

    Args:
        plan: that fits.
        clock: for how long to go on.
    """
    best, seconds = plan, simulator.cost(plan, problem)
    least = float(sum(problem.seconds[k] for k in plan.runs))
    improved = True
    while improved and not clock.is_over and seconds > least:
        improved = False
        for other in _moved(best):
            if clock.is_over:
                break
            cost = simulator.cost(other, problem)
            if cost < seconds * (1 - 1e-9) and not simulator.verify(other, problem, budget):
                best, seconds, improved = other, cost, True
                break
    return best


def _moved(plan: Plan) -> Iterator[Plan]:
    """Plans in which one transfer is asked for, or waited for, between two other runs, with what goes then."""
    runs = [i for i, step in enumerate(plan.steps) if isinstance(step, Run)]
    of: dict[int, list[int]] = {}
    for i, step in enumerate(plan.steps):
        if not isinstance(step, Run):
            of.setdefault(step.value, []).append(i)
    for mine in of.values():
        for before, i, after in zip([-1, *mine], mine, [*mine[1:], len(plan.steps)], strict=False):
            if isinstance(plan.steps[i], Wait):
                for at in (j for j in [*runs, len(plan.steps)] if j > i + 1):
                    yield _move(plan, i, at, together=True)
            if isinstance(plan.steps[i], (Send, Fetch, Wait)):
                for at in (j for j in reversed(runs) if before < j < i):
                    yield _move(plan, i, at, together=False)
                for at in (j for j in runs if i + 1 < j <= after):
                    yield _move(plan, i, at, together=False)


def _move(plan: Plan, i: int, at: int, *, together: bool) -> Plan:
    """Step i before what is step ``at``; together: with the `Free` and `Drop` of its value up to there."""
    steps, value = plan.steps, getattr(plan.steps[i], "value", None)
    group = [i]
    if together:
        group += [j for j in range(i + 1, at) if isinstance(steps[j], (Free, Drop)) and _value(steps[j]) == value]
    chosen = set(group)
    order = [j for j in range(at) if j not in chosen] + group + [j for j in range(at, len(steps)) if j not in chosen]
    first_after = {j: place for place, j in enumerate(order)}
    backward = [first_after[j] for j in range(plan.boundary, len(steps)) if isinstance(steps[j], Run)]
    return Plan(tuple(steps[j] for j in order), min(backward, default=len(steps)))


def _value(step: Step) -> int | None:
    return None if isinstance(step, Run) else step.value
