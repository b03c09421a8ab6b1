"""Optimizers that are not in `torch.optim`, and are promised to update each parameter alone."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from transformers.optimization import Adafactor

import checkmate
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from checkmate.torch_internals.running import tree_leaves
from checkmate.updates import optimizers
from checkmate.updates.optimizers import Update, about, checked
from checkmate.updates.per_parameter import known
from tests.support.bits import assert_same_bits
from tests.support.whole_steps import TrainedWhole, assert_as_plain, plain_step, planned_step
from tests.updates import own_optimizers as own
from tests.updates.updated import AllKinds, training_of_all_kinds

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[[Any], optim.Optimizer]
_whole = partial(planned_step, alone=True)

# As the page names them: those that are taken, in all their settings, and those that are not, with words of the error.
TAKEN: dict[str, list[Make]] = {
    "derived from AdamW, changes nothing that its step runs": [own.Renamed],
    "derived from AdamW, sets its own rate in its step": [
        own.WarmsUp,
        lambda groups: own.WarmsUp(groups, foreach=True, amsgrad=True),
        lambda groups: own.WarmsUp(groups, fused=True),
    ],
    "AdamW of one's own, by p.data, with corrections in Python": [own.OwnAdamW],
    "momentum of one's own, with decay written into gradients": [own.DecaysInGradients],
    "Lion": [own.Lion],
    "Lamb": [own.Lamb],
    "Lamb that counts its steps in its groups": [own.LambByGroups],
    "Adafactor of transformers": [
        Adafactor,
        lambda groups: Adafactor(groups, warmup_init=True, beta1=0.9),
        lambda groups: Adafactor(groups, lr=0.01, relative_step=False, scale_parameter=False),
    ],
}
REFUSED: dict[str, tuple[Make, str]] = {
    "steps by another optimizer": (lambda groups: own.Lookahead(optim.AdamW(groups)), "another optimizer, AdamW,"),
    "wraps another optimizer": (lambda groups: own.Wrapper(optim.AdamW(groups)), "another optimizer, AdamW,"),
    "LBFGS": (lambda groups: type("Own", (optim.LBFGS,), {})(groups[0]["params"]), "several times"),
}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [*model.parameters()]
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.02}]


def assert_same(make: Make, **how: Any) -> tuple[Any, TrainedWhole]:
    """Planned and plain leave the same bits, also of what stands in groups and of the numbers that are counted.

    Gives the planned step, and what is left.
    """
    planning = {name: how.pop(name) for name in ("gradients", "verify") if name in how}
    look = lambda model, made: (repr(made.state_dict()["param_groups"]), getattr(made, "steps", None))  # noqa: E731
    train = training_of_all_kinds(lambda model: make(_groups(model)), **{"look": look, **how})
    return assert_as_plain(train, alone=True, **planning)


@pytest.mark.parametrize(("name", "n"), [(name, n) for name, makes in TAKEN.items() for n in range(len(makes))])
def test_same_bits_as_the_plain_loop(name: str, n: int) -> None:
    """Two groups over six steps, with a schedule where there is a rate: bits, states, counts, and the planned peak."""
    schedules: dict[int, Any] = {}

    def schedule(i: int, model: nn.Module, made: optim.Optimizer) -> None:
        if i == 0 and made.param_groups[0]["lr"] is not None:
            schedules[id(made)] = optim.lr_scheduler.StepLR(made, 2, 0.5)
        elif id(made) in schedules:
            schedules[id(made)].step()

    step, found = assert_same(TAKEN[name][n], steps=6, between=schedule)
    (plan,) = step.plans
    # the meter has not seen come what the first metered step replaces
    assert max(found.peaks[1:]) <= plan.peak - plan.problem.resident
    assert len({loss.item() for loss in found.losses}) > 1  # something was learnt


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (own.DecaysInGradients, {"accumulate": 2}),
        (own.WarmsUp, {"accumulate": 2, "clip_norm": 0.5}),
        (Adafactor, {"clip_value": 0.01}),
    ],
)
def test_what_else_a_step_does(make: Make, how: dict[str, Any]) -> None:
    assert_same(make, steps=6, **how)


def test_gradients_may_be_left() -> None:
    """They are as the optimizer was given them. One that may write over them could leave other ones plainly."""
    assert_same(Adafactor, look=lambda model, made: [p.grad for p in model.parameters()], gradients=True)
    for make in (own.DecaysInGradients, own.LambByGroups):
        with pytest.raises(Unsupported, match="may write over gradients"):
            _whole(model := AllKinds(), make(_groups(model)), gradients=True)


def test_a_skipped_update_counts_nothing() -> None:
    """With a scaler neither a state nor a group counts it."""

    def train(make: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer, scaler = own.LambByGroups(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        step = make(lambda x: model(x).square().mean(), optimizer, scaler=scaler)
        for factor in (1.0, float("inf"), 1.0):
            step(torch.full((2, 4), factor))
        assert optimizer.param_groups[0]["step"] == 2
        return optimizer.state_dict(), model.state_dict(), scaler.get_scale()

    assert_as_plain(train, alone=True)


@pytest.mark.parametrize("make", [own.LambByGroups, Adafactor])
def test_training_goes_on_from_a_checkpoint(make: Make) -> None:
    kept = training_of_all_kinds(lambda model: make(_groups(model)), steps=2)(plain_step).state

    def load(i: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        if i == 0:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(copy.deepcopy(kept["optimizers"][0]))

    assert_same(make, between=load, verify=True)


@pytest.mark.parametrize("make", [own.LambByGroups, own.DecaysInGradients])
def test_verified_and_left_as_it_was(make: Make) -> None:
    """Counts beside the states are put back, and states that are replaced are in the peak once."""
    assert_same(make, steps=2, verify=True)


@pytest.mark.parametrize("make", [own.OwnAdamW, own.Lamb, own.BeginsHeavily, own.DecaysInGradients, Adafactor])
def test_a_large_parameter(make: Any) -> None:
    """The plan has the bytes of an update, and those of its state from the first step on."""
    torch.manual_seed(0)
    embedding = nn.Embedding(2000, 64)
    optimizer = make(embedding.parameters())
    step = _whole(lambda x: embedding(x).square().sum(), optimizer)
    x = torch.arange(16)
    step(x)
    (plan,) = step.plans

    def twice() -> None:
        optimizer.state.clear()
        for _ in range(2):
            step(x)

    twice()
    peak = measure_peak(twice).peak  # of the step that makes the state, and of one that goes on from it
    held = sum(t.nbytes for t in tree_leaves([*optimizer.state.values()]) if isinstance(t, torch.Tensor))
    assert 0 <= plan.peak - plan.problem.resident + held - peak < 64


def test_a_late_update_is_estimated_where_none_runs() -> None:
    """The update of a small parameter, in proportion, gives as many bytes as measured, or few more."""
    embedding = nn.Embedding(2000, 64)
    step = _whole(lambda x: embedding(x).square().sum(), own.OwnAdamW(embedding.parameters()))
    measured, estimated = (checkmate.trace(step, torch.arange(16), profile=p) for p in ("measure", "roofline:h100"))
    temporary = embedding.weight.nbytes
    assert temporary <= max(measured.workspace) <= max(estimated.workspace) <= max(measured.workspace) + 1024


def test_a_class_that_changes_nothing_is_its_parent() -> None:
    """It shares its parent's measurements; one that changes what a step runs is not known."""
    parameters = [nn.Parameter(torch.ones(2))]
    renamed, plain = own.Renamed(parameters), optim.AdamW(parameters)
    assert known(renamed) is known(plain) is optim.AdamW
    assert about(renamed, plain.param_groups[0]) == about(plain, plain.param_groups[0])
    for changes in ("step", "_init_group"):
        kind: Any = type("Changes", (optim.SGD,), {changes: lambda self, *args: None})
        assert known(kind(parameters, lr=0.1)) is None
    louder = functools.wraps(optim.SGD.step)(lambda self: None)
    assert known(type("Wrapped", (optim.SGD,), {"step": louder})(parameters, lr=0.1)) is None


