"""Whole steps with a scaled loss, casts to half precision, and averages of parameters: the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from checkmate.errors import Unsupported
from checkmate.training import TrainingStep
from checkmate.updates.gradients import HELD_BYTES
from tests.support.budgets import between
from tests.support.sampling import long, slow
from tests.support.stepping import grads_of
from tests.support.whole_steps import X, Y, adamw, assert_as_plain, classifier, loss_of, planned_step, training

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_model = partial(classifier, dropout=0.0)
_in_bfloat16 = partial(loss_of, dtype=torch.bfloat16)


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def _two_optimizers(model: nn.Sequential) -> list[optim.Optimizer]:
    return [adamw(model[:-1]), optim.SGD(model[-1].parameters(), lr=0.1, momentum=0.9)]


def _scaler(model: object = None) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def _scaled(
    dtype: torch.dtype, new_optimizers: Any, factors: Sequence[float], **options: Any
) -> tuple[TrainingStep, Any]:
    """Train by losses that are multiplied by these, both ways: the planned step, and what is left."""

    def train(make: Callable[..., Any]) -> Any:
        model, scaler = _model(), _scaler()
        several = new_optimizers(model)

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
    step, found = _scaled(dtype, lambda model: [adamw(model)], factors, **options)
    assert len(step.plans) == options.get("accumulate", 1)
    scales = [state["scale"] for _, state in found[0]]
    assert max(scales) > scales[0]
    assert any(b < a for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize(("share", "clip_norm"), [long(0.0, 0.1), long(0.0, None), long(0.3, 0.1), slow(0.3, None)])
def test_scaled_loss_within_the_budget(share: float, clip_norm: float | None) -> None:
    """Gradients are freed after they were looked at, and made again; the bytes of the scaler are counted."""
    train = training(_model, loss=_in_bfloat16, scaler=_scaler, clip_norm=clip_norm)
    problem = assert_as_plain(train)[0].plans[0].problem
    step, found = assert_as_plain(train, budget=between(problem, share))
    at_entry = problem.resident - HELD_BYTES + 8  # of the scaler only the scale, and its count of steps
    assert all(0 <= step.plans[0].peak - at_entry - peak <= HELD_BYTES for peak in found.peaks)


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_value": 1e-3}, {"clip_norm": 0.1}, slow({"clip_norm": 0.1, "norm_type": 1.0})],
    ids=str,
)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_the_last_micro_batch_does_not_reach(options: dict[str, Any], *, scaled: bool) -> None:
    """They count in the norm, and skip their own optimizer's update; kept sums are unscaled and clipped in the end."""
    # For each micro-batch whether it uses all parts, and a factor of the part that has an optimizer of its own.
    uses = [(True, 1.0), (False, 1.0), (True, 2.0), (True, 1.0), (True, float("inf") if scaled else 3.0), (False, 1.0)]

    def train(make: Callable[..., Any], *, keep: bool = False) -> Any:
        torch.manual_seed(0)
        parts = nn.ModuleList(nn.Linear(32, 10) for _ in range(4))
        several = [optim.AdamW(parts[:2].parameters(), lr=1e-2), optim.SGD(parts[2:].parameters(), lr=0.1)]
        scaler = _scaler() if scaled else None

        def loss_fn(x: Tensor, y: Tensor, factor: Tensor, *, everywhere: bool) -> Tensor:
            first = F.cross_entropy(parts[0](x) + parts[3](x), y)
            return first + F.cross_entropy(parts[1](x), y) + factor * parts[2](x).mean() if everywhere else first

        step = make(loss_fn, several, accumulate=2, scaler=scaler, **options)
        left = []
        for i, (everywhere, factor) in enumerate(uses):
            step(X, Y, torch.tensor(factor), everywhere=everywhere)
            left += grads_of(parts) if keep or i % 2 == 0 else []
        states = [o.state_dict() for o in several], scaler and scaler.state_dict()
        return left, parts.state_dict(), copy.deepcopy(states)

    for keep in (False, True):
        assert_as_plain(partial(train, keep=keep), gradients=keep)


