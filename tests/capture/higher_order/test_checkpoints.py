"""Where plain PyTorch updates buffers twice, or trains nothing, because of a checkpoint: said there, and only there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import checkmate
from checkmate.backends.tensor_state import differing
from checkmate.capture.higher_order import checkpoints
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, assert_refused

Run = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_said", set())


class _Averaging(nn.Linear):
    """Keeps an average of its outputs; ``weighs``: and weighs them with it."""

    average: Tensor

    def __init__(self, weighs: bool) -> None:
        super().__init__(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.weighs = weighs

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y * self.average if self.weighs else y


def _plainly(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


_checkpointed: Run = partial(checkpoint, use_reentrant=False)
_NORM = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
_TWO = nn.Sequential(_NORM, copy.deepcopy(_NORM))


@pytest.mark.parametrize(
    ("net", "run", "named"),
    [
        (_NORM, _checkpointed, "1 (BatchNorm1d"),
        (_NORM[:2], partial(checkpoint, use_reentrant=True), "1 (BatchNorm1d"),
        (_TWO, lambda net, x: net[1](_checkpointed(net[0], x)), "0.1 (BatchNorm1d"),
        (_Averaging(weighs=True), _checkpointed, "_Averaging"),
        (_NORM, _plainly, ""),
        (copy.deepcopy(_NORM).eval(), _checkpointed, ""),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)), _checkpointed, ""),
        (_Averaging(weighs=False), _checkpointed, ""),  # of its checkpoint plain PyTorch runs the beginning again
    ],
)
def test_it_is_said_where_plain_pytorch_updates_buffers_twice(
    net: nn.Module, run: Run, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    plain, without, ours = (copy.deepcopy(net) for _ in range(3))
    for model, forward in ((plain, run), (without, _plainly)):
        forward(model, x).square().sum().backward()
    compiled = checkmate.compile(lambda x: run(ours, x).square().sum(), budget="1 GB", profile="roofline:h100")
    with caplog.at_level(logging.WARNING, "checkmate.capture.higher_order.checkpoints"):
        compiled(x).backward()
        assert_same_bits([*ours.buffers()], [*without.buffers()])
        compiled(x[:2]).backward()  # captured again
    assert bool(differing([*plain.buffers()], [*without.buffers()])) == bool(named)
    assert len(caplog.records) == bool(named)  # once
    assert named in caplog.text
    assert ("updates them twice" in caplog.text) == bool(named)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("reentrant", "needs_gradient", "trains"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_it_is_said_where_plain_pytorch_trains_nothing_in_a_checkpoint(
    reentrant: bool, needs_gradient: bool, trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x, net, head = torch.randn(4, 8, requires_grad=needs_gradient), nn.Linear(8, 8), nn.Linear(8, 1)

    def step(x: Tensor) -> Tensor:
        return head(checkpoint(net, x, use_reentrant=reentrant)).sum()

    step(x).backward()
    assert (net.weight.grad is not None) == trains
    with caplog.at_level(logging.WARNING, "checkmate.capture.higher_order.checkpoints"):
        checkmate.compile(step, budget="1 GB", profile="roofline:h100")(x)
    for words in ("gives the parameters within no gradients", "test_checkpoints.py:"):
        assert (words in caplog.text) == (not trains)


_reentrant: Run = partial(checkpoint, use_reentrant=True)
_ONE, _OTHER, _WEIGHT = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Parameter(torch.ones(8))


def _one_twice(x: Tensor) -> Tensor:
    return _ONE(_ONE(x).tanh())


@pytest.mark.parametrize(
    "step",
    [
        lambda x: _reentrant(_ONE, _reentrant(_ONE, x)),
        lambda x: checkpoint(_ONE, checkpoint(_ONE, x)),
        lambda x: _ONE(_reentrant(_ONE, x)),
        lambda x: _reentrant(_ONE, _checkpointed(_ONE, x)),
        lambda x: _reentrant(lambda h: _reentrant(_ONE, _ONE(h)), x),
        lambda x: _checkpointed(lambda h: _reentrant(_ONE, _ONE(h)), x),
        lambda x: _reentrant(_ONE, jvp(_ONE, (x,), (x.sin(),))[1]),
        lambda x: _reentrant(_ONE, vmap(_ONE)(x)),
        lambda x: _reentrant(_ONE, grad(lambda u: _ONE(u).square().sum())(x)),
    ],
    ids=[
        *("two", "by default", "around", "one that is none", "within one", "within one that is none"),
        *("in a tangent", "in a batch", "in a gradient"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_what_reentrant_checkpoints_share_is_refused(step: Callable[[Tensor], Tensor]) -> None:
    """Plain PyTorch adds each use to ``.grad`` by itself, which shows in hooks, types and sums of steps."""
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(Unsupported, match=r"test_checkpoints.py:\d+.* shares _ONE.*use_reentrant=False"):
        checkmate.compile(lambda x: step(x).square().sum(), budget="1 GB", profile="roofline:h100")(x)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: _reentrant(_ONE, _reentrant(_OTHER, x)),
        lambda x: _reentrant(_one_twice, x),
        lambda x: _checkpointed(_ONE, _checkpointed(_ONE, x)),
        lambda x: _reentrant(lambda h, w: h * w, _reentrant(lambda h, w: h.sin() * w, x, _WEIGHT), _WEIGHT),
        lambda x: _reentrant(lambda h: _reentrant(_ONE, _OTHER(h)), x),
        lambda x: _reentrant(lambda h: _checkpointed(_one_twice, h), x),
        lambda x: _reentrant(_ONE, x) + _ONE(x).detach() * x,
    ],
    ids=["two layers", "twice in one", "none is", "as an argument", "within one", "none within one", "no gradient"],
)
@pytest.mark.parametrize("half", [False, True])
def test_what_one_reentrant_checkpoint_reaches_adds_up_as_plainly(step: Callable[[Tensor], Tensor], half: bool) -> None:
    """Over two batches, with hooks, in float32 and under autocast."""
    batches = torch.randn(2, 4, 8, requires_grad=True).unbind()
    parameters = [*_ONE.parameters(), *_OTHER.parameters(), _WEIGHT]

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return step(x).float().square().sum()

    def left_by(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        for parameter in parameters:
            parameter.grad = None
        hooks = [p.register_hook(lambda grad: grad.clamp(-0.5, 0.5) + 0.1) for p in parameters]
        for x in batches:
            run(x).backward(retain_graph=True)
        for hook in hooks:
            hook.remove()
        return [p.grad for p in parameters]

    run = checkmate.compile(loss, budget="1 GB", profile="roofline:h100")
    assert_same_bits(left_by(run), left_by(loss))


def test_how_much_of_a_checkpoint_runs_again_changes_nothing() -> None:
    x = torch.randn(4, 8, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return _checkpointed(_OTHER, x).sum()

    (expected,) = torch.autograd.grad(step(x), x)
    (gradient,) = torch.autograd.grad(checkmate.compile(step, budget="1 GB", profile="roofline:h100")(x), x)
    assert_same_bits(gradient, expected)


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
@pytest.mark.parametrize("times", [1, 2])
def test_a_reentrant_checkpoint_adds_to_its_argument_at_once(times: int) -> None:
    """Its own contributions are summed first, and other uses of the argument are added to that."""
    p = torch.randn(6, 6, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        v = p * x
        within = [checkpoint(lambda u: (u @ u.mT).exp() * u, v, use_reentrant=True).sum() for _ in range(times)]
        return sum(within) + v.square().sum()

    def gradient(step: Callable[[Tensor], Tensor]) -> Tensor:
        p.grad = None
        step(torch.full((), 0.3)).backward()
        assert p.grad is not None
        return p.grad

    assert_same_bits(gradient(checkmate.compile(step, budget="1 MB")), gradient(step))


@pytest.mark.parametrize("reentrant", [False, True])
def test_draws_that_a_checkpoint_makes_anew_are_refused(reentrant: bool) -> None:
    p = torch.randn(6, 6, requires_grad=True)

    def step(x: Tensor, preserve: bool) -> Tensor:
        options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        return checkpoint(lambda u: nn.functional.dropout(u, 0.5).exp(), p * x, **options).sum()

    assert_refused(step, torch.ones(()), False, words="preserve_rng_state=False draws other random numbers")
    if not reentrant:  # plain PyTorch has no torch.autograd.grad of a reentrant one
        assert_as_plain(step, torch.ones(()), True, leaves=[p])