def test_another_code_is_measured_anew() -> None:
    """The cost of an update is remembered by its code and its settings, without its counts."""
    found = []
    for make, cell in ((own.Lamb, 0), (own.Lamb, 0), (own.Lamb, 1), (own.Lion, 0)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer: Any = make([parameter])
        vars(optimizer)["depth"] = cell
        found.append(Update(optimizer, 0, parameter).about)
    assert found[0] == found[1]
    assert len({*found}) == 3
    for counting in (own.LambByGroups([nn.Parameter(torch.ones(2))]), own.WarmsUp([nn.Parameter(torch.ones(2))])):
        before = about(counting, counting.param_groups[0])
        counting.step()
        assert about(counting, counting.param_groups[0]) == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_way_out(name: str) -> None:
    """Neither parameters, nor states, nor the generators of random numbers have changed."""
    make, words = REFUSED[name]
    model = AllKinds()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer = make(_groups(model))
    groups = repr(optimizer.param_groups)
    with pytest.raises(Unsupported, match=words) as error:
        _whole(model, optimizer)
    assert type(optimizer).__name__ in str(error.value)
    assert "reserve=" in str(error.value)
    assert_same_bits((model.state_dict(), torch.get_rng_state()), (before, drawn))
    assert not optimizer.state
    assert repr(optimizer.param_groups) == groups


class ByLargeOnes(own.OwnAdamW):
    """Divides gradients by the norm of all large ones, of which copies of three elements a dimension are none."""

    def begin(self, group: dict[str, Any]) -> None:
        large = [p.grad.norm() for p in group["params"] if p.grad is not None and p.numel() > 100]
        for p in group["params"] if large else ():
            p.grad /= 1 + torch.stack(large).norm()


@pytest.mark.parametrize("make", [ByLargeOnes, own.Lion])
def test_what_is_not_known_takes_a_promise(make: Make) -> None:
    """No trial on small copies could tell the first of these from the second: it does not update each alone."""
    model = AllKinds()
    with pytest.raises(Unsupported, match=r"(?s)is not known to update .* alone=True.* reserve="):
        planned_step(model, make(_groups(model)))
    checked(make(_groups(model)), alone=True)
    checked(Adafactor(_groups(model)))


def test_of_a_shard_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "is_shard", lambda parameter: True)
    with pytest.raises(Unsupported, match="Lamb may read rows, columns or norms of a whole parameter"):
        checked(own.Lamb([nn.Parameter(torch.ones(2))]))


def test_the_table_of_optimizers_is_that_of_the_tests() -> None:
    page = (Path(__file__).parents[2] / "docs" / "supported.md").read_text()
    section = page.split("## Optimizers of whole steps\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)[1:]
    for word, names in (("works", TAKEN), ("refused", REFUSED)):
        assert sorted(name.replace("`", "") for name, said in rows if said.startswith(word)) == sorted(names)
