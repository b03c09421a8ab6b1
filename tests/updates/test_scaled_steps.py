"""Whole steps with a scaled loss, casts to half precision, and averages of parameters: the numbers of plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import checkmate
from checkmate.memory import MemoryUse, measure_peak
from checkmate.training import TrainingStep
from checkmate.updates.gradients import HELD_BYTES
from tests.support.bits import assert_same_bits
from tests.support.sampling import long, slow
from tests.support.whole_steps import plain_step

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)), torch.arange(64) % 10
HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Classifier(nn.Module):
    """Casts products to a type within its forward."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)]
        self.layers, self.head, self.dtype = nn.Sequential(*blocks), nn.Linear(32, 10), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            return self.head(self.layers(x))


def _optimizers(model: Classifier, count: int) -> Sequence[optim.Optimizer]:
    if count == 1:
        return [optim.AdamW(model.parameters(), lr=1e-2)]
    return [optim.AdamW(model.layers.parameters(), lr=1e-2), optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)]


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def _scaled_runs(dtype: torch.dtype, optimizers: int, factors: Sequence[float], **options: Any) -> tuple[Any, Any, Any]:
    """What both have after steps whose losses are multiplied by these, and the step of checkmate."""
    made = []
    for plain in (False, True):
        model, scaler = Classifier(dtype), _scaler()
        several = _optimizers(model, optimizers)

        def loss_fn(x: Tensor, y: Tensor, factor: Tensor, model: nn.Module = model) -> Tensor:
            scores = model(x)
            return F.cross_entropy(scores[:, :5], y % 5) * factor + F.cross_entropy(
                scores.detach() + model.head.bias, y
            )

        step: Any = (
            plain_step(loss_fn, several, scaler=scaler, **options)
            if plain
            else checkmate.training_step(
                loss_fn, several, budget="1 GB", scaler=scaler, wait="best", time_limit=1.0, **options
            )
        )
        seen = []
        for factor in factors:
            loss = step(X, Y, torch.tensor(factor))
            seen.append((loss, scaler.state_dict()))
        states = model.state_dict(), [o.state_dict() for o in several], scaler.state_dict()
        made.append(((seen, states), step))
    (found, ours), (expected, _) = made
    return found, expected, ours


