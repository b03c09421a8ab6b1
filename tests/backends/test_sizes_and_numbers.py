"""Numbers and sizes that change together are inputs of one capture: bits, peaks, and how often the step is captured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends.compilation import Backend
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.offers import offered
from tests.support.stepping import grads_of, left_by
from tests.support.whole_steps import plain_step


class _Net(nn.Module):
    """Tokens, dropout and a loss, with something in between that the numbers take part in."""

    def __init__(self, between: Callable[..., Tensor], words: int = 50) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(words, 32), nn.Linear(32, 64), nn.Linear(64, words)
        self.drop, self.between = nn.Dropout(0.2), between

    def forward(self, tokens: Tensor, target: Tensor, *numbers: float) -> Tensor:
        h = self.drop(torch.relu(self.first(self.embed(tokens)))).tanh()
        logits = self.last(self.between(h, *numbers))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class _Scaled(_Net):
    """The numbers take part in the loss, too."""

    def forward(self, tokens: Tensor, target: Tensor, *numbers: float) -> Tensor:
        logits = self.last(self.drop(self.first(self.embed(tokens)))) / (2 + numbers[0])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) * numbers[1]


def _tokens(length: int, batch: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens, target = torch.randint(50, (2, batch, length), generator=generator)
    return tokens, target


def _anneal(h: Tensor, weight: float, calls: int) -> Tensor:
    """The backward reads numbers that are computed from both, and from the length."""
    return h * (1 - weight) + h.sin() * (weight / h.shape[1]) + h.square() * min(1.0, calls * weight / 3)


def _smallest(net: nn.Module, *batch: Any) -> int:
    return checkmate.min_budget(checkmate.trace(copy.deepcopy(net), *batch)).peak


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An element for each capture that is begun: whether it succeeds."""
    begun: list[bool] = []
    compile_ = Backend.compile

    def counted(*args: Any) -> Any:
        begun.append(False)
        step = compile_(*args)
        begun[-1] = True
        return step

    monkeypatch.setattr(Backend, "compile", counted)
    return begun


def _run(step: Any, twin: nn.Module, net: nn.Module, calls: Any) -> None:
    """Compare each call, of a length and numbers, with plain PyTorch, and its peak with that of its plan."""
    for length, *numbers in calls:
        batch: Any = (*_tokens(length), *numbers)
        before = {id(plan) for plan in step._caches[0].plans}
        assert_same_bits(left_by(step, twin, *batch), left_by(net, net, *batch))
        new = [plan.plan for plan in step._caches[0].plans if id(plan) not in before]

        def again(batch: Any = batch) -> None:
            step(*batch).backward()
            twin.zero_grad()

        taken = measure_peak(again, torch.device("cpu")).peak
        if new:
            assert taken in [plan.peak - plan.problem.resident for plan in new]


NUMBERS = {  # lengths and numbers, and how often these are captured
    "at once": ([(24, 0.5, 2), (30, 0.25, 3), (17, 0.75, 4), (24, 0.5, 5), (41, 1e-300, 1), (9, -0.0, 0)], 2),
    "the length first": ([(24, 0.5, 2), (30, 0.5, 2), (17, 0.75, 4), (24, math.inf, 5), (41, 0.1, 1), (30, 0.5, 2)], 3),
    "numbers first": ([(24, 0.5, 2), (24, 0.25, 3), (17, 0.75, 4), (30, 0.1, 5), (41, 0.1, 1), (24, 0.5, 2)], 3),
    "an int alone": ([(24, 0.5, 2), (30, 0.5, 3), (17, 0.5, 4), (24, 0.5, 5)], 2),
    "one number after another": ([(24, 0.5, 2), (30, 0.5, 3), (17, 0.75, 4), (24, 0.5, 5), (41, 0.1, 1)], 3),
}


