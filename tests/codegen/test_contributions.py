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
from checkmate.codegen.contributions import UNKNOWN, Sharing, noted_arrivals, terms_of
from checkmate.errors import Unsupported, VerificationError
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_alike, assert_as_plain, compiled

Step = Callable[..., Any]
Train = Callable[[nn.Module, Step], None]


class Tied(nn.Module):
    """A language model whose embedding is its head, and the log-probability of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 12)
        self.body = nn.Linear(12, 12)

    def forward(self, text: Tensor) -> Tensor:
        logits = F.linear(torch.tanh(self.body(self.embedding(text))), self.embedding.weight)
        return logits.log_softmax(-1).gather(-1, text.roll(-1, 1)[..., None]).sum()


class Recurrent(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for token in x:
            h = torch.tanh(super().forward(h) + token)
        return h.square().mean()


def _critic() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(9, 14)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(14, 1)))


def _same_block_twice() -> nn.Module:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(block, block)


def _by_grad(model: nn.Module, lp: Step) -> None:
    weight = model.embedding.weight
    loss = lp(A) - lp(B)
    for keep in (True, False):
        (weight.grad,) = torch.autograd.grad(loss, [weight], retain_graph=keep)


def _some_and_then_all(model: nn.Module, lp: Step) -> None:
    """The graph of a call serves a backward by itself and one with another call, and gradients accumulate."""
    first = lp(A)
    first.backward(retain_graph=True)
    (first - lp(B)).backward()


def _a_backward_within_a_backward(model: nn.Module, lp: Step) -> None:
    """Two calls within a region that is differentiated by a backward of its own, and one beside it."""
    anchor = torch.ones((), requires_grad=True)
    both = checkpoint(lambda scale: scale * (lp(A) - lp(B)), anchor, use_reentrant=True)
    (both + lp(C)).backward()


DRAW = torch.Generator().manual_seed(0)
A, B, C = (torch.randint(31, (3, 7), generator=DRAW) for _ in range(3))  # texts
REAL, FAKE = (torch.randn(5, 9, generator=DRAW) for _ in range(2))
ONES = torch.ones(5, 1)
X, Y = (torch.randn(4, 3, 8, generator=DRAW) for _ in range(2))  # series
bce, again = F.binary_cross_entropy_with_logits, functools.partial(checkpoint, use_reentrant=False)
# The model, and how it is trained by a step, which is the model or what it is compiled to
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Train]] = {
    "preferences": (Tied, lambda _, lp: (-F.logsigmoid(0.1 * (lp(A) - lp(B)))).backward()),
    "three calls": (Tied, lambda _, lp: (lp(A) - lp(B) * lp(C)).backward()),
    "real and fake": (_critic, lambda _, d: (bce(d(REAL), ONES) + bce(d(FAKE), 0 * ONES)).backward()),
    "recurrent": (lambda: Recurrent(8, 8), lambda _, step: (step(X) + step(Y)).backward()),
    "penalty": (
        Tied,
        lambda model, lp: (-lp(A) + 0.01 * sum(p.square().sum() for p in model.parameters())).backward(),
    ),
    "inside and after": (_same_block_twice, lambda twice, step: twice[0](step(X)).square().sum().backward()),
    "by grad": (Tied, _by_grad),
    "some and then all": (Tied, _some_and_then_all),
    "within a checkpoint": (Tied, lambda _, lp: (again(lp, A) - again(lp, B)).backward()),
    "a backward within a backward": (Tied, _a_backward_within_a_backward),
}


def _left_by(model: nn.Module, step: Step, train: Train) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    state = copy.deepcopy(model.state_dict())
    train(model, step)
    left = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    left += [b.clone() for b in model.buffers()]
    model.load_state_dict(state)
    return left


_compiled = functools.partial(compiled, time_limit=0.3, cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_plain_pytorch(name: str) -> None:
    make, train = PROGRAMS[name]
    model = make()

    def twice(run: Step) -> list[list[Tensor]]:
        return [_left_by(model, run, train) for _ in range(2)]

    ample = _compiled(model)
    expected = assert_alike(twice, model, ample)
    least = checkmate.min_budget(ample.plans[0].problem, time_limit=0.3).peak
    assert_same_bits(twice(_compiled(model, budget=least)), expected)


def test_a_step_with_an_op_that_is_kept_in_order() -> None:
    """A token of effects is an input of the graph, of which autograd's node knows nothing."""
    weight = nn.Parameter(torch.eye(4) + 0.1)

    def step(x: Tensor) -> Tensor:
        pivots = torch.linalg.ldl_factor(weight @ weight.mT)[1]
        return torch.linalg.ldl_factor(x @ x.mT)[0].sum() * (weight * x).square().sum() + pivots.sum()

    assert_as_plain(step, torch.ones(4, 4).tril(), leaves=[weight])


