"""Plans that the pictures and the page show."""

from __future__ import annotations

from functools import cache

import numpy as np

import checkmate
from benchmarks.networks import dags
from checkmate import Problem, Solution
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.frontier import Frontier
from tests.look.test_timeline import _chain
from tests.support.all_plans import random_chain_with_links


@cache
def again() -> Solution:
    """A chain of 17 ops within 4 bytes, of which ops run again."""
    return checkmate.solve(dags.unit_chain(8), 4)


@cache
def frontier() -> Frontier:
    """Budgets of the same chain, the first of which holds nothing."""
    return checkmate.frontier(dags.unit_chain(8), [2, 3, 4, 6, 10], methods=["auto", "checkpoint-all"], jobs=1)


@cache
def on_links() -> Solution:
    """A step with ops on a link: started before they are needed, some waited for, one run again."""
    problem = random_chain_with_links(1)
    return checkmate.solve(problem, int(0.9 * problem.keep_all_peak))


def four_ops() -> Solution:
    """Four ops of 1, 2, 4 and 8 seconds, each run once."""
    return certify(_chain(), 200, np.eye(4, dtype=bool), method="by hand")


def keep_all(problem: Problem) -> Solution:
    return checkmate.solve(problem, 2 * problem.keep_all_peak, method="checkpoint-all")


def no_cost() -> Solution:
    """One op of no seconds, which makes no bytes."""
    return checkmate.solve(Problem.from_dag([[]], [0.0], [0]), 1)
