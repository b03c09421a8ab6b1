"""Every optimizer and every setting of it has the bits of the plain loop: parameters, states, losses, random state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from checkmate.updates import optimizers
from checkmate.updates.optimizers import Update
from tests.support.bits import assert_same_bits
from tests.support.sampling import every
from tests.support.whole_steps import assert_as_plain, plain_step, planned_step, train_whole
from tests.updates.updated import BATCH, AllKinds, Setting, new_optimizers, training_of_all_kinds

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
    *((name, {"maximize": True}) for name in ("NAdam", "RAdam", "Rprop", "Adadelta", "Adamax")),
    ("ASGD", {"weight_decay": 0.1, "maximize": True}),
    ("Adafactor", {"weight_decay": 0.1, "maximize": True}),
    *((name, {"foreach": True}) for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax")),
    ("Adafactor", {"foreach": True, "eps": (1e-6, 1e-3)}),
    *((name, {"foreach": True}) for name in ("NAdam", "RAdam", "Rprop", "SGD")),
    ("RMSprop", {"foreach": True, "momentum": 0.9, "centered": True}),
    ("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}),
    ("SGD", {"foreach": True, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adagrad", {"maximize": True, "foreach": False}),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True, "maximize": True}),
]
HAS = [setting for setting in SETTINGS if hasattr(optim, setting[0])]
ONCE = [setting for setting in HAS if not setting[1].get("fused")]
PAIRS = [[*HAS[i : i + 2]] for i in range(0, len(HAS), 2)]


def described(state: dict[str, Any]) -> list[Any]:
    """Names, types and strides of all that an optimizer's state holds, in its order."""
    held = [
        (number, name, type(what), isinstance(what, Tensor) and what.stride())
        for number, of_one in sorted(state["state"].items())
        for name, what in of_one.items()
    ]
    return [[*state], held]


def _training(settings: list[Setting], **how: Any) -> Any:
    look = lambda model, made: [described(optimizer.state_dict()) for optimizer in made]  # noqa: E731
    return training_of_all_kinds(lambda model: new_optimizers(model, settings), look=look, **how)


@pytest.mark.parametrize("settings", every(4, PAIRS), ids=lambda pair: " and ".join(f"{n} {s}" for n, s in pair))
def test_same_bits_as_the_plain_loop(settings: list[Setting]) -> None:
    """Two optimizers, two groups in each, over five steps; the one after the other clipped."""
    clip_norm = 0.5 if PAIRS.index(settings) % 2 else None
    _, found = assert_as_plain(_training(settings, steps=5, clip_norm=clip_norm))
    assert len({loss.item() for loss in found.losses}) > 1  # something was learnt


KINDS = [*{name: (name, setting) for name, setting in reversed(ONCE)}.values()]
TRIOS = [KINDS[min(i, len(KINDS) - 3) :][:3] for i in range(0, len(KINDS), 3)]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("settings", every(5, TRIOS), ids=lambda trio: ", ".join(name for name, _ in trio))
def test_same_bits_with_sums(settings: list[Setting], clip_norm: float | None, *, scaled: bool) -> None:
    """Three optimizers by the sums of two micro-batches; with a scaler, one of which skips the second update."""

    def loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        def loss_fn(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
            return model(x, y) * factor

        return loss_fn

    def batch(i: int) -> tuple[Tensor, ...]:
        return *BATCH, torch.tensor(float("inf") if scaled and i == 3 else 1.0 + i)

    scaler = {"scaler": lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**10)} if scaled else {}
    how = {"loss": loss, "batch": batch, "steps": 6, "accumulate": 2, "clip_norm": clip_norm, **scaler}
    step, _ = assert_as_plain(_training(settings, **how))
    kinds = {value.name.rpartition(".")[2] for value in step.plans[-1].problem.graph.values if value.role == "state"}
    assert len(kinds) > 2


@pytest.mark.parametrize("width", [64, 640], ids=["whole", "in slices"])
@pytest.mark.parametrize("setting", [("RAdam", {}), ("ASGD", {"t0": 2})], ids=lambda setting: setting[0])
def test_what_late_updates_take_is_planned(setting: Setting, width: int) -> None:
    """RAdam's sixth update takes more than those before it, and so does the first that ASGD averages."""
    torch.manual_seed(0)
    net, (kind, options) = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()), setting
    optimizer = getattr(optim, kind)(net.parameters(), **options)
    step = planned_step(lambda x: net(x).square().mean(), optimizer)
    found = train_whole(step, net, [optimizer], [torch.randn(4, width)], steps=8)
    (plan,) = step.plans
    assert found.peaks[0] < max(found.peaks) == found.peaks[-1] == plan.peak - plan.problem.resident