def test_inputs_that_are_no_leaves() -> None:
    """A hidden state that the step uses twice, and what comes after once more."""
    w = torch.randn(6, 6, requires_grad=True)
    x = torch.randn(4, 6)

    def step(h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(h @ w) * h + h.exp(), h  # what it is given comes back as it is

    def train(step: Step) -> Tensor | None:
        w.grad = None
        h = x @ w
        y, same = step(h)
        assert same is h
        (y.sum() + h.sin().sum() + same.cos().sum()).backward()
        return w.grad

    assert_alike(train, _compiled(step), step)


def test_results_without_a_gradient() -> None:
    """Only some of the terms are defined: the others leave no trace."""
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
    model = Tied()
    least = checkmate.min_budget(checkmate.trace(model, A)).peak
    step: Any = checkmate.compile(model, budget=least, time_limit=1)
    step(A).backward()
    for _ in range(2):  # into no gradient, and into one that is there
        model.zero_grad()
        use = measure_peak(lambda: step(A).backward())
        assert use.peak + step.plans[0].problem.resident == step.plans[0].peak


def test_threads_have_backwards_of_their_own() -> None:
    model = Tied()
    compiled = _compiled(model)

    def often(step: Step, both: bool) -> Any:
        return [torch.autograd.grad(step(A) - step(B) if both else step(A), [*model.parameters()]) for _ in range(5)]

    expected = assert_alike(lambda run: [often(run, both) for both in (False, True)], model, compiled)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(often, [compiled] * 4, [False, True] * 2)]
    assert_same_bits(found, expected * 2)


def test_where_the_backward_began_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then contributions are handed over one by one, which is right in any case."""
    model, (_, train) = Tied(), PROGRAMS["preferences"]
    compiled = _compiled(model)
    monkeypatch.setattr("checkmate.codegen.contributions._beginnings", lambda: iter(()))
    assert_alike(lambda run: _left_by(model, run, train), model, compiled)


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
    with pytest.raises(Unsupported, match=r"args.0 is used more than once within .* x.clone\(\)"):
        sum(r.sum() for r in compiled(w)).backward()


@pytest.mark.slow
def test_verify_calls_a_step_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = Tied(), {"budget": 10**7, "time_limit": 1, "profile": "roofline:h100"}
    report = checkmate.verify(model, A, calls=3, **options)
    assert (report.outputs, report.gradients, report.measured_peak) == (3, 3, None)
    assert "3 calls" in str(report)
    assert "not compared: a plan is for one call" in str(report)
    with pytest.raises(ValueError, match="1 or more, not 0"):
        checkmate.verify(model, A, calls=0, **options)
    monkeypatch.setattr(contributions, "verdicts", lambda fan: ())  # always the sum
    with pytest.raises(VerificationError, match=r"gradient of embedding.weight.*differs"):
        checkmate.verify(model, A, calls=2, **options)


def test_ops_that_differentiate_when_they_are_measured() -> None:
    w = torch.randn(6, 6, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return (x @ w * w.max() @ w).exp().mean()

    x = torch.full((3, 6), 0.1)
    assert_alike(lambda run: torch.autograd.grad(run(x) + run(2 * x), [w]), _compiled(step, profile="measure"), step)


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
    model, (_, train) = Tied(), PROGRAMS["penalty"]
    compiled = _compiled(model)
    assert_alike(lambda run: _left_by(model, run, lambda _, lp: lp(A).backward()), compiled, model)
    with pytest.raises(Unsupported, match=r"An input is used more than once within the compiled step"):
        _left_by(model, compiled, train)


def test_gradients_are_noted_as_they_come() -> None:
    """Undefined ones are not counted, and have no place."""
    w, v = (torch.ones(3, requires_grad=True) for _ in range(2))

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    with noted_arrivals() as arrived:
        torch.autograd.grad([(w * w * v + Nothing.apply(v)).sum(), w.sum()], [v, w])
        torch.autograd.grad(w.sum(), [v, w], allow_unused=True)
    assert [[arrival[:2] for arrival in call] for call in arrived] == [[(1, 0), (3, 1)], [(0, None), (1, 0)]]
    torch.autograd.grad(w.sum(), w)
    assert len(arrived) == 2


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
    assert_as_plain(within, torch.tensor([0.5, -1.5, 2.5], requires_grad=True), profile="measure")


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
