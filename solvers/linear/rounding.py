"""LP relaxation and two-phase rounding: the approximation of Jain et al., MLSys 2020, Section 5.

Phase one turns the relaxation's S* into a set of kept values: S = [S* >= θ], or a coin tossed for each S*. Phase two
runs the least that this S needs. The plan may break the budget, so the relaxation is solved at (1 - ε) · budget. We
differ from the paper in three ways: thresholds θ are swept, not only 1/2; ε is bisected by whether θ = 1/2 fits the
budget, not fixed at 0.1, which wastes some; a plan that fits loses the runs it can do without. The bound is the
relaxation's.

Paper: https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from checkmate.core import simulator
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import OPTIMAL_GAP, Solution, Status
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.runs import cost_of, without_useless
from checkmate.solvers.linear.highs import Outcome
from checkmate.solvers.linear.milp import relax

STEPS = 8  # of the bisection of ε
TRIES = 24  # thresholds or tosses of the coins at each ε


@dataclass
class Best:
    """The cheapest schedule so far that fits."""

    problem: Problem
    budget: int
    R: np.ndarray | None = None
    cost: float = float("inf")
    epsilon: float = 0.0

    def fits(self, R: np.ndarray) -> bool:
        """Whether a schedule stays within the budget, simulated."""
        plan = simulator.lower(self.problem.graph, Schedule.from_runs(self.problem.graph, R))
        return simulator.simulate(plan, self.problem).peak <= self.budget

    def offer(self, R: np.ndarray, epsilon: float, until: float) -> None:
        """Take R if it fits and, without the runs it can do without, is cheaper."""
        if self._cost(R) < 2 * self.cost and self.fits(R):
            R = self._without_needless(R, until)
            if self._cost(R) < self.cost:
                self.R, self.cost, self.epsilon = R, self._cost(R), epsilon

    def _cost(self, R: np.ndarray) -> float:
        return cost_of(self.problem, R)

    def _without_needless(self, R: np.ndarray, until: float) -> np.ndarray:
        """R without repeated runs, the most expensive first, whose outputs can be kept since the run before instead."""
        again = np.argwhere(np.tril(R, -1))
        for t, k in again[np.argsort(-self.problem.seconds[again[:, 1]], kind="stable")]:
            if R[t, k] and time.perf_counter() < until:
                fewer = R.copy()
                fewer[t, k] = False
                fewer = without_useless(self.problem.graph, fewer)
                R = fewer if self.fits(fewer) else R
        return R


def lp_rounding(
    problem: Problem,
    budget: int,
    *,
    randomized: bool = False,
    seed: int = 0,
    time_limit: float = 60.0,
    threads: int = 1,
) -> Solution:
    """The best plan within the budget that rounding the linear relaxation gives, with the relaxation's bound.

    NOT_FOUND where no rounding fits; INFEASIBLE where the relaxation itself does not.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 1, 1, 1], sizes=[1, 1, 1, 1])
    >>> lp_rounding(problem, budget=3).cost
    4.0
    """
    began = time.perf_counter()
    until = began + time_limit
    method = "lp-rounding (randomized)" if randomized else "lp-rounding"
    rng = np.random.default_rng(seed) if randomized else None
    best, bound, solved = Best(problem, budget), 0.0, 0
    low, high = 0.0, 1.0 - float(problem.unavoidable_bytes.max()) / budget  # beyond it there is no S*
    epsilon, outcome = 0.0, Outcome.STOPPED
    while solved <= STEPS and (left := until - time.perf_counter()) > 0:
        relaxed = relax(problem, int((1 - epsilon) * budget), time_limit=left, threads=threads)
        solved += 1
        if solved == 1:
            bound, outcome = relaxed.bound, relaxed.outcome
        if relaxed.S is not None:
            for R in roundings(problem, relaxed.S, rng):
                best.offer(R, epsilon, until)
        elif solved == 1:
            break
        if relaxed.S is None or best.fits(rounded(problem, relaxed.S >= 0.5)):
            high = epsilon
        else:
            low = epsilon
        if high <= low or best.cost <= bound * (1 + OPTIMAL_GAP):
            break
        epsilon = (low + high) / 2
    seconds = time.perf_counter() - began
    details = {"epsilon": best.epsilon, "relaxations": solved}
    if best.R is not None:
        return certify(problem, budget, best.R, method=method, bound=bound, seconds=seconds, details=details)
    status = Status.INFEASIBLE if outcome is Outcome.INFEASIBLE else Status.NOT_FOUND
    return Solution(status, problem, budget, method, bound=bound, seconds=seconds, details=details)


def roundings(problem: Problem, S: np.ndarray, rng: np.random.Generator | None) -> Iterator[np.ndarray]:
    """(T, T) bool schedules from S* (T, V): for up to `TRIES` thresholds, or as many tosses where there is an rng."""
    seen: set[bytes] = set()
    values = np.unique(S[S > 1e-9].round(6)) if (S > 1e-9).any() else np.ones(1)
    thresholds = values[np.unique(np.linspace(0, len(values) - 1, TRIES).astype(int))]
    for i in range(TRIES if rng is not None else len(thresholds)):
        kept = S >= thresholds[i] - 1e-6 if rng is None else rng.random(S.shape) < S
        R = rounded(problem, kept)
        if R.tobytes() not in seen:
            seen.add(R.tobytes())
            yield R


def rounded(problem: Problem, kept: np.ndarray) -> np.ndarray:
    """(T, T): what runs where these values (T, V) are kept."""
    return without_useless(problem.graph, least_runs(problem.graph, kept))


def least_runs(graph: Graph, S: np.ndarray) -> np.ndarray:
    """Phase two: the least R (T, T) under which S (T, V) can be kept.

    R[t, t] = 1; R[t, prod(v)] = 1 where v is kept for stage t+1 but not for t, or an op that runs in stage t reads v,
    which is not kept. What a pinned op makes is kept in any case, since it cannot be made again.
    """
    T = len(graph.ops)
    S, R = S.copy(), np.eye(T, dtype=bool)
    for k, op in enumerate(graph.ops):
        results = [v for v in op.outputs if op.pinned or v in graph.outputs]
        S[k + 1 :, results] = True
    for t in range(T):
        for k in reversed(range(t + 1)):
            if t + 1 < T and any(S[t + 1, v] and not S[t, v] for v in graph.ops[k].outputs):
                R[t, k] = True
            if R[t, k]:
                for v in graph.ops[k].inputs:
                    producer = graph.values[v].producer
                    if producer is not None and not S[t, v]:
                        R[t, producer] = True
    return R