@pytest.mark.parametrize("order", NUMBERS)
def test_they_are_captured_two_or_three_times_at_the_smallest_budget(order: str, captures: list[bool]) -> None:
    calls, times = NUMBERS[order]
    torch.manual_seed(0)
    net = _Net(_anneal)
    twin = copy.deepcopy(net)
    budget = _smallest(net, *_tokens(41), 0.5, 2) + 64  # numbers that are handed in take some bytes
    captures.clear()
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget)
    _run(step, twin, net, calls)
    assert captures == [True] * times
    assert len(step._caches[0].steps) == 1


PARTS = {
    "a length": [(40, 0.5, 2), (40, 0.25, 3), (40, 1e-3, 4)],
    "lengths": [*zip((40, 32, 24, 36, 8), (0.5, 0.25, 0.75, 0.5, 7.0), range(5), strict=True)],
}


@pytest.mark.parametrize("calls", PARTS)
def test_a_temperature_within_a_loss_in_parts(calls: str, captures: list[bool]) -> None:
    torch.manual_seed(0)
    net = _Scaled(_anneal, words=800)
    twin = copy.deepcopy(net)
    whole = checkmate.trace(copy.deepcopy(net), *_tokens(40), 0.5, 2)
    budget = checkmate.min_budget(whole).peak * 11 // 10
    assert budget < whole.unavoidable_bytes.max()
    captures.clear()
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget)
    _run(step, twin, net, PARTS[calls])
    assert captures == [True] * 2
    assert any(plan.problem.splits for plan in step.plans)
    assert all(plan.problem.splits for plan in step.plans) == (calls == "a length")  # the shortest fits whole


def test_a_number_that_chooses_a_branch_is_guarded(captures: list[bool]) -> None:
    """Each way has a capture for all lengths and numbers that take it."""
    torch.manual_seed(0)
    net = _Net(lambda h, weight: h * weight if weight > 0.5 else h.sin() / weight)
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    weights = (1.0, 0.25, 0.75, 0.3, 0.1, 0.6, 0.5)
    _run(step, twin, net, [*zip((24, 30, 17, 12, 24, 24, 41), weights, strict=True)])
    assert captures.count(True) == 4
    assert len(step._caches[0].steps) == 2


def test_a_number_that_is_the_length(captures: list[bool]) -> None:
    """Both are one input: it may be a size."""
    torch.manual_seed(0)
    net = _Net(lambda h, n: h.view(-1, n, 64).unflatten(0, (4, 1)).flatten(1, 2) / math.sqrt(n))
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    _run(step, twin, net, [(length, length) for length in (24, 30, 17, 9, 24, 41)])
    assert captures == [True] * 2


TIGHT = {  # lengths and numbers, and the captures, of which some do not fit
    "a longer one later": ([(24, 0.5, 2), (30, 0.25, 3), (41, 0.1, 4), (41, 0.3, 5), (17, 0.2, 1)], [1, 1, 1, 0, 1]),
    "a longer one at once": ([(24, 0.5, 2), (41, 0.25, 3), (30, 0.1, 4), (17, 0.3, 5)], [1, 0, 1, 1]),
}


@pytest.mark.parametrize("order", TIGHT)
def test_a_length_that_fits_only_with_fixed_numbers_is_captured_by_itself(order: str, captures: list[bool]) -> None:
    """Numbers are handed in as tensors, of some bytes: here at the peak, which is in the forward."""
    calls, begun = TIGHT[order]
    torch.manual_seed(0)
    net = _Net(lambda h, weight, n: h + torch.cat([h.detach()] * 9, -1).sum(-1, keepdim=True) * weight * n)
    twin = copy.deepcopy(net)
    budget = _smallest(net, *_tokens(41), 0.5, 2)
    captures.clear()
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget)
    _run(step, twin, net, calls)
    assert captures == begun


KEPT = {  # what depends on a number in another way
    "a size": lambda h, n: h * h[..., :n].sum(-1, keepdim=True),
    "a probability": lambda h, n: F.dropout(h, n / 10),
    "a kind": lambda h, n: h.cumsum(n % 3),
}


