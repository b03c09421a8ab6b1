"""Another plan takes over between two steps, and nobody can tell by the numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.backends import capture_cache, plan_swap, planner
from checkmate.core.solution import Query
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.budgets import between
from tests.support.offers import Offers, begin_poorly, offered, plan_by
from tests.support.stepping import grads_of
from tests.support.whole_steps import Scored

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def searches() -> Iterator[list[Offers]]:
    """Stand-ins for the searches of the steps that are compiled, in their order."""
    with offered() as made:
        yield made


def _net() -> nn.Module:
    """Dropout, batch norm, and a layer that is used three times."""
    torch.manual_seed(0)
    outer = nn.Linear(32, 32)
    inner = (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))
    return Scored(*(part for layers in inner for part in (layers, outer, nn.Tanh())))


def _batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(32, (size,), generator=generator)


@functools.cache
def _budget(share: float) -> int:
    return between(checkmate.trace(_net(), *_batch(64, 0)), share, time_limit=0.1)


def _compiled(share: float = 0.5, **options: Any) -> tuple[nn.Module, Any]:
    module = _net()
    return module, checkmate.compile(module, budget=_budget(share), **options)


def _once(module: nn.Module, step: Any, size: int = 64, seed: int = 0) -> None:
    """Run a forward and a backward, whose gradients nobody uses."""
    step(*_batch(size, seed)).backward()
    module.zero_grad()


def _train(module: nn.Module, step: Any, searches: list[Offers], steps: int = 8) -> Any:
    """Train by two batches of two sizes to each step of the optimizer, while other plans are offered."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    seen = []
    for i in range(steps):
        for search in searches:
            search.offer()
        for half, size in enumerate((64, 48)):
            loss = step(*_batch(size, 2 * i + half))
            loss.backward()
            seen.append(loss.detach())
        seen += grads_of(module)
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 3 > 0)
    return seen, module.state_dict(), torch.get_rng_state()


@pytest.mark.slow
def test_steps_with_swaps_have_the_bits_of_plain_training(searches: list[Offers]) -> None:
    plain, (module, step) = _net(), _compiled()
    found = _train(module, step, searches)

    assert len(searches) == 1  # for the larger size; the other one takes the cheapest known plan
    assert [planning.swaps > 5 for planning in step.planning] == [True, False]
    assert_same_bits(found, _train(plain, plain, []))


@pytest.mark.slow
def test_each_plan_takes_what_it_says(searches: list[Offers]) -> None:
    """The peak of each step is that of the plan which runs, to the byte; `plans` shows that one."""
    module, step = _compiled()
    batch = _batch(64, 0)
    _once(module, step)
    peaks = []
    for _ in range(3):
        searches[0].offer()
        peaks.append(step.plans[0].problem.resident + measure_peak(lambda: step(*batch).backward()).peak)
        module.zero_grad()
        assert peaks[-1] == step.plans[0].peak <= step.plans[0].budget
    assert len(set(peaks)) == 3
    assert step.planning[0].swaps == 3


@pytest.mark.slow
def test_no_plan_takes_over_while_a_backward_is_pending(searches: list[Offers]) -> None:
    plain, (module, step) = _net(), _compiled()
    losses = []
    for model, run in ((plain, plain), (module, step)):
        torch.manual_seed(1)
        first = run(*_batch(64, 0))
        for search in searches:
            search.offer()
        second = run(*_batch(64, 1))
        (first * second).backward(retain_graph=True)
        run(*_batch(64, 2))
        assert not searches or step.planning[0].swaps == 0
        (first - second).backward()
        losses.append((first.detach(), second.detach(), grads_of(model)))
    assert_same_bits(losses[1], losses[0])
    del first, second
    module.zero_grad()
    _once(module, step)
    assert step.planning[0].swaps == 1


def test_no_plan_takes_over_while_gradients_are_accumulated(searches: list[Offers]) -> None:
    module, step = _compiled()
    optimizer = torch.optim.Adam(module.parameters())
    swaps = []
    for i in range(8):
        step(*_batch(64, i)).backward()
        searches[0].offer()
        swaps.append(step.planning[0].swaps)
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    _once(module, step)
    assert swaps == [0, 0, 0, 0, 1, 1, 1, 1]
    assert step.planning[0].swaps == 2