@pytest.mark.parametrize("setting", [("Adam", {"capturable": True}), ("SGD", {"differentiable": True})])
def test_what_plain_pytorch_refuses(setting: Setting) -> None:
    """Settings that do not train a leaf on the CPU are refused, and nothing has changed."""
    for make, errors in ((plain_step, (AssertionError, RuntimeError)), (planned_step, (AssertionError, Unsupported))):
        model = AllKinds()
        before = copy.deepcopy([*model.parameters()])
        with pytest.raises(errors):
            make(model, new_optimizers(model, [setting]))(*BATCH)
    assert_same_bits([*model.parameters()], before)


def test_what_is_refused_by_name() -> None:
    """Hooks on parameters, whenever they came, and Adafactor where one parameter decides about another."""
    model = AllKinds()
    with pytest.raises(Unsupported, match="foreach=False"):
        planned_step(model, new_optimizers(model, [("Adafactor", {"foreach": True})]))
    made = new_optimizers(model, [("SGD", {"momentum": 0.9})])
    step = planned_step(model, made)
    step(*BATCH)
    before = copy.deepcopy(model.state_dict())
    for register, match in (
        (model.scale.register_hook, "view within the step"),
        (model.scale.register_post_accumulate_grad_hook, "gradients=True"),
    ):
        handle = register(lambda *args: None)
        with pytest.raises(Unsupported, match=match):
            step(*BATCH)
        handle.remove()
    assert_same_bits(model.state_dict(), before)
    step(*BATCH)

    def registers(x: Tensor, y: Tensor) -> Tensor:
        model.scale.register_hook(lambda gradient: gradient * 2)
        return model(x, y)

    before = copy.deepcopy([*model.parameters()])
    with pytest.raises(Unsupported, match="view within the step"):
        planned_step(registers, made)(*BATCH)
    assert_same_bits([*model.parameters()], before)


def test_hook_on_a_view_is_called() -> None:
    """The way out that the refusal names has the bits of a hook on the parameter."""

    def hooked(model: AllKinds) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            scale = model.scale.view_as(model.scale)
            scale.register_hook(lambda gradient: gradient * 3)
            return model(x, y) * scale

        return loss

    assert_as_plain(_training([("AdamW", {})], loss=hooked))


@pytest.mark.parametrize(("kind", "settings"), ONCE, ids=str)
def test_slices_have_the_bits_of_the_whole(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, all layouts, states that are there and that are not."""
    monkeypatch.setattr(optimizers, "SLICE", 1024)
    torch.manual_seed(0)
    sizes = (5003,), (70, 71), (33, 3, 7, 7)
    for size, dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
        if kind == "Muon" and len(size) != 2:
            continue
        start = torch.randn(size).to(dtype)
        start = start.to(memory_format=torch.channels_last) if start.dim() == 4 else start
        ours, plain = start.clone().requires_grad_(), start.clone().requires_grad_()
        optimizer = getattr(optim, kind)([ours], **settings)
        expected = getattr(optim, kind)([plain], **settings)
        update = Update(optimizer, 0, ours)
        for _ in range(4):
            gradient = torch.randn_like(start)
            given, plain.grad = gradient.clone(), gradient.clone()
            update(given)
            expected.step()
            one, other = optimizer.state_dict(), expected.state_dict()
            assert_same_bits((given, ours.detach(), one), (gradient, plain.detach(), other))
            assert described(one) == described(other)
            if other["state"]:  # and go on from the other one's checkpoint
                optimizer.load_state_dict(copy.deepcopy(other))
                expected.load_state_dict(copy.deepcopy(one))


def test_a_large_embedding() -> None:
    """The peak of a step of AdamW is that of its forward and backward, from the first step on, as the plan says."""
    torch.manual_seed(0)
    embedding = nn.Embedding(20_000, 128)
    size = embedding.weight.nbytes
    optimizer = optim.AdamW(embedding.parameters())
    step = planned_step(lambda x: embedding(x).square().sum(), optimizer)
    x = torch.arange(16)
    step(x)
    optimizer.state.clear()
    first = measure_peak(lambda: step(x)).peak
    second = measure_peak(lambda: step(x)).peak
    (plan,) = step.plans
    assert 0 <= plan.peak - plan.problem.resident - second < 64
    assert first <= second + 2 * size + 16  # its state is counted from the first step on
    assert second < 1.5 * size  # the gradient, and not two temporaries beside it
