"""The promise for whole steps: forward, backward and update within the budget, with the bits of the plain loop."""

from __future__ import annotations

import copy
import functools
import math
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.errors import InfeasibleBudget, Unsupported
from tests.support.bits import assert_same_bits
from tests.support.budgets import between
from tests.support.sampling import long, slow
from tests.support.stepping import assert_same, train
from tests.support.whole_steps import X, Y, adamw, assert_as_plain, classifier, loss_of, planned_step, training

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("share", "clip_norm"),
    [long(0.0, None), slow(0.0, 0.1), long(0.5, None), long(0.5, 0.1), slow(1.0, None), long(1.0, 0.1)],
)
def test_same_numbers_within_the_budget(share: float, clip_norm: float | None) -> None:
    """The budget is the smallest, one in between, or keep-all; the peak is predicted to the byte, states included."""
    train = training(steps=4, clip_norm=clip_norm)
    budget = between(assert_as_plain(train)[0].plans[0].problem, share)

    step, found = assert_as_plain(train, budget=budget)

    (plan,) = step.plans
    peaks = found.peaks[1:]  # the first of these steps lets go of a norm that no meter has seen
    assert [plan.problem.resident + peak for peak in peaks] == [plan.peak] * len(peaks)
    assert len(peaks) == 2
    assert plan.peak <= budget


def test_loss_with_others() -> None:
    """The loss of a tuple is followed; the rest is handed out without a gradient, and parameters have none."""
    model = classifier()

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
        scores = model(x)
        return F.cross_entropy(scores, y), {"scores": scores}, 3

    plain = classifier()
    torch.manual_seed(7)
    loss, rest, number = planned_step(loss_fn, adamw(model))(X, Y)
    assert (loss.requires_grad, rest["scores"].requires_grad, number) == (False, False, 3)
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(7)
    assert_same_bits(loss, loss_of(plain)(X, Y).detach())


@pytest.mark.slow
def test_parameters_that_join_are_updated() -> None:
    """A group that is added to the optimizer is updated from the next step on."""

    def join(i: int, model: nn.Sequential, optimizer: optim.Optimizer) -> None:
        if i == 1:
            optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.01})
            for p in model.parameters():
                p.grad = None

    assert_as_plain(training(new_optimizers=lambda model: optim.SGD(model[0].parameters(), lr=0.1), between=join))


def test_refusals() -> None:
    """What cannot be planned is refused at once, with the way out."""
    model = classifier()
    hooked = adamw(model)
    hooked.register_step_pre_hook(lambda *args: None)
    for optimizer, word in (
        (optim.LBFGS(model.parameters()), "(?s)several times.*reserve="),
        (optim.SparseAdam(model.parameters()), "(?s)known to update each parameter alone.*reserve="),
        (hooked, "hook"),
        ([adamw(model), adamw(model)], "two optimizers"),
    ):
        with pytest.raises(Unsupported, match=word):
            planned_step(loss_of(model), optimizer)
    for gradients, word in ((True, "without a gradient"), (False, "no_grad")):
        with torch.set_grad_enabled(gradients), pytest.raises(Unsupported, match=word):
            planned_step(lambda x: x.sum(), adamw(model))(X)


def _replaced(optimizer: optim.Optimizer) -> None:
    own = optimizer.step
    optimizer.step = lambda closure=None: own(closure)


def _replaced_as_method(optimizer: optim.Optimizer) -> None:
    own = type(optimizer).step
    step = functools.wraps(own)(lambda self, closure=None: own(self, closure))
    optimizer.step = types.MethodType(step, optimizer)


