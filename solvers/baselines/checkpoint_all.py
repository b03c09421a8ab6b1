"""Keep everything: each op runs once, each value stays until its last use. What PyTorch does by itself."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.common.certify import certify
from checkmate.units import format_bytes


def checkpoint_all(problem: Problem, budget: int) -> Solution:
    """Run each op once. NOT_FOUND where that takes more than the budget.

    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> checkpoint_all(problem, 8).cost
    2.0
    """
    began = time.perf_counter()
    if budget < problem.keep_all_peak:
        message = f"keeping everything takes {format_bytes(problem.keep_all_peak)}"
        seconds = time.perf_counter() - began
        return Solution(Status.NOT_FOUND, problem, budget, "checkpoint-all", message=message, seconds=seconds)
    R = np.eye(len(problem.graph.ops), dtype=bool)
    solution = certify(problem, budget, R, method="checkpoint-all")
    return replace(solution, seconds=time.perf_counter() - began)