@pytest.mark.slow
def test_each_optimizer_skips_its_own_updates() -> None:
    """The head's gradient is finite where that of the layers is not."""
    _, found = _scaled(torch.float32, _two_optimizers, [1.0, float("inf"), 1.0])
    layers, head = found[1][1]
    assert {int(state["step"]) for state in layers["state"].values()} == {2}
    assert head["state"]


def test_a_scaler_that_is_off() -> None:
    assert_as_plain(training(_model, _sgd, steps=2, scaler=torch.amp.GradScaler("cpu", enabled=False)))


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "swa, buffers": {"use_buffers": True},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema, buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "own": {"avg_fn": get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages(name: str) -> None:
    """Averages of a model with a frozen part, by the functions of PyTorch and by one of a person's."""

    def partly_frozen() -> nn.Module:
        model = _model()
        model[0].requires_grad_(False)
        return model

    ema = lambda model: (AveragedModel(model, **AVERAGES[name]), model)  # noqa: E731
    assert_as_plain(training(partly_frozen, lambda model: adamw(model[1:]), metered=False, ema=ema))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_average_that_the_step_reads(share: float) -> None:
    """A teacher that is the average of its student: its forward, run again, reads what it was before the update.

    The bytes of the average are the plan's.
    """

    def student_and_teacher() -> nn.ModuleList:
        model = _model()
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        return nn.ModuleList([model, averaged])

    def taught(both: nn.ModuleList) -> Callable[[Tensor], Tensor]:
        def loss_fn(x: Tensor) -> Tensor:
            with torch.no_grad():
                target = both[1](x).softmax(-1)
            return F.cross_entropy(both[0](x + 0.1), target)

        return loss_fn

    how: dict[str, Any] = {"loss": taught, "batch": (X,), "steps": 4, "ema": lambda both: (both[1], both[0])}
    train = training(student_and_teacher, lambda both: _sgd(both[0]), **how)
    problem = assert_as_plain(train)[0].plans[0].problem
    both = student_and_teacher()
    held = sum(t.nbytes for t in (*both.parameters(), *both.buffers()))
    assert 0 <= problem.resident - held - X.nbytes < 32  # one buffer is averaged when all is done
    step, found = assert_as_plain(train, budget=between(problem, share))
    assert problem.resident + max(found.peaks) <= step.plans[0].peak


def test_without_torch_compile() -> None:
    """Where nothing is captured, the step does all that it does else, as plain PyTorch does."""
    about: dict[str, Any] = {"steps": 4, "metered": False, "clip_norm": 0.1, "accumulate": 2, "scaler": _scaler}
    ema = lambda model: (AveragedModel(model, avg_fn=get_ema_avg_fn(0.9)), model)  # noqa: E731
    with torch.compiler.set_stance("force_eager"):
        step, _ = assert_as_plain(training(_model, _two_optimizers, loss=_in_bfloat16, ema=ema, **about))
    assert not step.plans


def test_refusals() -> None:
    model, half = _model(), _model().half()
    averaged = AveragedModel(model, multi_avg_fn=lambda averages, parameters, count: None)
    plain = optim.AdamW(model.parameters())
    refused: list[tuple[Any, str, optim.Optimizer, dict[str, Any]]] = [
        (Unsupported, "avg_fn=", plain, {"ema": (averaged, model)}),
        (TypeError, "pair", plain, {"ema": averaged}),
        (ValueError, "another model", plain, {"ema": (AveragedModel(model), model[-1])}),
        (TypeError, "GradScaler", plain, {"scaler": 2.0}),
        (
            Unsupported,
            "fused=False",
            optim.AdamW(model.parameters(), fused=True),
            {"scaler": _scaler()},
        ),
        (ValueError, "float16", optim.SGD(half.parameters(), lr=0.1), {"scaler": _scaler()}),
    ]
    for error, words, optimizer, options in refused:
        with pytest.raises(error, match=words):
            planned_step(loss_of(model), optimizer, **options)