def test_a_backward_runs_the_code_of_its_own_forward(searches: list[Offers]) -> None:
    """Hooks copy the saved tensors, so nobody knows that a backward is pending when another plan takes over."""
    plain, (module, step) = _net(), _compiled()
    for run in (plain, step):
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            first = run(*_batch(64, 0))
            for search in searches:
                search.offer()
            second = run(*_batch(64, 1))
        first.backward()
        second.backward()
    assert step.planning[0].swaps == 1
    assert_same_bits(grads_of(module), grads_of(plain))


def test_writes_are_refused_by_what_the_plan_that_runs_needs(searches: list[Offers]) -> None:
    """A bias is read in the backward where the plan runs its layer again."""
    module, step = _compiled(share=0.7, profile="roofline:laptop")  # the same plans on any machine

    def refused() -> dict[str, str]:
        found = {}
        for name, bias in module.named_parameters():
            if name.endswith("0.bias"):
                module.zero_grad()
                loss = step(*_batch(64, 0))
                with torch.no_grad():
                    bias.add_(1)
                try:
                    loss.backward()
                except Unsupported as error:
                    found[name] = str(error)
        return found

    before = refused()
    searches[0].offer()
    after = refused()
    assert step.planning[0].swaps == 1
    assert set(after) > set(before)
    assert all("was written to between the step and its backward" in text for text in after.values())


def test_the_end_of_planning_is_shown_and_what_it_needs_is_let_go(searches: list[Offers]) -> None:
    module, step = _compiled()
    _once(module, step)
    assert step.planning[0].goes_on
    assert not step.wait(0)
    searches[0].offer()
    searches[0].end()
    assert step.wait()
    for _ in range(2):
        _once(module, step)
    assert (step.planning[0].goes_on, step.planning[0].swaps) == (False, 1)
    searches[0].offer()
    _once(module, step)
    assert step.planning[0].swaps == 1  # nothing is looked at any more


@pytest.mark.slow
def test_a_graph_that_is_forgotten_ends_its_search(searches: list[Offers]) -> None:
    module, step = _compiled(max_plans=1)
    _once(module, step)
    searches[0].offer()
    _once(module, step)
    module[0][0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    _once(module, step)
    assert [search.goes_on for search in searches] == [False, True]
    assert len(step.plans) == len(step.planning) == 1


@pytest.mark.long
def test_what_a_process_finds_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_by(monkeypatch, begin_poorly)
    plain, (module, step) = _net(), _compiled(share=0.7)
    found = [_train(module, step, [], steps=2)]
    first = step.plans[0]
    assert step.wait(100)
    found.append(_train(module, step, [], steps=3))

    assert step.planning[0].failure == ""
    assert step.planning[0].swaps > 0
    assert step.plans[0].cost < 0.99 * first.cost
    assert step.plans[0].bound == step.planning[0].bound
    assert_same_bits(found, [_train(plain, plain, [], steps=2), _train(plain, plain, [], steps=3)])


@pytest.mark.slow
@pytest.mark.usefixtures("searches")
def test_the_line_says_that_training_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    original = capture_cache.showing

    @contextmanager
    def watched(text: Any, **options: Any) -> Iterator[None]:
        with original(text, **options):
            yield
            shown.append(text())

    monkeypatch.setattr(capture_cache, "showing", watched)
    _, step = _compiled()
    step(*_batch(64, 0))
    assert shown == [f"training; planning goes on, gap {step.plans[0].gap:.2%}"]


def test_ranks_that_train_together_wait_for_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def begin(query: Query) -> checkmate.Solution:
        waits.append(query.wait)
        return checkmate.solve(query.problem, query.budget, time_limit=1.0)

    monkeypatch.setattr(planner.plan_cache, "kept", lambda *known: begin)
    chain = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    for together in (False, True):
        monkeypatch.setattr(planner.ranks, "train_together", lambda together=together: together)
        planner.Planner(planner.Options(budget="4 B", wait="first")).plan(chain, go_on=True)
    assert waits == [planner.FIRST_SECONDS, float("inf")]


def test_where_nothing_is_open_no_process_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_swap, "Search", None)
    _, step = _compiled(share=1.0)
    step(*_batch(64, 0))
    assert step.wait()
    assert [(planning.goes_on, planning.gap) for planning in step.planning] == [(False, 0.0)]


def test_attributes_of_a_module_stay_its_own() -> None:
    class Waiting(nn.Linear):
        def wait(self) -> str:
            return "mine"

    compiled = checkmate.compile(Waiting(4, 4), budget="1 MB")
    compiled(torch.ones(2, 4)).sum().backward()
    assert compiled.wait() == "mine"
    assert len(compiled.planning) == 1
