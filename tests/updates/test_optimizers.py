"""Every optimizer and every setting of it has the bits of the plain loop: parameters, states, losses, random state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import checkmate
from checkmate.backends.tensor_state import differing
from tests.support.bits import assert_same_bits
from tests.support.sampling import every
from tests.support.updated import BATCH, AllKinds, Setting, new_optimizers
from tests.support.whole_steps import TrainedWhole, plain_step, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")

# Each has a line of settings; two of them train a model together, so that one plan shows two.
SETTINGS: list[Setting] = [
    ("Adam", {}),
    ("SGD", {}),
    ("AdamW", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adafactor", {}),
    ("Rprop", {}),
    ("Muon", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("AdamW", {"fused": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("ASGD", {"t0": 2, "lambd": 0.1}),
    ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adam", {"fused": True, "amsgrad": True, "maximize": True}),
    ("SGD", {"fused": True, "momentum": 0.9, "dampening": 0.1}),
    ("Adagrad", {"fused": True, "weight_decay": 0.1}),
    ("Adam", {"lr": torch.tensor(0.01), "foreach": False}),
    ("AdamW", {"lr": torch.tensor(0.01), "fused": True}),
    ("SGD", {"lr": torch.tensor(0.01), "momentum": 0.9, "maximize": True}),
    ("SGD", {"weight_decay": 0.1, "foreach": False, "dampening": 0.2, "momentum": 0.5}),
    ("Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ("RMSprop", {}),
    ("NAdam", {"maximize": True}),
    ("ASGD", {"weight_decay": 0.1, "maximize": True}),
    ("RAdam", {"maximize": True}),
    ("Adafactor", {"weight_decay": 0.1, "maximize": True}),
    ("Rprop", {"maximize": True}),
    *((name, {"foreach": True}) for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax")),
    ("Adafactor", {"foreach": True, "eps": (1e-6, 1e-3)}),
    *((name, {"foreach": True}) for name in ("NAdam", "RAdam", "Rprop", "SGD")),
    ("RMSprop", {"foreach": True, "momentum": 0.9, "centered": True}),
    ("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}),
    ("SGD", {"foreach": True, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adadelta", {"maximize": True}),
    ("Adamax", {"maximize": True}),
    ("Adagrad", {"maximize": True, "foreach": False}),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True, "maximize": True}),
]
HAS = [setting for setting in SETTINGS if hasattr(optim, setting[0])]
PAIRS = [[*HAS[i : i + 2]] for i in range(0, len(HAS), 2)]


def both(settings: list[Setting], clip_norm: float | None = None, **how: Any) -> tuple[TrainedWhole, TrainedWhole]:
    """What the two loops leave behind."""
    found = []
    for is_ours in (True, False):
        model = AllKinds()
        made = new_optimizers(model, settings)
        if is_ours:
            step: Any = checkmate.training_step(model, made, budget="1 MB", time_limit=1.0, clip_norm=clip_norm)
        else:
            step = plain_step(model, made, clip_norm)
        found.append(train_whole(step, model, made, BATCH, steps=5, **how))
    return found[0], found[1]


def assert_same_states(found: TrainedWhole, expected: TrainedWhole) -> None:
    """The same bits, and states that hold the same names in the same order, and the same types."""
    assert_same_bits(found.bits(), expected.bits())
    for one, other in zip(found.state["optimizers"], expected.state["optimizers"], strict=True):
        assert [*one] == [*other]
        assert sorted(one["state"]) == sorted(other["state"])  # in the order of the updates
        for number, state in other["state"].items():
            assert [(name, type(what)) for name, what in one["state"][number].items()] == [
                (name, type(what)) for name, what in state.items()
            ]
            strides = {name: what.stride() for name, what in state.items() if isinstance(what, torch.Tensor)}
            assert {name: one["state"][number][name].stride() for name in strides} == strides


@pytest.mark.parametrize("settings", every(4, PAIRS), ids=lambda pair: " and ".join(f"{n} {s}" for n, s in pair))
def test_same_bits_as_the_plain_loop(settings: list[Setting]) -> None:
    """Two optimizers, two groups in each, over five steps; the one after the other clipped."""
    found, expected = both(settings, 0.5 if PAIRS.index(settings) % 2 else None)
    assert_same_states(found, expected)
    assert len({loss.item() for loss in expected.losses}) > 1  # something was learnt


@pytest.mark.parametrize("width", [64, 640], ids=["whole", "in slices"])
@pytest.mark.parametrize("setting", [("RAdam", {}), ("ASGD", {"t0": 2})], ids=lambda setting: setting[0])
def test_what_late_updates_take_is_planned(setting: Setting, width: int) -> None:
    """RAdam's sixth takes more than those before it, and so does the one from which ASGD averages."""
    torch.manual_seed(0)
    net, (kind, options) = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()), setting
    optimizer = getattr(optim, kind)(net.parameters(), **options)
    step = checkmate.training_step(lambda x: net(x).square().mean(), optimizer, budget="1 GB", time_limit=1.0)
    found = train_whole(step, net, [optimizer], [torch.randn(4, width)], steps=8)
    (plan,) = step.plans
    assert found.peaks[0] < max(found.peaks) == found.peaks[-1] == plan.peak - plan.problem.resident