def _noted(optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad = functools.partial(optimizer.zero_grad)


@pytest.mark.parametrize("replace", [_replaced, _replaced_as_method, _noted])
def test_a_step_that_is_replaced_on_the_optimizer_is_refused(replace: Any) -> None:
    model = classifier()
    optimizer = adamw(model)
    optim.lr_scheduler.StepLR(optimizer, 1)  # puts what counts the steps around the optimizer's own
    step = planned_step(loss_of(model), optimizer)
    step(X, Y)
    before = [p.clone() for p in model.parameters()]

    replace(optimizer)

    name = "zero_grad" if replace is _noted else "step"
    refused = pytest.raises(Unsupported, match=rf"(?s)AdamW\.{name} was replaced.* clip_norm=.* reserve=")
    with refused as error:
        step(X, Y)
    assert ("test_training_step.py:" in str(error.value)) is (replace is not _noted)
    assert_same_bits(before, [*model.parameters()])
    with refused:
        planned_step(loss_of(model), optimizer)


def test_a_step_that_is_replaced_in_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    optimizer, own = adamw(model), optim.AdamW.step
    monkeypatch.setattr(optim.AdamW, "step", lambda self, closure=None: own(self, closure))
    with pytest.raises(Unsupported, match=r"AdamW\.step was replaced \(test_training_step\.py:"):
        planned_step(loss_of(model), optimizer)


def test_another_thread_is_told_that_a_step_runs_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    step = planned_step(loss_of(model), adamw(model))
    step(X, Y)
    before, inside, go_on = [p.clone() for p in model.parameters()], threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(60)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(step, "_begin", wait)
        first = pool.submit(step, X, Y)
        assert inside.wait(60)
        with pytest.raises(Unsupported, match=r"Another thread is in a call .* one call at a time"):
            step(X, Y)
        assert_same_bits(before, [*model.parameters()])
        go_on.set()
        first.result()
    loss = step(X, Y)
    assert loss.isfinite()
    with pytest.raises(Unsupported, match="arguments"):
        step(X, Y, None)
    assert step(X, Y) < loss  # an error lets go of it


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": [[]]}, "or several, not list."),
        ({"optimizer": None}, "or several, not NoneType."),
        ({"optimizer": []}, "or several, not none."),
        ({"optimizer": optim.AdamW}, r"not the class AdamW: make one of it, AdamW\(model.parameters\(\)\)."),
        ({"optimizer": optim.lr_scheduler.StepLR(adamw(classifier()), 3)}, "not a StepLR: give its optimizer, and"),
        ({"optimizer": nn.Linear(2, 2).parameters()}, "or several, not Parameter."),
        ({"loss_fn": optim.AdamW}, "checkmate.training_step takes a module or a function, not the class AdamW."),
        ({"budget": None}, "text such as '8 GB', not None."),
        ({"reserve": ""}, "reserve='': Cannot read the budget ''"),
        ({"reserve": [1]}, r"reserve=\[1\]: A budget is a number of bytes or text such as '8 GB', not \[1\]."),
        ({"time_limit": "60s"}, "time_limit is a positive number of seconds, not '60s'."),
        ({"clip_norm": "1"}, "clip_norm is a positive number, not '1'."),
        ({"clip_norm": 0.0}, "clip_norm is a positive number, not 0.0."),
        ({"clip_value": True}, "clip_value is a positive number, not True."),
        ({"clip_value": 1.0, "clip_norm": 1.0}, "one of them"),
        ({"clip_norm": 1.0, "norm_type": "max"}, "norm_type is a number, or math.inf, not 'max'."),
        ({"wait": "60s"}, 'wait is "first", "best", or a positive number of seconds, not \'60s\'.'),
        *(({"wait": wait}, f"a positive number of seconds, not {wait}.") for wait in (None, True, 0, math.inf)),
        ({"method": ["auto"]}, r"There is no method \['auto'\]. The methods are auto,"),
        ({"profile": None}, 'There is no profile None; there are "measure",'),
        ({"max_plans": "8"}, "max_plans is a whole number of plans, 1 at least, not '8'."),
        *(({"accumulate": n}, f"accumulate is a whole number of calls, 1 at least, not {n!r}") for n in ("2", 0, True)),
        ({"host": "/fast/disk"}, "Unknown second memory '/fast/disk'"),
        ({"host_budget": "1 GB", "host": "/fast/disk"}, "Unknown second memory '/fast/disk'"),
        ({"host_budget": "much"}, "much"),
        ({"rules": "keep"}, "not 'keep'."),
    ],
)
def test_what_is_given_wrongly_is_said_in_one_line(given: dict[str, Any], said: str) -> None:
    model = classifier()
    asked = {"loss_fn": loss_of(model), "optimizer": adamw(model), "budget": "1 GB", **given}
    with pytest.raises((TypeError, ValueError), match=said) as error:
        checkmate.training_step(**asked)
    assert len(str(error.value).splitlines()) == 1


