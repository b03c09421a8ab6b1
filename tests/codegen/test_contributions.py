"""Gradients that meet what comes from outside of a step are added in the order of plain PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.backends import compilation
from checkmate.codegen import contributions
from checkmate.codegen.contributions import UNKNOWN, Sharing, counted_contributions, terms_of
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

Step = Callable[..., Any]
Train = Callable[[Step], Any]  # runs a backward with the step, plain or compiled


class Tied(nn.Module):
    """A language model whose embedding is its head, and the log-probability of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 12)
        self.body = nn.Linear(12, 12)

    def forward(self, text: Tensor) -> Tensor:
        logits = F.linear(torch.tanh(self.body(self.embedding(text))), self.embedding.weight)
        return logits.log_softmax(-1).gather(-1, text.roll(-1, 1)[..., None]).sum()


def _texts(count: int) -> list[Tensor]:
    return [torch.randint(31, (3, 7)) for _ in range(count)]


def _preferences() -> tuple[nn.Module, Train]:
    chosen, rejected = _texts(2)
    return Tied(), lambda lp: (-F.logsigmoid(0.1 * (lp(chosen) - lp(rejected)))).backward()


def _three_calls() -> tuple[nn.Module, Train]:
    a, b, c = _texts(3)
    return Tied(), lambda lp: (lp(a) - lp(b) * lp(c)).backward()


def _real_and_fake() -> tuple[nn.Module, Train]:
    critic = nn.Sequential(spectral_norm(nn.Linear(9, 14)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(14, 1)))
    real, fake = torch.randn(5, 9), torch.randn(5, 9)
    bce = F.binary_cross_entropy_with_logits
    return critic, lambda d: (bce(d(real), torch.ones(5, 1)) + bce(d(fake), torch.zeros(5, 1))).backward()


def _recurrent() -> tuple[nn.Module, Train]:
    class Recurrent(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[0])
            for token in x:
                h = torch.tanh(super().forward(h) + token)
            return h.square().mean()

    x, y = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    return Recurrent(8, 8), lambda step: (step(x) + step(y)).backward()


