"""Random programs by random optimizers, plainly and as whole steps: five steps, bits and peaks.

``CHECKMATE_UPDATES=500`` runs so many in place of 2; ``CHECKMATE_SEED=1`` draws others.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn, optim

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.programs import Program, Spec, batch, programs
from tests.support.updated import Setting, new_optimizers
from tests.support.whole_steps import TrainedWhole, plain_step, train_whole
from tests.updates.test_optimizers import HAS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
MANY = int(os.environ.get("CHECKMATE_UPDATES", "2"))
SEED = int(os.environ.get("CHECKMATE_SEED", "0"))


def _loss_of(model: nn.Module) -> Any:
    def loss_fn(*inputs: Any) -> Any:
        result = model(*inputs)
        return result[0] if isinstance(result, tuple) else result

    return loss_fn


def _train(spec: Spec, settings: list[Setting], clip_norm: float | None, budget: Any) -> tuple[TrainedWhole, Any]:
    """Plainly where the budget is None."""
    model = Program(spec)
    optimizers: list[optim.Optimizer] = new_optimizers(model, settings)
    step: Any = plain_step(_loss_of(model), optimizers, clip_norm)
    if budget is not None:
        options: dict[str, Any] = {"time_limit": 1.0, "wait": "best", "cache": False}
        step = checkmate.training_step(_loss_of(model), optimizers, budget=budget, clip_norm=clip_norm, **options)
    with torch.no_grad():
        inputs = [t.clone() for t in batch(spec)]
    inputs[0].requires_grad_(spec.input_grad)
    return train_whole(step, model, optimizers, inputs, steps=5), step


@hypothesis.settings(max_examples=MANY, deadline=None, database=None, suppress_health_check=[*hypothesis.HealthCheck])
@hypothesis.seed(SEED)
@hypothesis.given(
    spec=programs(),
    settings=st.lists(st.sampled_from(HAS), min_size=1, max_size=2),
    clip_norm=st.sampled_from([None, 0.5]),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
def test_same_bits_within_the_budget(
    spec: Spec, settings: list[Setting], clip_norm: float | None, share: float
) -> None:
    """Between the smallest budget and that of keeping all."""
    if all(kind == "Muon" for kind, _ in settings):
        settings = [*settings, ("SGD", {})]
    try:
        expected, _ = _train(spec, settings, clip_norm, None)
    except RuntimeError:  # a program that plain PyTorch does not train a second time
        hypothesis.reject()
    found, step = _train(spec, settings, clip_norm, "1 GB")
    assert_same_bits(found.bits(), expected.bits())
    problem = step.plans[0].problem
    smallest = checkmate.min_budget(problem, time_limit=1.0).peak
    budget = int(smallest + share * (problem.keep_all_peak - smallest))
    found, step = _train(spec, settings, clip_norm, budget)
    assert_same_bits(found.bits(), expected.bits())
    (plan,) = step.plans
    assert plan.peak <= budget
    # what the first metered step frees of the one before, the norm, the meter has not seen come
    assert max(found.peaks[1:]) <= plan.peak - plan.problem.resident
