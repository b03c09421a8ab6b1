"""Rewrites of the joint graph change no bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import checkmate
from checkmate.rewrite import draw_mask, scale_mask


@pytest.mark.parametrize("p", [0.1, 0.3, 0.37, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "channels-last", "transposed", "empty"])
def test_mask_and_noise_are_those_of_eager_dropout(p: float, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(0 if layout == "empty" else 3, 5, 7, 9).to(dtype)
    if layout == "channels-last":
        x = x.to(memory_format=torch.channels_last)
    if layout == "transposed":
        x = x.transpose(1, 3)
    torch.manual_seed(3)
    expected, state = F.dropout(x, p, training=True), torch.get_rng_state()
    torch.manual_seed(3)
    mask = draw_mask(x, 1 - p)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x * scale_mask(mask, 1 - p, dtype), expected)


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    graph = checkmate.trace(lambda x: F.dropout(x.sin(), 0.5).sum(), x).graph
    mask = next(op for op in graph.ops if "draw_mask" in op.target)
    noise = next(op for op in graph.ops if "scale_mask" in op.target)
    assert [graph.values[v].size_bytes for v in mask.outputs] == [64 * 64]
    assert mask.pinned
    assert not noise.pinned
    assert not any("native_dropout" in op.target for op in graph.ops)


def test_random_numbers_that_nobody_reads_are_drawn_all_the_same() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        F.dropout(x, 0.5)
        torch.rand_like(x)
        return (weight * x).sum()

    x = torch.randn(3)
    compiled = checkmate.compile(step, budget="1 MB")
    torch.manual_seed(0)
    compiled(x)
    found = torch.rand(1)
    torch.manual_seed(0)
    step(x)
    assert torch.equal(found, torch.rand(1))


def test_idle_views_are_read_through() -> None:
    weight = torch.randn(6, 6, requires_grad=True)
    problem = checkmate.trace(lambda x: torch.relu(x @ weight.t()).sum(), torch.randn(4, 6))
    targets = [str(n.target) for n in checkmate.solve(problem, "1 MB").modules.backward.graph.nodes]
    assert not [t for t in targets if "detach" in t]


def test_statistics_of_batch_norm_are_not_saved() -> None:
    net = torch.nn.BatchNorm1d(6)
    problem = checkmate.trace(lambda x: net(x).square().sum(), torch.randn(4, 6))
    backward = next(op for op in problem.graph.ops if "batch_norm_backward" in op.target)
    names = {problem.graph.values[v].name for v in backward.inputs}
    statistics = {f"{op.name}[{i}]" for op in problem.graph.ops if "batch_norm_legit" in op.target for i in (3, 4)}
    assert statistics
    assert not names & statistics


def test_buffers_are_written_in_one_call() -> None:
    net = torch.nn.Sequential(*(torch.nn.BatchNorm1d(6) for _ in range(3)))
    graph = checkmate.trace(lambda x: net(x).square().sum(), torch.randn(4, 6)).graph
    (copy,) = [op for op in graph.ops if "copy_" in op.target]
    assert len(copy.inputs) == 2 * 9  # of each layer: mean, variance and the count of batches, old and new
    assert (copy.pinned or "").count(",") == 8
