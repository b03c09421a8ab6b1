"""A schedule as two matrices, R of runs and S of kept values, with the paper's equations term by term.

Rows are stages: stage t ends with the first execution of op t, and before that may run any earlier op again, in order.
``R[t, k]``: op k runs in stage t. ``S[t, v]``: value v, made in an earlier stage, is at hand when stage t begins.
Equation numbers are those of Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020. We differ from the paper in that S is of values and not of ops, and in that a result of the step is held
from its first execution on; if its op runs again, the second copy of the result is dropped when the op is done.

Paper: https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.plan import Fetch, Free, Plan, Run, Start, Step, Wait

KIND = "each op once a stage at most, in PyTorch's order"  # of schedules, in words: most proofs are of these


@dataclass(frozen=True, eq=False)
class Schedule:
    """The ops that run and the values that are kept in each stage.

    >>> from checkmate.core.problem import Problem
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> R = np.eye(4, dtype=bool)
    >>> R[3, 0] = True  # run op 0 again just before op 3
    >>> again = Schedule.from_runs(problem.graph, R)
    >>> again.recomputed
    array([1, 0, 0, 0])
    """

    R: np.ndarray  # (T, T) bool
    S: np.ndarray  # (T, V) bool

    @classmethod
    def of_plan(cls, graph: Graph, plan: Plan, kept: Iterable[int] = ()) -> Schedule:
        """Read R and S from a plan: S says what is at hand, and not what waits in a second memory or is on its way.

        An op that a link carries counts as run where it starts. Values of ``kept`` are at hand when the step begins.
        """
        plan = run_at_once(plan, graph)
        T, V = len(graph.ops), len(graph.values)
        R, S = np.zeros((T, T), dtype=bool), np.zeros((T, V), dtype=bool)
        at_hand, fetching = np.isin(np.arange(V), [*kept]), set[int]()
        t = 0
        for step in plan.steps:
            if isinstance(step, Run):
                if not R[t].any():  # the stage begins
                    S[t] = at_hand
                R[t, step.op] = True
                at_hand[[*graph.ops[step.op].outputs]] = True
                if step.over is not None:
                    at_hand[step.over] = False
                t = min(t + (step.op == t), T - 1)
            elif isinstance(step, Free):
                at_hand[step.value] = False
            elif isinstance(step, Fetch):
                fetching.add(step.value)
            elif isinstance(step, Wait) and step.value in fetching:
                fetching.remove(step.value)
                at_hand[step.value] = True
        return cls(R, S)

    @classmethod
    def from_runs(cls, graph: Graph, R: np.ndarray) -> Schedule:
        """The schedule that runs R and keeps no more than R needs.

        S[t, v] = 1 where v was made earlier and, before its producer runs again, a user of v runs in stage t or later;
        and for every result of the step once it is made.
        """
        R = np.asarray(R, dtype=bool)
        T, V = len(graph.ops), len(graph.values)
        stage, op = np.nonzero(R)
        made_by = np.array([-1 if v.producer is None else v.producer for v in graph.values])
        mask = made_by >= 0
        # moments of a value in one row of numbers: (T + 1) v, and after it one more for each stage
        makes = (T + 1) * np.arange(V)
        makes = np.unique(np.concatenate([makes, _touched(stage, op, [k.outputs for k in graph.ops], T)]))
        reads = _touched(stage, op, [k.inputs for k in graph.ops], T)
        last = makes.copy()  # for each run of a producer, the last read before the next; for what was never made, too
        np.maximum.at(last, np.searchsorted(makes, reads, side="right") - 1, reads)
        read = (last > makes) & mask[makes // (T + 1)]
        S = np.zeros((T + 1, V), dtype=bool)
        for ends in (makes[read], last[read]):  # where being at hand begins and ends
            S[ends % (T + 1), ends // (T + 1)] = True
        S = S[:T]
        for t in range(1, T):
            np.logical_xor(S[t - 1], S[t], out=S[t])
        outputs = list(graph.outputs)
        S[:, outputs] = (np.arange(T)[:, None] > made_by[outputs]) & mask[outputs]
        return cls(R, S)

    @cached_property
    def recomputed(self) -> np.ndarray:
        """(T,) int: how often each op runs beyond its first time."""
        return self.R.sum(axis=0) - 1


class Packed(Schedule):
    """A schedule that takes few bytes, and unpacks a matrix whenever it is asked for.

    >>> schedule = Packed(Schedule(np.eye(3, dtype=bool), np.zeros((3, 2), dtype=bool)))
    >>> schedule.R.sum(), schedule.S.shape
    (np.int64(3), (3, 2))
    """

    def __init__(self, schedule: Schedule) -> None:
        matrices = schedule.R, schedule.S
        vars(self)["_packed"] = [(m.shape, zlib.compress(np.packbits(m).tobytes(), 1)) for m in matrices]

    @property
    def R(self) -> np.ndarray:
        """(T, T) bool."""
        return self._unpacked(0)

    @property
    def S(self) -> np.ndarray:
        """(T, V) bool."""
        return self._unpacked(1)

    def _unpacked(self, i: int) -> np.ndarray:
        (rows, columns), packed = vars(self)["_packed"][i]
        bits = np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
        return np.unpackbits(bits, count=rows * columns).view(bool).reshape(rows, columns)


def _touched(stage: np.ndarray, op: np.ndarray, values: list[tuple[int, ...]], T: int) -> np.ndarray:
    """(N,) int: (T + 1) v + t + 1 for each value v that an op touches in stage t."""
    counts = np.array([len(vs) for vs in values])
    flat, begins = np.array([v for vs in values for v in vs], dtype=np.int64), np.cumsum(counts) - counts
    of_run = counts[op]
    place = np.arange(of_run.sum()) - np.repeat(np.cumsum(of_run) - of_run, of_run)
    return (T + 1) * flat[np.repeat(begins[op], of_run) + place] + np.repeat(stage, of_run) + 1


def run_at_once(plan: Plan, graph: Graph) -> Plan:
    """The plan with each started op run at its start, or in its turn if it starts earlier.

    It takes no more bytes at any run: what an op on a link holds, it holds from its start to its end, and the op's turn
    is not before the one nor after the other, as `checkmate.core.simulator.check_plan` asks for. So what is proven of
    all plans without starts, of bytes, and of how often ops run, holds for those with starts too.

    >>> from checkmate.core.graph import Op, Value
    >>> ops = Op("a", "f", (), (0,)), Op("gather", "f", (1,), (2,), link="ranks"), Op("b", "f", (0, 2), (3,))
    >>> graph = Graph(ops, (Value("x", 4, 0), Value("w", 1, None), Value("g", 2, 1), Value("y", 4, 2)), (3,))
    >>> run_at_once(Plan((Start(1), Run(0), Run(1), Run(2)), 4), graph).runs
    (0, 1, 2)
    """
    if not plan.started:
        return plan
    # ``turn`` is the stage: the next op to run for the first time.
    turn, steps, boundary = 0, list[Step](), 0
    under_way, early = set[int](), set[int]()
    for i, step in enumerate(plan.steps):
        if i == plan.boundary:
            boundary = len(steps)
        if isinstance(step, Run) and step.op in under_way:
            under_way.remove(step.op)
            continue
        # A first run that starts too early waits for its turn.
        if isinstance(step, Start):
            under_way.add(step.op)
            if step.op > turn:
                early.add(step.op)
                continue
            step = Run(step.op)
        steps.append(step)
        turn += isinstance(step, Run) and step.op == turn
        # Its turn has come.
        while turn in early:
            early.remove(turn)
            steps.append(Run(turn))
            turn += 1
    return Plan(tuple(steps), len(steps) if plan.boundary == len(plan.steps) else boundary)
