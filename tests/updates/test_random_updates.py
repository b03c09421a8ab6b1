"""Random programs by random optimizers, plainly and as whole steps: five steps, bits and peaks.

``CHECKMATE_UPDATES=500`` runs so many in place of 2; ``CHECKMATE_SEED=1`` draws others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from tests.support.budgets import between
from tests.support.programs import Program, Spec, batch, programs
from tests.support.whole_steps import TrainedWhole, assert_as_plain, plain_step, train_whole
from tests.updates.test_optimizers import HAS
from tests.updates.updated import Setting, new_optimizers

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
MANY = int(os.environ.get("CHECKMATE_UPDATES", "2"))
SEED = int(os.environ.get("CHECKMATE_SEED", "0"))


def _loss_of(model: nn.Module) -> Any:
    def loss_fn(*inputs: Any) -> Any:
        result = model(*inputs)
        return result[0] if isinstance(result, tuple) else result

    return loss_fn


def _train(make: Callable[..., Any], spec: Spec, settings: list[Setting], clip_norm: float | None) -> TrainedWhole:
    model = Program(spec)
    optimizers = new_optimizers(model, settings)
    step = make(_loss_of(model), optimizers, clip_norm=clip_norm)
    with torch.no_grad():
        inputs = [t.clone() for t in batch(spec)]
    inputs[0].requires_grad_(spec.input_grad)
    return train_whole(step, model, optimizers, inputs, steps=5)


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
    """The budget is between the smallest and that of keeping all."""
    if all(kind == "Muon" for kind, _ in settings):
        settings = [*settings, ("SGD", {})]
    train = partial(_train, spec=spec, settings=settings, clip_norm=clip_norm)
    try:
        train(plain_step)
    except RuntimeError:  # a program that plain PyTorch does not train a second time
        hypothesis.reject()
    step, _ = assert_as_plain(train, cache=False)
    budget = between(step.plans[0].problem, share)
    step, found = assert_as_plain(train, budget=budget, cache=False)
    (plan,) = step.plans
    assert plan.peak <= budget
    # what the first metered step frees of the one before, the norm, the meter has not seen come
    assert max(found.peaks[1:]) <= plan.peak - plan.problem.resident