def test_the_budget_may_stand_in_its_place() -> None:
    model = classifier()
    assert checkmate.training_step(loss_of(model), adamw(model), "1 GB")._planner.total == 10**9
    assert checkmate.compile(loss_of(model), "1 MB")._options.total == 10**6


def test_an_optimizer_that_the_step_does_not_reach() -> None:
    """It has parameters of a copy of the model, or frozen ones: plain PyTorch trains nothing, and says nothing."""
    model, other, frozen = classifier(), classifier(), classifier()
    frozen[:2].requires_grad_(False)
    head = adamw(frozen[2:])
    for net, several, said in (
        (model, [adamw(other)], "this AdamW: the loss does not depend on them"),
        (model, [adamw(model), adamw(other)], r"this AdamW \(number 2\): the loss does not depend on them"),
        (frozen, [head, optim.SGD(frozen[:2].parameters())], r"SGD \(number 2\): all of them have requires_grad"),
    ):
        before = copy.deepcopy((net.state_dict(), other.state_dict())), torch.get_rng_state()
        step = planned_step(loss_of(net), several)
        with pytest.raises(Unsupported, match=f"reaches none of the [0-9]+ parameters of .*{said}"):
            step(X, Y)
        assert_same_bits(((net.state_dict(), other.state_dict()), torch.get_rng_state()), before)
        assert not any(optimizer.state for optimizer in several)
        assert step.plans == []


def test_a_gradient_may_flow_on_to_an_optimizer() -> None:
    """The leaf that a batch was made of is updated: its gradient is there when the step's backward is over."""

    def train(make: Callable[..., Any]) -> Any:
        weight = nn.Parameter(torch.ones(3))
        make(lambda x: x.square().sum(), optim.SGD([weight], lr=0.1))(weight * 2)
        return weight

    assert_as_plain(train)


def test_parameters_in_one_memory_are_refused_by_name() -> None:
    """One parameter used twice is another thing: it trains."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.data.t())
    step = planned_step(loss_of(model), adamw(model))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Unsupported, match=r"^0\.weight and 2\.weight are two parameters in the memory"):
        step(X, Y)
    assert_same_bits(model.state_dict(), before)


@pytest.mark.slow
def test_infeasible_budget_names_the_smallest() -> None:
    """Nothing has changed after the error."""
    model = classifier()
    optimizer, before = adamw(model), copy.deepcopy(model.state_dict())
    with pytest.raises(InfeasibleBudget) as error:
        planned_step(loss_of(model), optimizer, budget="20 kB")(X, Y)
    assert_same_bits(model.state_dict(), before)
    assert not optimizer.state
    planned_step(loss_of(model), optimizer, budget=error.value.min_budget)(X, Y)


OF_SHARED = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def shared() -> nn.Module:
    """Two blocks of the same weights, which autocast converts once for both."""
    torch.manual_seed(0)
    block = nn.Linear(16, 16)
    return nn.Sequential(block, nn.GELU(), block, nn.GELU(), nn.Linear(16, 4))


def _smallest(step: Any) -> int:
    return checkmate.min_budget(checkmate.trace(step, *OF_SHARED, profile="roofline:h100"), time_limit=1).peak


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_name")
def test_compiled_steps_under_autocast() -> None:
    def trained(compiled: Any) -> Any:
        model = shared()
        return train(model, compiled(loss_of(model, torch.bfloat16)), OF_SHARED)

    expected = trained(lambda loss_fn: loss_fn)
    options = {"budget": _smallest(loss_of(shared(), torch.bfloat16)), "time_limit": 1}
    assert_same(trained(lambda loss_fn: checkmate.compile(loss_fn, **options)), expected)
    by_name = {"backend": "checkmate", "options": options, "dynamic": False}
    assert_same(trained(lambda loss_fn: torch.compile(loss_fn, **by_name)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        long(torch.bfloat16, {"clip_norm": 0.1, "accumulate": 2}),
        (torch.float16, {"clip_norm": 0.1, "scaler": lambda _: torch.amp.GradScaler("cpu", init_scale=2.0**8)}),
    ],
)
def test_whole_steps_under_autocast(dtype: torch.dtype, options: dict[str, Any]) -> None:
    planned: Any = training(shared, loss=lambda model: loss_of(model, dtype), batch=OF_SHARED, steps=4, **options)
    step, _ = assert_as_plain(planned)
    assert_as_plain(planned, budget=_smallest(step))
