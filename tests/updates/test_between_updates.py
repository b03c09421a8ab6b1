"""What a person does between two steps holds from the next one on, with the bits of the plain loop."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.sampling import slow
from tests.support.whole_steps import assert_as_plain, plain_step, planned_step, train_whole
from tests.updates.updated import BATCH, SMALLER, AllKinds, training_of_all_kinds

pytestmark = pytest.mark.usefixtures("one_thread")
NewOptimizer = Callable[[Any], optim.Optimizer]
_sgd, _adamw = partial(optim.SGD, lr=0.1, momentum=0.9), partial(optim.AdamW, lr=0.01)


def _assert_same(
    change: Callable[[int, Any, optim.Optimizer], None], new: NewOptimizer, batches: Any = (BATCH,) * 5
) -> checkmate.TrainingStep:
    """Train five steps each way, with something changed before each."""
    how = {"batch": batches.__getitem__, "steps": 5, "between": change, "metered": False}
    return assert_as_plain(training_of_all_kinds(lambda model: new(model.parameters()), **how))[0]


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    "warmup": lambda o: lr_scheduler.LambdaLR(o, lambda i: i / 3),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=9.0),
}


@pytest.mark.parametrize("name", ["OneCycleLR", *(slow(name) for name in SCHEDULERS if name != "OneCycleLR")])
def test_schedulers(name: str) -> None:
    """Rates and momenta of a scheduler hold, with one plan, and it does not warn."""
    schedulers: dict[int, Any] = {}

    def change(i: int, model: Any, optimizer: optim.Optimizer) -> None:
        if i == 0:
            schedulers[id(optimizer)] = SCHEDULERS[name](optimizer)
        else:
            schedulers[id(optimizer)].step(*([1.0] if name == "ReduceLROnPlateau" else []))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = _assert_same(change, _sgd if name == "OneCycleLR" else _adamw)
    assert len(step.plans) == 1


@pytest.mark.slow
def test_settings_by_hand() -> None:
    """A rate needs no new plan; a decay that is turned on gets one, since its update takes other memory."""

    def change(i: int, model: Any, optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * (i + 1)
        if i >= 2:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        if i >= 4:
            optimizer.param_groups[0].update(momentum=0.8, nesterov=True)

    _assert_same(change, _sgd)


@pytest.mark.slow
def test_frozen_in_between() -> None:
    """A parameter that is frozen stays, and thaws with the state that it had; evaluation is another plan."""

    def change(i: int, model: Any, optimizer: optim.Optimizer) -> None:
        model.last.requires_grad_(i not in (1, 2))
        model.train(i != 3)

    _assert_same(change, _adamw)


@pytest.mark.slow
def test_smaller_last_batch() -> None:
    """Another shape has a plan of its own, and the same states."""
    step = _assert_same(lambda *_: None, _adamw, [BATCH, BATCH, SMALLER, BATCH, SMALLER])
    assert len(step.plans) == 2


@pytest.mark.parametrize("ours_first", [True, slow(False)])
def test_checkpoints_interchange(ours_first: bool) -> None:
    """Two steps one way, a checkpoint through a file into the same objects or new ones, and two steps the other way."""
    ends = []
    for kinds in ((ours_first, not ours_first), (False, False)):
        saved = io.BytesIO()
        for part, is_ours in enumerate(kinds):
            model = AllKinds()
            optimizer = _adamw(model.parameters())
            step = (planned_step if is_ours else plain_step)(model, optimizer)
            if part:
                step(*BATCH)  # into the middle of training: the states that are there are replaced
                saved.seek(0)
                states = torch.load(saved)
                model.load_state_dict(states["model"])
                optimizer.load_state_dict(states["optimizer"])
            end = train_whole(step, model, [optimizer], BATCH, steps=2)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        ends.append(end.bits())
    assert_same_bits(*ends)