@pytest.mark.parametrize("dtype", HALF, ids=HALF.get)
@pytest.mark.parametrize(
    "options",
    [long({}), long({"clip_norm": 0.1}), slow({"clip_value": 1e-3}), slow({"accumulate": 2, "clip_norm": 0.1})],
    ids=str,
)
def test_scaled_loss(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The scale grows and falls, and updates by gradients that are not finite are skipped, as in plain PyTorch."""
    factors = [1.0, 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0]
    found, expected, step = _scaled_runs(dtype, 1, factors, **options)
    assert_same_bits(found, expected)
    assert len(step.plans) == options.get("accumulate", 1)
    scales = [state["scale"] for _, state in found[0]]
    assert max(scales) > scales[0]
    assert any(b < a for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize(("share", "clip_norm"), [long(0.0, 0.1), long(0.0, None), long(0.3, 0.1), slow(0.3, None)])
def test_scaled_loss_within_the_budget(share: float, clip_norm: float | None) -> None:
    """Where gradients are let go of after they were looked at, and made again; what the scaler has is counted."""

    def made(budget: Any) -> tuple[TrainingStep, nn.Module]:
        model = Classifier(torch.bfloat16)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        return _averaging(model, [optimizer], budget=budget, scaler=_scaler(), clip_norm=clip_norm), model

    step, _ = made("1 GB")
    step(X, Y)
    problem = step.plans[0].problem
    smallest = checkmate.min_budget(problem, time_limit=1.0).peak
    step, model = made(int(smallest + share * (problem.keep_all_peak - smallest)))
    plain = Classifier(torch.bfloat16)
    several = [optim.AdamW(plain.parameters(), lr=1e-2)]
    expected = plain_step(lambda x, y: F.cross_entropy(plain(x), y), several, clip_norm, scaler=_scaler())
    for i in range(3):
        use = measure_peak(lambda: step(X, Y)) if i else MemoryUse(0, 0, step(X, Y))
        at_entry = problem.resident - HELD_BYTES + 8  # of the scaler only the scale, and its count of steps
        assert at_entry + use.peak <= step.plans[0].peak
        assert i == 0 or step.plans[0].peak - at_entry - use.peak <= HELD_BYTES
        assert_same_bits(use.result, expected(X, Y))
    assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_each_optimizer_skips_its_own_updates() -> None:
    """The head's gradient is finite where that of the layers is not."""
    found, expected, _ = _scaled_runs(torch.float32, 2, [1.0, float("inf"), 1.0])
    assert_same_bits(found, expected)
    layers, head = found[1][1]
    assert {int(state["step"]) for state in layers["state"].values()} == {2}
    assert head["state"]


def test_a_scaler_that_is_off() -> None:
    """Does nothing."""
    model, plain = Classifier(), Classifier()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = _averaging(model, [optim.SGD(model.parameters(), lr=0.1)], scaler=scaler)
    expected = plain_step(lambda x, y: F.cross_entropy(plain(x), y), [optim.SGD(plain.parameters(), lr=0.1)])
    assert_same_bits([step(X, Y) for _ in range(2)], [expected(X, Y) for _ in range(2)])
    assert_same_bits(model.state_dict(), plain.state_dict())


def _averaging(model: nn.Module, optimizers: Sequence[optim.Optimizer], **options: Any) -> TrainingStep:
    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    options = {"budget": "1 GB", "wait": "best", "time_limit": 1.0, **options}
    return checkmate.training_step(loss_fn, optimizers, **options)


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
    made = []
    for plain in (False, True):
        model = Classifier()
        model.layers[0].requires_grad_(False)
        averaged = AveragedModel(model, **AVERAGES[name])
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        step: Any = (
            plain_step(lambda x, y, m=model: F.cross_entropy(m(x), y), [optimizer], ema=(averaged, model))
            if plain
            else _averaging(model, [optimizer], ema=(averaged, model))
        )
        for _ in range(3):
            step(X, Y)
        made.append((model.state_dict(), averaged.state_dict()))
    assert_same_bits(*made)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_average_that_the_step_reads(share: float) -> None:
    """A teacher that is the average of its student: its forward, run again, reads what it was before the update.

    The bytes of the average are the plan's.
    """

    def made(plain: bool, budget: Any) -> tuple[Any, ...]:
        model = Classifier()
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def loss_fn(x: Tensor) -> Tensor:
            with torch.no_grad():
                taught = averaged(x).softmax(-1)
            return F.cross_entropy(model(x + 0.1), taught)

        if plain:
            return plain_step(loss_fn, [optimizer], ema=(averaged, model)), model, averaged
        options: Any = {"budget": budget, "wait": "best", "time_limit": 1.0, "ema": (averaged, model)}
        return checkmate.training_step(loss_fn, optimizer, **options), model, averaged

    step, model, averaged = made(plain=False, budget="1 GB")
    step(X)
    problem = step.plans[0].problem
    held = {t.data_ptr(): t.nbytes for m in (model, averaged) for t in (*m.parameters(), *m.buffers())}
    assert 0 <= problem.resident - sum(held.values()) - X.nbytes < 32  # one buffer is averaged when all is done
    smallest = checkmate.min_budget(problem, time_limit=1.0).peak
    step, model, averaged = made(plain=False, budget=int(smallest + share * (problem.keep_all_peak - smallest)))
    expected, plain, other = made(plain=True, budget=None)
    for i in range(4):
        use = measure_peak(lambda: step(X)) if i else MemoryUse(0, 0, step(X))
        assert problem.resident + use.peak <= step.plans[0].peak
        assert_same_bits(use.result, expected(X))
    assert_same_bits((model.state_dict(), averaged.state_dict()), (plain.state_dict(), other.state_dict()))


def test_without_torch_compile() -> None:
    """Where nothing is captured, the step does all that it does else, as plain PyTorch does."""
    made = []
    for plain in (False, True):
        model, scaler = Classifier(torch.bfloat16), _scaler()
        averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
        several = _optimizers(model, 2)
        options: dict[str, Any] = {"clip_norm": 0.1, "accumulate": 2, "scaler": scaler, "ema": (averaged, model)}
        step: Any = (
            plain_step(lambda x, y, m=model: F.cross_entropy(m(x), y), several, **options)
            if plain
            else _averaging(model, several, **options)
        )
        with torch.compiler.set_stance("force_eager"):
            for _ in range(4):
                step(X, Y)
        assert plain or not step.plans
        made.append((model.state_dict(), averaged.state_dict(), scaler.state_dict(), [o.state_dict() for o in several]))
    assert_same_bits(*made)


def test_refusals() -> None:
    """At once, with the way out."""
    model = Classifier()
    averaged = AveragedModel(model, multi_avg_fn=lambda averages, parameters, count: None)
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(checkmate.Unsupported, match="avg_fn="):
        _averaging(model, [optimizer], ema=(averaged, model))
    with pytest.raises(TypeError, match="pair"):
        _averaging(model, [optimizer], ema=averaged)
    with pytest.raises(ValueError, match="another model"):
        _averaging(model, [optimizer], ema=(AveragedModel(model), model.head))
    with pytest.raises(TypeError, match="GradScaler"):
        _averaging(model, [optimizer], scaler=2.0)
    with pytest.raises(checkmate.Unsupported, match="fused=False"):
        _averaging(model, [optim.AdamW(model.parameters(), fused=True)], scaler=_scaler())
    half = Classifier().half()
    with pytest.raises(ValueError, match="float16"):
        _averaging(half, [optim.SGD(half.parameters(), lr=0.1)], scaler=_scaler())