def _penalty() -> tuple[nn.Module, Train]:
    model, (text,) = Tied(), _texts(1)
    return model, lambda lp: (-lp(text) + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()


def _inside_and_after() -> tuple[nn.Module, Train]:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    twice = nn.Sequential(block, block)  # this is compiled
    x = torch.randn(4, 8)
    return twice, lambda step: block(step(x)).square().sum().backward()


def _by_grad() -> tuple[nn.Module, Train]:
    model, (a, b) = Tied(), _texts(2)

    def train(lp: Step) -> None:
        weights = [model.embedding.weight]
        loss = lp(a) - lp(b)
        for keep in (True, False):
            (weights[0].grad,) = torch.autograd.grad(loss, weights, retain_graph=keep)

    return model, train


def _some_and_then_all() -> tuple[nn.Module, Train]:
    """The graph of a call serves a backward by itself and one with another call, and gradients accumulate."""
    a, b = _texts(2)

    def train(lp: Step) -> None:
        first = lp(a)
        first.backward(retain_graph=True)
        (first - lp(b)).backward()

    return Tied(), train


def _within_a_checkpoint() -> tuple[nn.Module, Train]:
    a, b = _texts(2)
    again = functools.partial(checkpoint, use_reentrant=False)
    return Tied(), lambda lp: (again(lp, a) - again(lp, b)).backward()


def _a_backward_within_a_backward() -> tuple[nn.Module, Train]:
    """Two calls within a region that is differentiated by a backward of its own, and one beside it."""
    (a, b, c), anchor = _texts(3), torch.ones((), requires_grad=True)

    def train(lp: Step) -> None:
        both = checkpoint(lambda scale: scale * (lp(a) - lp(b)), anchor, use_reentrant=True)
        (both + lp(c)).backward()

    return Tied(), train


PROGRAMS = [
    *(_preferences, _three_calls, pytest.param(_real_and_fake, marks=pytest.mark.slow), _recurrent, _penalty),
    *(_inside_and_after, _by_grad, _some_and_then_all, _within_a_checkpoint, _a_backward_within_a_backward),
]


def _left_by(model: nn.Module, step: Step, train: Train) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    state = copy.deepcopy(model.state_dict())
    train(step)
    left = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    left += [b.clone() for b in model.buffers()]
    model.load_state_dict(state)
    return left


def _compiled(step: Any, budget: int = 10**7) -> Any:
    return checkmate.compile(step, budget=budget, time_limit=0.3, profile="roofline:h100", cache=False)


class Noted(Exception):
    """What a step is called with."""


def note(*args: Any) -> Any:
    raise Noted(*args)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_plain_pytorch(program: Callable[[], tuple[nn.Module, Train]]) -> None:
    model, train = program()
    expected = _left_by(model, model, train)
    with pytest.raises(Noted) as noted:
        train(note)
    problem = checkmate.trace(model, *noted.value.args, profile="roofline:h100")
    for budget in (10**7, checkmate.min_budget(problem, time_limit=0.3).peak):
        compiled = _compiled(model, budget)
        for _ in range(2):
            assert_same_bits(_left_by(model, compiled, train), expected)


def test_inputs_that_are_no_leaves() -> None:
    """A hidden state that the step uses twice, and what comes after once more."""
    w = torch.randn(6, 6, requires_grad=True)
    x = torch.randn(4, 6)

    def step(h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(h @ w) * h + h.exp(), h  # what it is given comes back as it is

    def train(step: Step) -> Tensor:
        w.grad = None
        h = x @ w
        y, same = step(h)
        assert same is h
        (y.sum() + h.sin().sum() + same.cos().sum()).backward()
        return w.grad

    assert_same_bits([train(_compiled(step))], [train(step)])


def test_results_without_a_gradient() -> None:
    """Of the terms only some are defined: the others leave no trace."""
    w, v = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    x = torch.randn(3, 8)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w @ v @ w).sum(), (torch.tanh(x @ w) @ v @ w).exp().sum()

    def train(step: Step, used: tuple[int, ...]) -> list[Tensor]:
        results = step(x)
        return [*torch.autograd.grad(sum(results[i] for i in used) + step(2 * x)[0], [w, v])]

    compiled = _compiled(step)
    for used in [(0,), (1,), (0, 1)]:
        assert_same_bits(train(compiled, used), train(step, used))


def test_a_backward_by_itself_takes_the_memory_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "handing_over", None)  # nothing else may be asked for
    torch.manual_seed(0)
    model, (text,) = Tied(), _texts(1)
    least = checkmate.min_budget(checkmate.trace(model, text)).peak
    step: Any = checkmate.compile(model, budget=least, time_limit=1)
    step(text).backward()
    for _ in range(2):  # into no gradient, and into one that is there
        model.zero_grad()
        use = measure_peak(lambda: step(text).backward())
        assert use.peak + step.plans[0].problem.resident == step.plans[0].peak


def test_threads_have_backwards_of_their_own() -> None:
    model, (a, b) = Tied(), _texts(2)
    compiled = _compiled(model)

    def often(step: Step, both: bool) -> Any:
        return [torch.autograd.grad(step(a) - step(b) if both else step(a), [*model.parameters()]) for _ in range(5)]

    expected = [often(model, both) for both in (False, True)]
    assert_same_bits([often(compiled, both) for both in (False, True)], expected)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(often, [compiled] * 4, [False, True] * 2)]
    assert_same_bits(found, expected * 2)


