"""What is said of a step before any training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits


def made() -> tuple[nn.Sequential, Tensor]:
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    return net, torch.randn(24, 16)


@pytest.mark.slow
def test_a_step_that_can_be_planned() -> None:
    """Attention with dropout hands its saved tensors to a backward of its own: what every plan holds."""
    net, x = made()

    def step(x: Tensor) -> Tensor:
        q = net[:4](x).view(1, 4, 24, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum()

    found, problem = checkmate.explain(step, x), checkmate.trace(step, x)
    assert found.can_be_planned
    assert found.problem.keep_all_peak == problem.keep_all_peak
    assert found.smallest.peak == checkmate.min_budget(problem).peak
    assert 0 < found.held_bytes <= found.smallest.peak - found.problem.resident
    assert any("overwrites" in row.why for row in found.pinned)
    (mask,) = [row for row in found.pinned if row.where.startswith("3 (Dropout, test_explanation.py:")]
    assert (mask.why, mask.output_bytes) == ("draws random numbers", 24 * 32)  # one byte an element
    assert {row.name for row in found.pinned} == {op.name for op in problem.graph.ops if op.pinned}


def test_all_graph_breaks_are_named_and_nothing_changes() -> None:
    net, x = made()

    def broken(x: Tensor) -> Tensor:
        h = net[1](net[0](x))
        if h.sum() > 0:
            h = h * 2
        torch._dynamo.graph_break()
        return net[4](F.dropout(h)).sum()

    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    found = checkmate.explain(broken, x)
    assert not found.can_be_planned
    assert "Cannot capture" in found.reason
    places = [place.where for place in found.breaks]
    assert any("if h.sum() > 0" in place for place in places)
    assert any("torch._dynamo.graph_break()" in place for place in places)
    assert all("test_explanation.py" in place for place in places)
    assert "graph breaks" in repr(found)
    assert_same_bits(net.state_dict(), before)
    assert_same_bits(torch.get_rng_state(), state)


def test_what_needs_no_gradient_and_what_does_not_run() -> None:
    net, x = made()
    assert "no_grad" in checkmate.explain(lambda x: x * 2, x).reason
    assert "shapes cannot be multiplied" in checkmate.explain(net, x[:, :3]).reason


def test_without_data() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(5000, 5000), nn.Dropout(0.5)), torch.ones(8, 5000)
    found = checkmate.explain(model, x, profile="roofline:laptop")
    assert found.can_be_planned
    assert not checkmate.explain(lambda x: model(x) * x.sum().item(), x, profile="roofline:laptop").breaks
