"""Programs that nobody wrote: the same numbers as plain PyTorch at any budget that can be met."""

from __future__ import annotations

import random

import pytest
import torch

import checkmate
from tests.programs import ROWS, WIDTH, Program
from tests.stepping import assert_same, train

FEW, MORE = range(8), range(8, 60)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_random_program(seed: int) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    plain, program = Program(seed), Program(seed)
    problem = checkmate.trace(program, x)
    smallest = problem.min_budget().peak
    budget = int(smallest + random.Random(seed).random() ** 2 * (problem.keep_all_peak - smallest))
    compiled = checkmate.compile(program, budget=budget, time_limit=2)

    found = train(program, compiled, (x,))

    assert_same(found, train(plain, plain, (x,)))
    (plan,) = compiled.plans
    assert max(found.peaks) + plan.problem.resident <= plan.peak <= budget
