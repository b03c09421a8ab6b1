"""Whole steps with a scaled loss, casts to half precision, and averages of parameters: the numbers of plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import checkmate
from checkmate.training import TrainingStep
from checkmate.updates.gradients import HELD_BYTES
from tests.support.budgets import between
from tests.support.sampling import long, slow
from tests.support.whole_steps import X, Y, assert_as_plain, classifier, loss_of, planned_step, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


_model = partial(classifier, dropout=0.0)


def _optimizers(model: nn.Sequential, count: int) -> Sequence[optim.Optimizer]:
    if count == 1:
        return [optim.AdamW(model.parameters(), lr=1e-2)]
    return [optim.AdamW(model[:-1].parameters(), lr=1e-2), optim.SGD(model[-1].parameters(), lr=0.1, momentum=0.9)]


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def _scaled(dtype: torch.dtype, optimizers: int, factors: Sequence[float], **options: Any) -> tuple[TrainingStep, Any]:
    """The step of checkmate, and what both have after steps whose losses are multiplied by these."""

    def train(make: Callable[..., Any]) -> Any:
        model, scaler = _model(), _scaler()
        several = _optimizers(model, optimizers)

        def loss_fn(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                scores = model(x)
            of_head = F.cross_entropy(scores.detach() + model[-1].bias, y)
            return F.cross_entropy(scores[:, :5], y % 5) * factor + of_head

        step = make(loss_fn, several, scaler=scaler, **options)
        seen = [(step(X, Y, torch.tensor(factor)), scaler.state_dict()) for factor in factors]
        return seen, (model.state_dict(), [o.state_dict() for o in several], scaler.state_dict())

    return assert_as_plain(train)


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
@pytest.mark.parametrize(
    "options",
    [long({}), long({"clip_norm": 0.1}), slow({"clip_value": 1e-3}), slow({"accumulate": 2, "clip_norm": 0.1})],
    ids=str,
)
def test_scaled_loss(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The scale grows and falls, and updates by gradients that are not finite are skipped, as in plain PyTorch."""
    factors = [1.0, 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0]
    step, found = _scaled(dtype, 1, factors, **options)
    assert len(step.plans) == options.get("accumulate", 1)
    scales = [state["scale"] for _, state in found[0]]
    assert max(scales) > scales[0]
    assert any(b < a for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize(("share", "clip_norm"), [long(0.0, 0.1), long(0.0, None), long(0.3, 0.1), slow(0.3, None)])
def test_scaled_loss_within_the_budget(share: float, clip_norm: float | None) -> None:
    """Where gradients are let go of after they were looked at, and made again; what the scaler has is counted."""

    def train(make: Callable[..., Any]) -> Any:
        model = _model()
        several = _optimizers(model, 1)
        step = make(loss_of(model, torch.bfloat16), several, scaler=_scaler(), clip_norm=clip_norm)
        return train_whole(step, model, several, (X, Y))

    problem = assert_as_plain(train)[0].plans[0].problem
    step, found = assert_as_plain(train, budget=between(problem, share))
    at_entry = problem.resident - HELD_BYTES + 8  # of the scaler only the scale, and its count of steps
    assert all(0 <= step.plans[0].peak - at_entry - peak <= HELD_BYTES for peak in found.peaks)


@pytest.mark.slow
def test_each_optimizer_skips_its_own_updates() -> None:
    """The head's gradient is finite where that of the layers is not."""
    _, found = _scaled(torch.float32, 2, [1.0, float("inf"), 1.0])
    layers, head = found[1][1]
    assert {int(state["step"]) for state in layers["state"].values()} == {2}
    assert head["state"]


def test_a_scaler_that_is_off() -> None:
    """Does nothing."""

    def train(make: Callable[..., Any]) -> Any:
        model = _model()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        step = make(loss_of(model), [optim.SGD(model.parameters(), lr=0.1)], scaler=scaler)
        return [step(X, Y) for _ in range(2)], model.state_dict()

    assert_as_plain(train)


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "swa, buffers": {"use_buffers": True},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema, buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "own": {"avg_fn": get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages(name: str) -> None:
    """Of a model of which a part is frozen, by the functions of PyTorch and one of a person's."""

    def train(make: Callable[..., Any]) -> Any:
        model = _model()
        model[0].requires_grad_(False)
        averaged = AveragedModel(model, **AVERAGES[name])
        step = make(loss_of(model), optim.AdamW(model[1:].parameters(), lr=1e-2), ema=(averaged, model))
        for _ in range(3):
            step(X, Y)
        return model.state_dict(), averaged.state_dict()

    assert_as_plain(train)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_average_that_the_step_reads(share: float) -> None:
    """A teacher that is the average of its student: its forward, run again, reads what it was before the update.

    The bytes of the average are the plan's.
    """
    made: list[nn.Module] = []

    def train(make: Callable[..., Any]) -> Any:
        model = _model()
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        made[:] = model, averaged

        def loss_fn(x: Tensor) -> Tensor:
            with torch.no_grad():
                taught = averaged(x).softmax(-1)
            return F.cross_entropy(model(x + 0.1), taught)

        found = train_whole(make(loss_fn, optimizer, ema=(averaged, model)), averaged, [optimizer], (X,), steps=4)
        found.state["student"] = model.state_dict()
        return found

    problem = assert_as_plain(train)[0].plans[0].problem
    held = {t.data_ptr(): t.nbytes for m in made for t in (*m.parameters(), *m.buffers())}
    assert 0 <= problem.resident - sum(held.values()) - X.nbytes < 32  # one buffer is averaged when all is done
    step, found = assert_as_plain(train, budget=between(problem, share))
    assert problem.resident + max(found.peaks) <= step.plans[0].peak


def test_without_torch_compile() -> None:
    """Where nothing is captured, the step does all that it does else, as plain PyTorch does."""

    def train(make: Callable[..., Any]) -> Any:
        model, scaler = _model(), _scaler()
        averaged, several = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)), _optimizers(model, 2)
        about: dict[str, Any] = {"clip_norm": 0.1, "accumulate": 2, "scaler": scaler, "ema": (averaged, model)}
        step = make(loss_of(model, torch.bfloat16), several, **about)
        with torch.compiler.set_stance("force_eager"):
            for _ in range(4):
                step(X, Y)
        return model.state_dict(), averaged.state_dict(), scaler.state_dict(), [o.state_dict() for o in several]

    assert not assert_as_plain(train)[0].plans


def test_refusals() -> None:
    """At once, with the way out."""
    model, half = _model(), _model().half()
    averaged = AveragedModel(model, multi_avg_fn=lambda averages, parameters, count: None)
    plain = optim.AdamW(model.parameters())
    refused: list[tuple[Any, str, optim.Optimizer, dict[str, Any]]] = [
        (checkmate.Unsupported, "avg_fn=", plain, {"ema": (averaged, model)}),
        (TypeError, "pair", plain, {"ema": averaged}),
        (ValueError, "another model", plain, {"ema": (AveragedModel(model), model[-1])}),
        (TypeError, "GradScaler", plain, {"scaler": 2.0}),
        (checkmate.Unsupported, "fused=False", optim.AdamW(model.parameters(), fused=True), {"scaler": _scaler()}),
        (ValueError, "float16", optim.SGD(half.parameters(), lr=0.1), {"scaler": _scaler()}),
    ]
    for error, words, optimizer, options in refused:
        with pytest.raises(error, match=words):
            planned_step(loss_of(model), optimizer, **options)
