"""Functions of a schedule as a matrix R of the ops that run in each stage: make, tidy, cost, peak and limits.

Checkpointing heuristics choose what to keep; a schedule says what runs. Published code writes S by a formula that holds
for symmetric chains; here an event simulation fills in the runs, for any graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from checkmate.core import simulator
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.errors import SolverError

Stages = list[list[int]]  # the ops that run in each stage, in their order there; one may run several times


def on_demand(problem: Problem, kept_after: Mapping[int, Iterable[int]]) -> np.ndarray:
    """R (T, T) bool: free values after some stages, and remake missing ones on demand.

    After stage t of ``kept_after`` all values go but those listed there, results of the step, values that no op makes
    and those of pinned ops; what a rule has made again in the backward goes before it. What a later op misses runs
    again just before it, from what is at hand, and then stays until the next such stage; that is, until its last use,
    as `checkmate.core.schedule.Schedule.from_runs` frees it. What will be missed and cannot be made again later, since
    what it is made from is overwritten, is made while it can be, and stays.

    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> on_demand(chain, {2: [0, 2]}).sum(axis=0)  # op 3 misses the value of op 1
    array([1, 2, 1, 1, 1])
    """
    graph, closing = problem.graph, problem.limits.closing
    # Values that never go.
    always = {v for v, value in enumerate(graph.values) if value.producer is None} | set(graph.outputs)
    always.update(v for op in graph.ops if op.pinned is not None for v in op.outputs)
    R = np.eye(len(graph.ops), dtype=bool)
    at_hand = {v for v in always if graph.values[v].producer is None}
    for t, op in enumerate(graph.ops):
        always.update(closing.get(t, ()))
        # Run again what is missing, and what that is made from.
        missing = [v for v in (*op.inputs, *closing.get(t, ())) if v not in at_hand]
        while missing:
            k = graph.values[missing.pop()].producer
            if k is not None and not R[t, k]:
                R[t, k] = True
                at_hand.update(graph.ops[k].outputs)
                missing += [v for v in graph.ops[k].inputs if v not in at_hand]
        at_hand.update(op.outputs)
        # Free the others after this stage.
        if t in kept_after:
            at_hand &= always.union(kept_after[t])
        if t + 1 == graph.forward_length:
            at_hand -= problem.limits.recomputed
    return without_useless(graph, R) if closing else R


def kept_by_the_forward(problem: Problem, kept: Iterable[int]) -> np.ndarray:
    """R (T, T) bool: of the forward's values only ``kept`` (indices) reach the backward.

    Within the forward nothing runs again: each value stays until its last use there.
    """
    return on_demand(problem, {problem.graph.forward_length - 1: kept})


def ops_for(graph: Graph, ops: range, values: Iterable[int], anyway: Collection[int] = ()) -> tuple[int, ...]:
    """The ops of a range, ascending, that must run to make these values from those made elsewhere, or there ``anyway``.

    >>> ops_for(Problem.from_dag([[], [0], [], [1]], seconds=[1] * 4, sizes=[1] * 4).graph, range(4), [3], anyway=[0])
    (1, 3)
    """
    needed, runs = set(values), []
    for k in reversed(ops):
        if not needed.isdisjoint(graph.ops[k].outputs):
            runs.append(k)
            needed.update(v for v in graph.ops[k].inputs if v not in anyway)
    return tuple(reversed(runs))


def without_forbidden(problem: Problem, R: np.ndarray) -> np.ndarray:
    """R (T, T) without runs of ops whose inputs have been overwritten by then: their results stay instead."""
    R = R.copy()
    for k, last in problem.limits.last_stage.items():
        R[last + 1 :, k] = False
    return R


def as_matrix(stages: Stages) -> np.ndarray:
    """R (T, T) bool from the ops that run in each stage."""
    R = np.zeros((len(stages), len(stages)), dtype=bool)
    for t, ops in enumerate(stages):
        R[t, ops] = True
    return R


def as_stages(R: np.ndarray) -> Stages:
    """The ops that run in each stage of R (T, T)."""
    return [np.flatnonzero(row).tolist() for row in R]


def cost_of(problem: Problem, R: np.ndarray) -> float:
    """Seconds of all runs in R (T, T)."""
    return float(R.sum(axis=0) @ problem.seconds)


def peak_of(problem: Problem, R: np.ndarray) -> int:
    """The simulated peak in bytes of the plan of R (T, T).

    Raises:
        SolverError: if some op does not run in its own stage: no such R comes from a working solver.
    """
    if not R.diagonal().all():
        k = int(np.argmin(R.diagonal()))
        raise SolverError(f"An answer of the solver never runs {problem.graph.ops[k].name}.")
    return simulator.simulate(lowered(problem, R), problem).peak


def lowered(problem: Problem, R: np.ndarray) -> Plan:
    """The plan of R (T, T)."""
    return simulator.lower(problem, Schedule.from_runs(problem.graph, R))


def fits_budget(problem: Problem, budget: int, R: np.ndarray) -> bool:
    """Tell whether R (T, T) is a schedule within the budget, for searches that try many."""
    return obeys_limits(problem, R) and peak_of(problem, R) <= budget


def bytes_in_stages(problem: Problem, R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(T,), (T,) int64: the peak within each stage of R (T, T), and the bytes while the stage's own op runs."""
    usage = simulator.simulate(lowered(problem, R), problem)
    most, own = np.zeros(len(R), dtype=np.int64), np.zeros(len(R), dtype=np.int64)
    stage = 0
    for op, live in zip(usage.ops, usage.bytes_at, strict=True):
        most[stage] = max(most[stage], live)
        if op == stage:
            own[stage], stage = live, stage + 1
    return most, own


