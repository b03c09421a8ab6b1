"""Updates in slices have the bits of the whole, in the workspace of a slice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import checkmate
from checkmate.memory import measure_peak
from checkmate.updates import optimizers
from checkmate.updates.optimizers import Update
from tests.support.bits import assert_same_bits
from tests.updates.test_optimizers import HAS

SIZES = [(5003,), (70, 71), (33, 3, 7, 7)]
ONCE = [setting for setting in HAS if not setting[1].get("fused")]


@pytest.mark.parametrize(("kind", "settings"), ONCE, ids=str)
def test_same_bits_as_the_whole(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of odd sizes, in any layout, states that are there and that are not; on one thread and on two."""
    monkeypatch.setattr(optimizers, "SLICE", 1024)
    torch.manual_seed(0)
    for size, dtype in [(size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)]:
        if kind == "Muon" and len(size) != 2:
            continue
        start = torch.randn(size).to(dtype)
        start = start.to(memory_format=torch.channels_last) if start.dim() == 4 else start
        ours, plain = start.clone().requires_grad_(), start.clone().requires_grad_()
        optimizer = getattr(optim, kind)([ours], **settings)
        expected = getattr(optim, kind)([plain], **settings)
        update = Update(optimizer, 0, ours)
        for _ in range(4):
            gradient = torch.randn_like(start)
            given, plain.grad = gradient.clone(), gradient.clone()
            update(given)
            expected.step()
            assert_same_bits(given, gradient)
            assert_same_bits(ours.detach(), plain.detach())
            one, other = optimizer.state_dict(), expected.state_dict()
            assert_same_bits(one, other)
            names = [[*state] for state in one["state"].values()]
            assert names == [[*state] for state in other["state"].values()]
            for name, what in expected.state.get(plain, {}).items():
                if isinstance(what, Tensor):
                    assert optimizer.state[ours][name].stride() == what.stride()
            if other["state"]:  # and go on from the other one's checkpoint
                optimizer.load_state_dict(copy.deepcopy(other))
                expected.load_state_dict(copy.deepcopy(one))


@pytest.mark.usefixtures("one_thread")
def test_a_large_embedding() -> None:
    """The peak of a step of AdamW is that of its forward and backward, from the first step on, as the plan says."""

    def loss_fn(x: Tensor) -> Tensor:
        return embedding(x).square().sum()

    torch.manual_seed(0)
    embedding = nn.Embedding(20_000, 128)
    size = embedding.weight.nbytes
    optimizer = optim.AdamW(embedding.parameters())
    step = checkmate.training_step(loss_fn, optimizer, budget="1 GB", time_limit=1.0)
    x = torch.arange(16)
    step(x)
    optimizer.state.clear()
    first = measure_peak(lambda: step(x)).peak
    second = measure_peak(lambda: step(x)).peak
    (plan,) = step.plans
    assert 0 <= plan.peak - plan.problem.resident - second < 64
    assert first <= second + 2 * size + 16  # its state is counted from the first step on
    assert second < 1.5 * size  # the gradient, and not two temporaries beside it
