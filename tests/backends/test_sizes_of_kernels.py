"""Steps whose groups of ops are kernels, at sizes that change: captures, compiles, bits and peaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import checkmate
from benchmarks.networks.gpt2 import GPT2
from checkmate.backends.compilation import Backend
from checkmate.capture.fusion import kernels
from checkmate.memory import measure_peak
from checkmate.profiling import trial
from tests.support.bits import assert_same_bits
from tests.support.kernels import compiles_from_now_on
from tests.support.stepping import left_by

LENGTHS = (24, 32, 17, 40, 9)
Made = tuple[nn.Module, Callable[..., Tensor]]


class _Gated(nn.Module):
    """Tokens, gated layers with dropout, and a loss."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.layers = layers
        self.embed, self.last, self.drop = nn.Embedding(50, width), nn.Linear(width, 50), nn.Dropout(0.1)
        self.gate, self.up = (nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        h = self.embed(tokens)
        for _ in range(self.layers):
            h = h + self.drop(self.down(F.relu(self.gate(h)) * self.up(h))) * scale
        return F.cross_entropy(self.last(h).flatten(0, 1), tokens.flatten())


def _gated() -> Made:
    net = _Gated(layers=1)
    return net, lambda tokens: net(tokens)


def _gpt2() -> Made:
    net = GPT2(vocabulary=50, positions=64, width=32, layers=1, heads=2, attention="sdpa")
    return net, lambda tokens: F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def _llama() -> Made:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    net = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False))

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = net(input_ids=tokens, labels=tokens).loss
        return out

    return net, loss


def _tokens(length: int, batch: int = 4) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(autouse=True)
def _one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give kernels one variant that writes over an argument, of two: each is compiled for a second."""
    monkeypatch.setattr(kernels, "WAYS", 1)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of Inductor from now on, when nothing is known."""
    monkeypatch.setattr(trial, "_known", {})
    return compiles_from_now_on(monkeypatch)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured from now on."""
    calls, really = list[Any](), Backend.compile
    monkeypatch.setattr(Backend, "compile", lambda *args: calls.append(args) or really(*args))
    return calls


def _fused(plan: Any) -> int:
    return sum(op.target.startswith("checkmate.fused") for op in plan.problem.graph.ops)


@pytest.mark.parametrize("made", [_gated, _llama, pytest.param(_gpt2, marks=pytest.mark.long)])
def test_a_third_length_compiles_nothing_and_has_the_bits_of_plain_pytorch_at_the_peak_of_its_plan(
    made: Callable[[], Made], compiles: list[Any], captures: list[Any]
) -> None:
    torch.manual_seed(0)
    net, loss = made()
    problem = checkmate.trace(loss, _tokens(max(LENGTHS)))
    budget = (checkmate.min_budget(problem).peak + 3 * problem.keep_all_peak) // 4
    step: Any = checkmate.compile(loss, budget=budget, kernels="same-bits", verify=False)
    captures.clear()
    for place, length in enumerate((*LENGTHS, 24, 33)):
        before = {id(plan) for plan in step._caches[0].plans}
        compiles.clear()
        tokens = _tokens(length)
        assert_same_bits(left_by(step, net, tokens), left_by(loss, net, tokens))
        assert bool(compiles) == (place < 2)
        for plan in [plan.plan for plan in step._caches[0].plans if id(plan) not in before]:

            def again(tokens: Tensor = tokens) -> None:
                step(tokens).backward()
                net.zero_grad()

            assert plan.problem.resident + measure_peak(again, torch.device("cpu")).peak == plan.peak <= budget
            assert _fused(plan)
    assert len(captures) == 2
    assert len(step._caches[0].steps) == 1


@pytest.mark.parametrize("order", [(48, 24, 32, 17, 48), (24, 32, 48, 17)])
def test_a_length_that_fits_op_by_op_only_runs_so(order: tuple[int, ...], captures: list[Any]) -> None:
    """A group holds all that it reads and makes at once: four results here, of which its ops hold one at a time."""
    weight = torch.randn(64, 64)

    def step(x: Tensor) -> Tensor:
        a, h = x @ weight, x
        for part in [a * k for k in (1.0, 2.0, 3.0, 4.0)]:
            h = h @ weight + torch.relu(part)
        return h.sum()

    inputs = {n: torch.randn(n, 64, requires_grad=True) for n in order}
    eager, same = (checkmate.trace(step, inputs[48], kernels=kernels) for kernels in ("eager", "same-bits"))
    least = checkmate.min_budget(eager).peak
    assert least < checkmate.min_budget(same).peak
    captures.clear()
    compiled: Any = checkmate.compile(step, budget=least, kernels="same-bits", verify=False)
    for length in order:
        x = inputs[length]
        mine, plain = compiled(x), step(x)
        assert_same_bits([mine, *torch.autograd.grad(mine, x)], [plain, *torch.autograd.grad(plain, x)])
    assert len(captures) == 2
    assert {bool(_fused(plan)) for plan in compiled.plans} == {True, False}
    assert all(plan.peak <= least for plan in compiled.plans)


def test_kernels_with_reductions_are_captured_for_each_length(captures: list[Any]) -> None:
    """Their sums may round otherwise at open sizes, and bits are to be the same whatever came before."""
    net = _Gated()
    step: Any = checkmate.compile(lambda tokens: net(tokens), budget="10 MB", kernels="fused", verify=False)
    for length in LENGTHS[:3]:
        step(_tokens(length)).backward()
    assert len(step._caches[0].steps) == 3
    assert len(captures) >= 3
