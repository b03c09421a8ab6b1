"""Try many settings of a heuristic, and answer with the cheapest schedule that fits the budget.

Which setting is best is seen only by simulating: neither cost nor peak need be monotone in it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.checkpoint_places import why_no_chain
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.runs import cost_of, peak_of
from checkmate.units import exact_bytes

COARSE = 0.5  # the share of the trials that spreads over all settings; the others go to where the best was


@dataclass
class Sweep:
    """The schedules tried so far: the cheapest that fits, and the smallest peak of those that were simulated."""

    problem: Problem
    budget: int
    tried: int = 0
    best: int | None = None  # which setting
    R: np.ndarray | None = None  # (T, T) bool, of the best
    cost: float = float("inf")  # of the best
    closest: int | None = None  # the setting with the smallest peak
    peak: int = 2**62  # bytes, the smallest

    def offer(self, setting: int, R: np.ndarray) -> None:
        """Simulate a schedule, unless one that fits is as cheap, and take it if it fits."""
        self.tried += 1
        cost = cost_of(self.problem, R)
        if cost >= self.cost:
            return
        peak = peak_of(self.problem, R)
        if peak < self.peak:
            self.closest, self.peak = setting, peak
        if peak <= self.budget:
            self.best, self.R, self.cost = setting, R, cost


def cheapest(
    problem: Problem,
    budget: int,
    settings: int,
    runs: Callable[[int], np.ndarray],
    *,
    tries: int,
    time_limit: float = float("inf"),
) -> Sweep:
    """Try settings 0, …, settings - 1, of which ``runs`` gives R (T, T): all, if the tries suffice.

    Else half of the tries spread evenly, and the others halve the gaps between settings tried, first those beside the
    best so far: the cheapest that fits, or where none does the one with the smallest peak. One at least is tried.

    >>> problem = Problem.from_dag([[], [0], [1]], seconds=[1] * 3, sizes=[4] * 3)
    >>> cheapest(problem, 8, 1, lambda setting: np.eye(3, dtype=bool), tries=1).cost
    3.0
    """
    deadline = time.perf_counter() + time_limit
    sweep = Sweep(problem, budget)
    coarse = settings if settings <= tries else max(2, int(COARSE * tries))
    done = sorted({round(i) for i in np.linspace(0, settings - 1, coarse).tolist()})
    for count, setting in enumerate(done):
        if count and time.perf_counter() > deadline:
            return sweep
        sweep.offer(setting, runs(setting))
    while sweep.tried < tries and time.perf_counter() < deadline:
        setting = _between(done, sweep.closest if sweep.best is None else sweep.best)
        if setting is None:
            break
        done = sorted([*done, setting])
        sweep.offer(setting, runs(setting))
    return sweep


def _between(done: Sequence[int], centre: int | None) -> int | None:
    """The middle of the widest gap beside a setting that was tried, else of the widest at all; None without a gap."""
    gaps = [(centre in (a, b), b - a, (a + b) // 2) for a, b in itertools.pairwise(done) if b - a > 1]
    return max(gaps)[2] if gaps else None


def answer(sweep: Sweep, method: str, began: float, *, details: dict[str, Any], remedy: str = "") -> Solution:
    """The Solution of a sweep; NOT_FOUND, with the smallest peak that it reached, where nothing fits.

    Args:
        sweep: what was tried.
        method: its name.
        began: `time.perf_counter` when it began.
        details: figures of the method; how many settings were tried, and the smallest peak, are added.
        remedy: what else there is to say, for the message.
    """
    problem, budget = sweep.problem, sweep.budget
    details = {**details, "tried": sweep.tried}
    if sweep.R is not None:
        solution = certify(problem, budget, sweep.R, method=method, details=details)
        return replace(solution, seconds=time.perf_counter() - began)
    message = f"the smallest peak it reaches is {exact_bytes(sweep.peak)}{remedy}"
    details["peak"] = sweep.peak
    seconds = time.perf_counter() - began
    return Solution(Status.NOT_FOUND, problem, budget, method, message=message, seconds=seconds, details=details)


def does_not_apply(problem: Problem, budget: int, method: str, began: float, instead: str) -> Solution | None:
    """The answer where the forward is no chain, with what else can be asked for; None where it is one."""
    reason = why_no_chain(problem)
    if reason is None:
        return None
    message = f"it is for chains, and this forward is none ({reason}); {instead} apply to any graph"
    seconds = time.perf_counter() - began
    return Solution(Status.NOT_FOUND, problem, budget, method, message=message, seconds=seconds)
