"""What a first call sets up is set up as plain PyTorch does, and the step is captured after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits

lock = threading.Lock()


@pytest.fixture(autouse=True)
def _forgotten(one_thread: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.inner = "long", nn.Linear(8, 8)

    def use(self, kind: str) -> None:
        if kind == self.kind:
            return
        self.kind = kind
        other = nn.Linear(8, 8)  # draws random numbers
        other.weight = self.inner.weight
        self.inner = other


class _Model(nn.Module):
    """Puts another part in place for short inputs, and hooks under a lock, at its first call."""

    def __init__(self, draws_first: bool = False, asks: bool = False) -> None:
        super().__init__()
        self.layers, self.seen = nn.ModuleList([_Layer(), _Layer()]), 0
        self.installed, self.draws_first, self.asks = False, draws_first, asks

    def use(self, kind: str) -> None:
        for layer in self.layers:
            layer.use(kind)

    def install(self) -> None:
        if self.installed:
            return
        with lock:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: output * 1.7)
            self.installed = True

    def forward(self, x: Tensor) -> Tensor:
        if self.draws_first:
            x = nn.functional.dropout(x)
        self.use("short" if len(x) < 10 else "long")
        self.install()
        for layer in self.layers:
            x = nn.functional.dropout(layer.inner(x).tanh())
        if self.asks and (x.sum() > 1e9).item():
            return x.sum()
        return x.square().sum()


def _two_steps(model: _Model, run: Callable[..., Tensor]) -> list[Any]:
    torch.manual_seed(3)
    found: list[Any] = []
    for _ in range(2):
        loss = run(torch.linspace(-1, 1, 32).view(4, 8))
        loss.backward()
        found += [loss.detach(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]
        found.append(torch.get_rng_state())
    return found


def _made(**options: bool) -> _Model:
    torch.manual_seed(0)
    return _Model(**options)


def test_the_bits_of_plain_pytorch_and_one_plan() -> None:
    plain, model = _made(), _made()
    expected = _two_steps(plain, plain)
    compiled = checkmate.compile(model, budget="1 MB", time_limit=0.3)

    assert_same_bits(_two_steps(model, compiled), expected)
    assert len(compiled.plans) == 1
    assert model.installed
    assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def _state(model: nn.Module) -> list[Any]:
    parts = [(part, {name: str(value) for name, value in vars(part).items()}) for part in model.modules()]
    return [*((id(part), values) for part, values in parts), *(id(p) for p in model.parameters())]


@pytest.mark.parametrize("options", [{"draws_first": True}, {"asks": True}])
def test_what_is_refused_all_the_same_leaves_the_model_as_it_was(options: dict[str, bool]) -> None:
    model = _made(**options)
    state, random_state = _state(model), torch.get_rng_state()
    with pytest.raises(Unsupported, match=r"A parameter that the step makes|asks for the value"):
        checkmate.compile(model, budget="1 MB")(torch.ones(4, 8))
    assert _state(model) == state
    assert_same_bits(torch.get_rng_state(), random_state)


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = _made()
    state, random_state = _state(model), torch.get_rng_state()
    checkmate.trace(model, torch.ones(4, 8))
    assert _state(model) == state
    assert_same_bits(torch.get_rng_state(), random_state)