@pytest.mark.parametrize("between", KEPT)
def test_a_number_that_cannot_be_an_input_leaves_lengths_open(between: str, captures: list[bool]) -> None:
    torch.manual_seed(0)
    net = _Net(KEPT[between])
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    calls = [(24, 4), (30, 5), (17, 5), (12, 5), (12, 4), (30, 4), (41, 5), (11, 4)]
    _run(step, twin, net, calls)
    assert captures == [True, False, True, True, True]  # two of each number
    assert len(step._caches[0].steps) == 2


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_whole_steps(options: dict[str, Any], captures: list[bool]) -> None:
    torch.manual_seed(0)
    net = _Net(_anneal)
    twin = copy.deepcopy(net)
    optimizer, other = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, twin))
    plain = plain_step(net, optimizer, **options)
    step: Any = checkmate.training_step(twin, other, budget="50 MB", **options)
    for i, length in enumerate((24, 30, 17, 9, 24)):
        batch: Any = (*_tokens(length), 0.9**i, i)
        torch.manual_seed(length)
        expected = plain(*batch)
        torch.manual_seed(length)
        assert_same_bits(step(*batch), expected)
        assert_same_bits([*twin.state_dict().values()], [*net.state_dict().values()])
    assert all(len(cache.steps) == 1 for cache in step._caches)
    assert captures == [True] * 2 * len(step._caches)


class _Counting(_Net):
    """A network that counts its calls, in the computation and beside it, and asks for the value of a tensor."""

    def __init__(self) -> None:
        super().__init__(_anneal)
        self.calls, self.seen, self.longest = 0, 0.5, 0

    def forward(self, tokens: Tensor, target: Tensor, *numbers: float) -> Tensor:
        self.calls += 1
        self.seen += 0.25
        self.longest = tokens.shape[1]
        loss = super().forward(tokens, target, self.seen / 7, self.calls)
        return loss * 2 if target[0, 0] % 2 else loss


def test_counters(captures: list[bool]) -> None:
    torch.manual_seed(0)
    net = _Counting()
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(twin, budget="10 MB")
    for length in (24, 30, 17, 9, 41, 24, 12, 30):
        assert_same_bits(left_by(step, twin, *_tokens(length)), left_by(net, net, *_tokens(length)))
        assert (twin.calls, twin.seen, twin.longest) == (net.calls, net.seen, net.longest)
        assert (type(twin.calls), type(twin.longest)) == (int, int)
    assert captures == [True, False, True, True, True]  # two of each answer
    assert len(step.plans) == 6  # of as many lengths


def test_forwards_wait_for_their_backwards_each_with_its_own_numbers() -> None:
    torch.manual_seed(0)
    net = _Net(_anneal)
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    calls = [(30, 0.5, 1), (22, 0.25, 2), (17, 0.125, 3), (30, 2.0, 4)]
    for length, *numbers in calls[:2]:
        step(*_tokens(length), *numbers).backward()
    twin.zero_grad()

    def gradients(run: Callable[..., Tensor], of: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(3)
        first, second, third, fourth = (run(*_tokens(length), *numbers) for length, *numbers in calls)
        (second * 2).backward(retain_graph=True)
        first.backward()
        fourth.backward()
        second.backward()
        third.backward()
        return grads_of(of)

    assert_same_bits(gradients(step, twin), gradients(net, net))


@pytest.mark.parametrize("others", [(41, 41), (24, 30)], ids=["a length", "lengths"])
def test_better_plans_take_over_with_numbers(others: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = _Net(lambda h, w, n: _anneal(_anneal(h, w, n).tanh().sin(), w, n).tanh())
    twin = copy.deepcopy(net)
    problem = checkmate.trace(copy.deepcopy(net), *_tokens(41), 0.5, 2)
    budget = (checkmate.min_budget(problem).peak + problem.keep_all_peak) // 2
    with offered() as searches:
        step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget)
        for i, length in enumerate((41, 41, *others, 41, *others, 41)):
            batch: Any = (*_tokens(length), 0.9**i, i)
            for search in searches[-1:]:
                search.offer()
            assert_same_bits(left_by(step, twin, *batch), left_by(net, net, *batch))
            twin.zero_grad()
            net.zero_grad()
    assert sum(planning.swaps for planning in step.planning) > 2
