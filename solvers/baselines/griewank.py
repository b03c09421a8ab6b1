"""Binomial checkpointing: with s slots for checkpoints, the fewest forward steps that reverse a chain of l.

Griewank and Walther, "Algorithm 799: revolve", 2000; also known as treeverse, or log n checkpointing. With states
x_0 → x_1 → … → x_l, reversing needs x_{l-1}, then x_{l-2}, down to x_0, each made by steps from the nearest checkpoint
below it. With s slots, of which x_0 takes one, β(s, r) = C(s + r, s) steps can be reversed such that none of them runs
more than r times, and the fewest steps for l are, with the first sweep up to x_{l-1},

    t(l, s) = r l − β(s + 1, r − 1)   where   β(s, r − 1) < l ≤ β(s, r)

x_0 is given before the step begins and takes no bytes, so s slots hold s − 1 values; x_j are all outputs of the j-th op
of the chain. l − 1 is the state that the first backward op needs; an op after it, the loss say, is not counted in t. On
chains of unit costs and sizes these schedules are optimal; elsewhere the steps are fewest, and slots differ in bytes.

We differ from the paper in that the slots are not given: of all numbers of slots, the cheapest schedule that fits is
taken. The method is for chains; asked to, it takes articulation points, or all forward ops in a row, for the chain.
Then t no longer holds: a backward op makes again what it misses, and ops between articulation points always run again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from math import comb

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.baselines.checkpointing import CANDIDATES, TRIES, cheapest, does_not_apply, droppable
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import on_demand


def griewank(task: Task, incumbent: Incumbent, *, candidates: str = "chain", tries: int = TRIES) -> Remarks:
    """The cheapest binomial schedule that fits. No plan if none does, or if the forward is no chain.

    Args:
        candidates: what to take for the states: "chain" for chains; "ap", articulation points, or "linearized", all
            forward ops in the order in which they run, for any graph.
        tries: how many numbers of slots to simulate.

    Raises:
        ValueError: if there are no such candidates.

    >>> from checkmate import solve
    >>> deps = [[], [0], [1], [2], [3], [2, 4], [1, 5], [0, 6]]
    >>> chain = Problem.from_dag(deps, seconds=[1] * 8, sizes=[1] * 8, forward=5)
    >>> [solve(chain, budget, method="griewank").cost for budget in (3, 4, 5)]
    [11.0, 9.0, 8.0]
    """
    if candidates not in CANDIDATES:
        raise ValueError(f"There are no candidates {candidates!r}. There are {', '.join(CANDIDATES)}.")
    problem = task.problem
    if candidates == "chain" and (no := does_not_apply(problem, "candidates='ap' and candidates='linearized'")):
        return no
    line = CANDIDATES[candidates](problem)
    needed = needs(problem, line)
    length = 1 + max(needed.values(), default=0)

    def runs(i: int) -> np.ndarray:
        return reversal(problem, line, needed, stored(length, i + 1))

    def of_best(i: int) -> dict[str, int]:
        return {"slots": i + 1, "least steps": least_steps(length, i + 1)}

    figures = {"candidates": len(line), "steps": length}
    return cheapest(task, incumbent, "griewank", length, runs, figures, of_best, tries=tries)


def beta(s: int, r: int) -> int:
    """β(s, r) = C(s + r, s), the steps that s slots reverse if no step runs more than r times; 0 for r < 0."""
    return comb(s + r, s) if r >= 0 else 0


def repetitions(steps: int, slots: int) -> int:
    """The r with β(s, r − 1) < l ≤ β(s, r)."""
    if slots == 1:
        return steps - 1
    return next(r for r in itertools.count() if beta(slots, r) >= steps)


def least_steps(steps: int, slots: int) -> int:
    """t(l, s): the fewest forward steps that reverse l steps with s slots, one of them for x_0.

    >>> least_steps(10, 3), least_steps(10, 10)  # one slot for each state: the first sweep is all
    (15, 9)
    """
    r = repetitions(steps, slots)
    return r * steps - beta(slots + 1, r - 1)


def stored(steps: int, slots: int) -> list[tuple[int, ...]]:
    """The states held in slots when each of x_0, …, x_{l-1} is needed, ascending.

    To reverse l steps from a state in a slot: m steps forward; store that state, reverse the last l − m steps with one
    slot less, drop it; reverse the first m. This m is one of those that reach t(l, s).

    >>> stored(5, 2)  # the slot beside x_0 holds x_3, and then x_1
    [(0,), (0, 1), (0, 1), (0, 3), (0, 3)]
    """
    at: list[tuple[int, ...]] = [()] * steps
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, steps, slots, (0,))]
    while todo:
        low, high, s, held = todo.pop()
        if high - low == 1:
            at[low] = held if s else held[:-1]  # without a slot, it is there only while it is needed
            continue
        r = repetitions(high - low, s)
        m = min(beta(s, r - 1), high - low - beta(s - 1, r - 1))
        todo.append((low, low + m, s, held))
        todo.append((low + m, high, s - 1, (*held, low + m)))
    return at


def needs(problem: Problem, line: Sequence[int]) -> dict[int, int]:
    """For each backward op that reads droppable values of the forward, the state from which they are remade.

    That is the lowest from which all it reads can be made: j where it reads what the j-th op of ``line`` makes, or what
    an op between that and the next makes. It never rises from one op to a later one.
    """
    graph, values = problem.graph, droppable(problem)
    needed: dict[int, int] = {}
    state = len(line)
    for t in range(graph.forward_length, len(graph.ops)):
        made_by = [graph.values[v].producer for v in graph.ops[t].inputs if v in values]
        if made_by:
            state = needed[t] = min([state, *(bisect_right(line, k) for k in made_by if k is not None)])
    return needed


def reversal(
    problem: Problem, line: Sequence[int], needed: dict[int, int], at: Sequence[tuple[int, ...]]
) -> np.ndarray:
    """R (T, T) bool: when the backward needs a state, it is remade from the nearest one in a slot.

    ``line``: the ops that make states 1, 2, …; ``needed`` and ``at``: as `needs` and `stored` give them.
    """
    graph = problem.graph
    ops = list(needed)
    if not ops:
        return np.eye(len(graph.ops), dtype=bool)
    always = set(range(len(graph.values))) - droppable(problem)

    def in_slots(t: int) -> set[int]:
        return {v for j in at[needed[t]] if j for v in graph.ops[line[j - 1]].outputs}

    # the first reversal keeps all that its ops read
    first = {v for t in ops if needed[t] == needed[ops[0]] for v in graph.ops[t].inputs}
    slots = in_slots(ops[0])
    kept_after = {graph.forward_length - 1: always | slots | first}
    for t, following in itertools.pairwise(ops):
        # let go only where another state is needed next, and of no slot that is still to be read
        if needed[following] < needed[t]:
            slots = {v for v in slots if graph.users[v] and graph.users[v][-1] > t} | in_slots(following)
            kept_after[t] = always | slots
    return on_demand(problem, kept_after)