@pytest.mark.parametrize("setting", [("Adam", {"capturable": True}), ("SGD", {"differentiable": True})])
def test_what_plain_pytorch_refuses(setting: Setting) -> None:
    """Settings that do not train a leaf on the CPU are refused, and nothing has changed."""
    model = AllKinds()
    before = {name: t.clone() for name, t in model.named_parameters()}
    optimizers = new_optimizers(model, [setting])
    with pytest.raises((AssertionError, RuntimeError)):
        plain_step(model, optimizers)(*BATCH)
    model = AllKinds()
    optimizers = new_optimizers(model, [setting])
    with pytest.raises((AssertionError, checkmate.Unsupported)):
        checkmate.training_step(model, optimizers, budget="1 MB", time_limit=1.0)(*BATCH)
    assert not differing({name: t.detach() for name, t in model.named_parameters()}, before)


def test_what_is_refused_by_name() -> None:
    """Hooks on parameters, whenever they came, and Adafactor where one parameter decides about another."""
    model = AllKinds()
    with pytest.raises(checkmate.Unsupported, match="foreach=False"):
        checkmate.training_step(model, new_optimizers(model, [("Adafactor", {"foreach": True})]), budget="1 MB")
    optimizers = new_optimizers(model, [("SGD", {"momentum": 0.9})])
    step = checkmate.training_step(model, optimizers, budget="1 MB", time_limit=1.0)
    step(*BATCH)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for register, match in (
        (model.scale.register_hook, "view within the step"),
        (model.scale.register_post_accumulate_grad_hook, "gradients=True"),
    ):
        handle = register(lambda *args: None)
        with pytest.raises(checkmate.Unsupported, match=match):
            step(*BATCH)
        handle.remove()
    assert_same_bits(model.state_dict(), before)
    step(*BATCH)

    def registers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.scale.register_hook(lambda gradient: gradient * 2)
        return model(x, y)

    step = checkmate.training_step(registers, optimizers, budget="1 MB", time_limit=1.0)
    before = {name: t.detach().clone() for name, t in model.named_parameters()}
    with pytest.raises(checkmate.Unsupported, match="view within the step"):
        step(*BATCH)
    assert_same_bits({name: t.detach() for name, t in model.named_parameters()}, before)


def test_hook_on_a_view_is_called() -> None:
    """The way out that the refusal names has the bits of a hook on the parameter."""
    found = []
    for is_ours in (True, False):
        model = AllKinds()
        optimizers = new_optimizers(model, [("AdamW", {})])
        plain = model.forward

        def viewed(x: torch.Tensor, y: torch.Tensor, model: AllKinds = model, plain: Any = plain) -> torch.Tensor:
            scale = model.scale.view_as(model.scale)
            scale.register_hook(lambda gradient: gradient * 3)
            return plain(x, y) * scale

        step: Any = plain_step(viewed, optimizers)
        if is_ours:
            step = checkmate.training_step(viewed, optimizers, budget="1 MB", time_limit=1.0)
        found.append(train_whole(step, model, optimizers, BATCH))
    assert_same_states(*found)