def test_where_the_backward_began_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then contributions are handed over one by one, which is right in any case."""
    model, train = _preferences()
    expected = _left_by(model, model, train)
    compiled = _compiled(model)
    monkeypatch.setattr("checkmate.codegen.arrival_order._engine_frames", lambda frame: iter(()))
    assert_same_bits(_left_by(model, compiled, train), expected)


def _tanh_and_view(w: Tensor) -> tuple[Tensor, Tensor]:
    return (w.tanh() * w).exp().sum(), w.t()


def _view_used_twice(w: Tensor) -> tuple[Tensor, Tensor]:
    row = w.view(36)
    return (row * row.exp() * row.sin()).sum(), row


@pytest.mark.parametrize("step", [_tanh_and_view, _view_used_twice])
def test_views_of_inputs_among_the_results_are_refused_where_sums_would_differ(step: Step) -> None:
    w = torch.randn(6, 6, requires_grad=True)
    compiled = _compiled(step)
    assert_same_bits(torch.autograd.grad(compiled(w)[0], w), torch.autograd.grad(step(w)[0], w))
    with pytest.raises(checkmate.Unsupported, match=r"args.0 is used more than once within .* x.clone\(\)"):
        sum(r.sum() for r in compiled(w)).backward()


@pytest.mark.slow
def test_verify_calls_a_step_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (text,) = Tied(), _texts(1)
    options = {"budget": 10**7, "time_limit": 1, "profile": "roofline:h100"}
    report = checkmate.verify(model, text, calls=3, **options)
    assert (report.outputs, report.gradients, report.measured_peak) == (3, 3, None)
    assert "3 calls" in str(report)
    assert "not compared: a plan is for one call" in str(report)
    with pytest.raises(ValueError, match="1 or more, not 0"):
        checkmate.verify(model, text, calls=0, **options)
    monkeypatch.setattr(contributions, "verdicts", lambda fan: ())  # always the sum
    with pytest.raises(checkmate.VerificationError, match=r"gradient of embedding.weight.*differs"):
        checkmate.verify(model, text, calls=2, **options)


def test_ops_that_differentiate_when_they_are_measured() -> None:
    w = torch.randn(6, 6, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return (x @ w * w.max() @ w).exp().mean()

    x, compiled = torch.full((3, 6), 0.1), checkmate.compile(step, budget="1 MB", time_limit=1, cache=False)
    found, expected = (torch.autograd.grad(run(x) + run(2 * x), [w]) for run in (compiled, step))
    assert_same_bits(found, expected)


def test_inputs_in_one_memory_that_the_step_overwrites() -> None:
    """AOTAutograd takes their common base for them."""
    w = torch.randn(8, requires_grad=True)

    def step(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return (a * a.exp() * b.sin()).sum()

    def train(step: Step, other: bool) -> Sequence[Tensor]:
        base = w * 0.3
        loss = step(base[:6], base[2:])
        return torch.autograd.grad(loss + base.square().sum() if other else loss, [w])

    compiled = _compiled(step)
    for other in (False, True):
        assert_same_bits(train(compiled, other), train(step, other))


def test_where_the_inputs_are_unknown_nothing_may_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "sharing_of", lambda *args: Sharing(together=(UNKNOWN,)))
    torch.manual_seed(0)
    (model, train), (text,) = _penalty(), _texts(1)
    compiled = _compiled(model)

    alone: Train = lambda lp: lp(text).backward()  # noqa: E731
    assert_same_bits(_left_by(model, compiled, alone), _left_by(model, model, alone))
    with pytest.raises(checkmate.Unsupported, match=r"An input is used more than once within the compiled step"):
        _left_by(model, compiled, train)


def test_contributions_are_counted_as_they_come() -> None:
    """Not counted is what is not defined."""
    w, v = (torch.ones(3, requires_grad=True) for _ in range(2))

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    with counted_contributions() as counts:
        torch.autograd.grad([(w * w * v + Nothing.apply(v)).sum(), w.sum()], [v, w])
        torch.autograd.grad(w.sum(), [v, w], allow_unused=True)
    assert counts == [[1, 3], [1]]
    torch.autograd.grad(w.sum(), w)
    assert len(counts) == 2


@pytest.mark.parametrize(
    "within",
    [
        lambda x: torch.func.hessian(lambda u: u.pow(3).sum())(torch.ones(3)).sum() * x.sum(),
        lambda x: torch.func.vjp(torch.exp, torch.ones(3))[1](torch.ones(3))[0].sum() * x.sum(),
        lambda x: torch.func.jacfwd(torch.func.grad(lambda u: u.pow(3).sum()))(x).sum(),
    ],
    ids=["hessian", "vjp", "forward over reverse"],
)
def test_what_is_differentiated_within_the_step(within: Step) -> None:
    """Also where nothing of it needs a gradient. In forward mode some derivatives are zeros without memory."""
    found = []
    for step in (within, checkmate.compile(within, budget="1 GB", wait="best")):
        x = torch.tensor([0.5, -1.5, 2.5], requires_grad=True)
        loss = step(x)
        loss.backward()
        found.append((loss.detach(), x.grad))
    assert_same_bits(*found)


def test_the_terms_of_a_sum() -> None:
    graph = torch.fx.Graph()
    a, b, c = map(graph.placeholder, "abc")
    two = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
    three = graph.call_function(torch.ops.aten.add.Tensor, (two, c))
    scaled = graph.call_function(torch.ops.aten.add.Tensor, (a, b), {"alpha": 2})
    assert terms_of(three, 3) == [a, b, c]
    assert terms_of(three, 2) == [two, c]  # c may end in a formula that adds; what was counted decides
    assert terms_of(a, 1) == [a]
    assert terms_of(two, 3) is None
    assert terms_of(scaled, 2) is None
