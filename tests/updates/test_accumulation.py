"""Whole steps of several micro-batches: their gradients are summed as plain PyTorch sums them, within the budget."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from checkmate.errors import Unsupported
from checkmate.updates.gradients import Sums
from tests.support.bits import assert_same_bits
from tests.support.budgets import between
from tests.support.sampling import long, slow
from tests.support.stepping import grads_of
from tests.support.whole_steps import X, Y, assert_as_plain, classifier, loss_of, plain_step, planned_step, training

pytestmark = pytest.mark.usefixtures("one_thread")


def _made(make: Callable[..., Any], accumulate: int, **options: Any) -> tuple[Any, nn.Module, optim.Optimizer]:
    model = classifier()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return make(loss_of(model), optimizer, accumulate=accumulate, **options), model, optimizer


@pytest.mark.parametrize(("share", "clip_norm"), [slow(0.0, 0.1), long(0.0, None), long(1.0, 0.1), long(1.0, None)])
def test_same_numbers_within_the_budget(share: float, clip_norm: float | None) -> None:
    """Two and a half updates of three micro-batches, at the smallest budget of both graphs and with room.

    The peak of each kind of call is predicted to the byte; sums of gradients are resident.
    """
    train = training(steps=7, accumulate=3, clip_norm=clip_norm)
    problems = [plan.problem for plan in assert_as_plain(train)[0].plans]
    budget = max(between(problem, share) for problem in problems)
    step, found = assert_as_plain(train, budget=budget)
    adding, last = step.plans
    assert max(adding.peak, last.peak) <= budget
    parameters = sum(p.nbytes for p in classifier().parameters())
    peaks = [plan.peak - plan.problem.resident for plan in (adding, last)]
    first = peaks[0] + parameters  # where the sums are not there yet
    again, _planning, *others, updating, at_last = found.peaks
    assert [again, *others, at_last] == [peaks[0], first, peaks[0], first]
    assert updating == peaks[1] if clip_norm else updating <= peaks[1]  # sums that are used are gone before the end


def test_sums_and_states_are_values_of_the_step() -> None:
    """An op adds to each sum, another overwrites the parameter and its state; what clips reads the sums."""
    step, model, _ = _made(planned_step, 2, clip_norm=0.1)
    for _ in range(2):
        step(X, Y)
    of_parameters = sum(p.nbytes for p in model.parameters())
    for plan, last in zip(step.plans, (False, True), strict=True):
        graph = plan.problem.graph
        names = {v: value.name for v, value in enumerate(graph.values) if value.role == "state"}
        adds = {v: op for op in graph.ops if op.target == "checkmate.add_gradient" for v in op.overwrites}
        assert [names[v].rpartition("_")[2] for v in adds] == ["sum"] * 10
        updates = [op for op in graph.ops if op.target == "checkmate.update_parameter"]
        assert len(updates) == (10 if last else 0)
        for op in updates:
            assert {names[v].rpartition(".")[2] for v in op.overwrites if v in names} == {"exp_avg", "exp_avg_sq"}
            assert {graph.values[v].role for v in op.overwrites} == {"parameter", "state"}
            assert set(op.overwrites) <= set(op.inputs)
        assert names.keys() == {v for op in (*adds.values(), *updates) for v in op.overwrites if v in names}
        norms = [op for op in graph.ops if op.name.endswith("_norm") and op.target.startswith("checkmate")]
        assert {op.inputs for op in norms} == {(v,) for v in adds if last}
        assert graph.state_bytes == (3 if last else 1) * of_parameters


@pytest.mark.slow
def test_gradients_between_micro_batches_are_those_of_plain_pytorch() -> None:
    """They are shown as ``.grad``, and gone after the update, or kept and clipped. Changes of a person count."""
    for keep in (False, True):

        def train(make: Callable[..., Any], keep: bool = keep) -> Any:
            step, model, _ = _made(make, 2, clip_norm=0.1)
            left = []
            for i in range(6):
                torch.manual_seed(i)
                step(X, Y)
                if i == 2:
                    for p in model.parameters():
                        p.grad.mul_(0.3)
                if i == 4:
                    model[0][0].weight.grad = None
                if i % 2 == 0 or keep:
                    left.append(grads_of(model))
                elif make is not plain_step:
                    assert all(p.grad is None for p in model.parameters())
            return left, model.state_dict()

        assert len(assert_as_plain(train, gradients=keep)[0].plans) == 2


@pytest.mark.slow
def test_gradients_that_a_person_holds_stay() -> None:
    """The next accumulation does not write over the ``.grad`` of before the update."""
    step, model, _ = _made(planned_step, 2)
    step(X, Y)
    held = model[0][0].weight.grad
    step(X, Y)
    before = held.clone()
    step(X, Y)
    step(X, Y)
    assert_same_bits(held, before)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "norm_type": math.inf}, {"clip_value": 1e-3}])
def test_update_by_fewer(options: dict[str, Any]) -> None:
    """An epoch whose number of batches is no multiple ends with an update by those that there were."""

    def train(make: Callable[..., Any]) -> Any:
        step, model, optimizer = _made(make, 3, **options)
        torch.manual_seed(1)
        for _ in range(5):
            step(X, Y)
        step.update()
        left = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if make is not plain_step:
            step.update()  # nothing was added since
            assert_same_bits(model.state_dict(), left[0])
        return left

    assert_as_plain(train)


@pytest.mark.slow
def test_parameters_that_get_gradients_in_some_micro_batches_only() -> None:
    """A parameter that the last micro-batch does not use is clipped and updated by the sum of the others."""

    def train(make: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        parts = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 10)])
        optimizer = optim.AdamW(parts.parameters(), lr=1e-2)

        def loss_fn(x: Tensor, y: Tensor, *, both: bool) -> Tensor:
            return F.cross_entropy(parts[0](x) + parts[1](x) if both else parts[0](x), y)

        step = make(loss_fn, optimizer, accumulate=2, clip_norm=0.1)
        for both in (True, False, False, False, False, True):
            step(X, Y, both=both)
        return parts.state_dict(), optimizer.state_dict()

    assert_as_plain(train)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_of_zeros(accumulate: int) -> None:
    """Rounding has one, and early; the update, by which the weight decays, waits for ops that read the weight."""

    def train(make: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        a, b = nn.Parameter(3 * torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))
        optimizer = optim.SGD([a, b], lr=0.5, weight_decay=0.5)
        step = make(lambda x: (x @ b @ a.detach()).square().sum() + a.round().sum(), optimizer, accumulate=accumulate)
        for _ in range(2 * accumulate):
            step(X / 100)
        return a.detach(), b.detach(), optimizer.state_dict()

    assert_as_plain(train)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, centered=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
}


def _calls(step: Any, which: range) -> None:
    for i in which:
        torch.manual_seed(i)
        step(X * (i + 1), Y)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_resumed_in_mid_accumulation(make_optimizer: Callable[[Any], optim.Optimizer]) -> None:
    """The gradients and the number of their calls are a part of the checkpoint; without the number it is refused."""
    model, plain = classifier(), classifier()
    optimizer, of_plain = make_optimizer(model.parameters()), make_optimizer(plain.parameters())
    step = planned_step(loss_of(model), optimizer, accumulate=3)
    _calls(plain_step(loss_of(plain), of_plain, accumulate=3), range(9))
    _calls(step, range(5))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients, calls = [p.grad for p in model.parameters()], step.calls
    assert calls == 2

    model = classifier()
    optimizer = make_optimizer(model.parameters())
    step = planned_step(loss_of(model), optimizer, accumulate=3)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    with pytest.raises(ValueError, match="put the saved gradients there"):
        step.calls = calls
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    with pytest.raises(Unsupported, match="of how many calls"):
        step(X, Y)
    with pytest.raises(ValueError, match="0 to 2"):
        step.calls = 3
    for count in (2.0, True):
        with pytest.raises(ValueError, match="an int from 0 to 2"):
            step.calls = count
    step.calls = calls
    _calls(step, range(5, 9))
    assert_same_bits([*model.state_dict().values()], [*plain.state_dict().values()])
    assert step.calls == 0


@pytest.mark.parametrize("anew", ["None", "zeros", "calls"])
def test_rewound_in_mid_accumulation(anew: str) -> None:
    """A call fails, a checkpoint of the last update is loaded, and the gradients so far are dropped or refused."""
    step, model, optimizer = _made(planned_step, 3)
    plain, of_plain, _ = _made(plain_step, 3)
    _calls(plain, range(6))
    _calls(step, range(3))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _calls(step, range(8, 9))
    with pytest.raises((IndexError, RuntimeError)):
        step(X, torch.full_like(Y, 99))
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    for refused in (step.update, lambda: step(X, Y), lambda: step.calls):
        with pytest.raises(Unsupported, match="of how many calls"):
            refused()
    if anew == "calls":
        step.calls = 0
    else:
        optimizer.zero_grad(set_to_none=anew == "None")
    _calls(step, range(3, 6))
    assert_same_bits([*model.state_dict().values()], [*of_plain.state_dict().values()])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroed_in_mid_accumulation_an_update_begins_anew(set_to_none: bool) -> None:
    """Also where no state is loaded; gradients that are scaled in place go on."""
    step, model, optimizer = _made(planned_step, 2)
    _calls(step, range(1))
    assert step.calls == 1
    for p in model.parameters():
        p.grad.mul_(2)  # type: ignore[union-attr]
    assert step.calls == 1
    optimizer.zero_grad(set_to_none=set_to_none)
    assert step.calls == 0
    step.update()
    assert not optimizer.state
    _calls(step, range(1))
    assert step.calls == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_that_fails_in_the_middle_of_its_sums_is_told_by_the_next(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call would go on with sums of which some have the failed call's gradients."""
    step, model, optimizer = _made(planned_step, 3)
    plain, again, of_again = _made(plain_step, 3)
    for run in (step, plain):
        torch.manual_seed(1)
        for _ in range(3 + failing):
            run(X, Y)
    add, adds = Sums.add, itertools.count()

    def interrupted(self: Sums, *args: Any) -> None:
        add(self, *args)
        if next(adds) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(X, Y)
    with pytest.raises(Unsupported, match=r"or its last call failed: .* to begin the update anew"):
        step(X, Y)
    # Both begin the update anew, from the same state.
    step.calls = 0
    of_again.zero_grad()
    model.load_state_dict(again.state_dict())
    plain = plain_step(loss_of(again), of_again, accumulate=3)
    for run in (step, plain):
        torch.manual_seed(2)
        for _ in range(3):
            run(X, Y)
    assert_same_bits((model.state_dict(), optimizer.state_dict()), (again.state_dict(), of_again.state_dict()))