def obeys_limits(problem: Problem, R: np.ndarray) -> bool:
    """Tell whether R (T, T) obeys the limits on runs: how often, how late, and which values are remade.

    For searches that try many; the certifier looks for itself.

    >>> from checkmate.core.rules import with_rules
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4, forward=3)
    >>> again = np.eye(4, dtype=bool)
    >>> again[3, 0] = True
    >>> problem = with_rules(chain, {"op": "recompute"})
    >>> obeys_limits(problem, again), obeys_limits(with_rules(chain, {"op": 1}), again), obeys_limits(chain, again)
    (False, False, True)
    """
    graph, limits, begin = problem.graph, problem.limits, problem.graph.forward_length
    pinned = [k for k, op in enumerate(graph.ops) if op.pinned]
    if problem.rules and (R[:, pinned].sum(axis=0) > 1).any():
        return False
    if any(R[:, k].sum() > most for k, most in limits.max_runs.items()):
        return False
    if any(R[last + 1 :, k].any() for k, last in limits.last_stage.items()):
        return False
    # Values under a "recompute" rule are remade in the backward before anything reads them there.
    for v in limits.recomputed:
        reads = np.flatnonzero(R[begin:, list(graph.users[v])].any(axis=1))
        runs = np.flatnonzero(R[begin:, graph.values[v].producer])
        if len(reads) and (not len(runs) or reads[0] < runs[0]):
            return False
    return True


def without_useless(graph: Graph, R: np.ndarray) -> np.ndarray:
    """R (T, T) without runs whose outputs are never read before they are made again."""
    return as_matrix(useful_runs(graph, as_stages(R)))


def useful_runs(graph: Graph, stages: Stages) -> Stages:
    """Remove useless runs as `without_useless` does, from the ops that run in each stage, in any order."""
    useful: Stages = []
    needed: set[int] = set()
    for t in reversed(range(len(stages))):
        ops: list[int] = []
        for k in reversed(stages[t]):
            op = graph.ops[k]
            if k >= t or not needed.isdisjoint(op.outputs):
                needed.difference_update(op.outputs)
                needed.update(op.inputs)
                ops.append(k)
        useful.append(ops[::-1])
    return useful[::-1]
