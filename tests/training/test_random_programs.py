"""Random PyTorch programs: the same numbers as plain PyTorch at any budget that can be met.

Whatever may be written over is, where the plan has it die, in tight plans and in ample ones; some graphs are retained
for a second backward.

Some run by kernels of Inductor's, which take seconds to compile, and have the bits of the step that keeps everything.

``CHECKMATE_PROGRAMS=20000`` runs so many with ``-m long`` in place of 100, beside six in the suite;
``CHECKMATE_SEED=1`` draws others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import checkmate
from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.compilation import Backend
from checkmate.capture import random_draws
from checkmate.capture.fusion.kernels import Kernels
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.memory import measure_peak
from checkmate.solvers.solve import solve
from tests.support.bits import assert_same_bits
from tests.support.programs import Program, Spec, batch, programs
from tests.support.sampling import long
from tests.support.ways import offering_ways

METHODS = ("auto", "next-use", "next-use", "lp-rounding", "checkpoint-all")
MANY = int(os.environ.get("CHECKMATE_PROGRAMS", "100"))
PARTS = 5  # so many tests, for several processes
SEED = int(os.environ.get("CHECKMATE_SEED", "0"))


def drawn(count: int, first_seed: int) -> Callable[[Any], Any]:
    """Run a test on so many programs and budgets. Hypothesis draws them, from the seed and constants of our code."""
    unhurried = {"deadline": None, "suppress_health_check": [*HealthCheck]}  # a program takes a third of a second
    from_the_seed = {"database": None, "phases": [Phase.generate, Phase.shrink], "print_blob": False}
    limits = settings(max_examples=count, **unhurried, **from_the_seed)
    cases = given(spec=programs(), budget=st.floats(0, 1), method=st.sampled_from(METHODS))
    return lambda test: seed(first_seed)(limits(cases(test)))


def solve_within(share: float, method: str) -> Callable[[Problem], Solution]:
    """Make a planner whose budget lies so far from the smallest that is quickly found to keeping everything."""

    def plan(problem: Problem) -> Solution:
        smallest = checkmate.min_budget(problem, time_limit=0.01).peak
        budget = int(smallest + share**2 * (problem.keep_all_peak - smallest))
        for chosen in (method, "next-use", "auto"):
            solution = solve(problem, budget, method=chosen, time_limit=0.05 if chosen != "auto" else 0.2)
            if solution.plan is not None:
                return solution
        return keep_all(problem)

    return plan


def run(program: Program, step: Callable[..., Any], spec: Spec, *, metered: bool) -> tuple[list[Any], int]:
    """Train two steps: all that they leave behind, and the peak of the second in bytes."""
    inputs = batch(spec)
    named = [*program.named_parameters(), ("input", inputs[0])]
    twice = spec.extra != "none" and spec.seed % 2 == 1
    torch.manual_seed(spec.seed)

    def forward_backward() -> Any:
        results = step(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        results[0].backward(retain_graph=twice)
        if twice:
            results[0].backward()
        return results

    left, peak = [], 0
    for i in range(2):
        if i and metered:
            use = measure_peak(forward_backward)
            results, peak = use.result, use.peak
            del use
        else:
            results = forward_backward()
        copies = {
            "results": [t.detach().clone() for t in results],
            "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in named},
            "state": {name: t.clone() for name, t in program.state_dict().items()},
        }
        left.append({**copies, "input": inputs[0].detach().clone(), "random state": torch.get_rng_state()})
        del results
        with torch.no_grad():
            for _, p in named:
                if p.grad is not None and p is not inputs[0]:
                    p -= 0.05 * p.grad
                p.grad = None
    return left, peak


def keep_all(problem: Problem) -> Solution:
    return solve(problem, problem.keep_all_peak, method="checkpoint-all")


def check(spec: Spec, budget: float, method: str, kernels: Kernels = "eager") -> None:
    plain, program = Program(spec), Program(spec)
    try:
        expected, _ = run(plain, plain, spec, metered=False)
    except RuntimeError:  # a write to what the backward needs
        return
    if kernels == "fused":
        plain = Program(spec)
        expected, _ = run(plain, CaptureCache(plain, Backend(keep_all, kernels=kernels)), spec, metered=False)
        torch._dynamo.reset()
    step = CaptureCache(program, Backend(solve_within(budget, method), kernels=kernels))
    worth = spec.seed % 2 * random_draws.WORTH_BYTES  # small masks are drawn again too in half
    with offering_ways(), patch.object(random_draws, "WORTH_BYTES", worth):
        found, peak = run(program, step, spec, metered=spec.extra == "none")

    assert_same_bits(found, expected)
    (captured,) = step.steps
    assert captured.training is not None
    plan = captured.training.plan
    assert plan.peak is not None
    if spec.extra == "none":
        assert peak + plan.problem.resident == plan.peak <= plan.budget
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@drawn(6, SEED)
def test_a_few_programs(spec: Spec, budget: float, method: str) -> None:
    check(spec, budget, method)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kernels", "first_seed"), [("same-bits", SEED), long("fused", SEED), long("same-bits", SEED + 1)]
)
def test_a_few_programs_by_compiled_kernels(kernels: Kernels, first_seed: int) -> None:
    def check_by(spec: Spec, budget: float, method: str) -> None:
        check(spec, budget, method, kernels)

    drawn(2, first_seed)(check_by)()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [long(part) for part in range(PARTS)])
def test_many_programs(part: int) -> None:
    drawn(-(-MANY // PARTS), 1000 * SEED + part + 1)(check)()
