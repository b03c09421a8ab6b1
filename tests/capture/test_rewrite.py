"""Rewrites of the joint graph change no bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from checkmate.capture import rewrite
from checkmate.capture.nodes import is_random
from checkmate.capture.random_draws import draw_mask
from checkmate.capture.rewrite import scale_mask
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, assert_refused, at_smallest_budget, train_as_plain
from tests.support.sampling import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "empty": lambda x: x[:0],
}


@in_turn(
    p=[0.1, 0.3, 0.37, 0.5, 0.9],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    layout=LAYOUTS,
)
def test_mask_and_noise_are_those_of_eager_dropout(p: float, dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(3, 5, 7, 9).to(dtype))
    torch.manual_seed(3)
    expected, state = F.dropout(x, p, training=True), torch.get_rng_state()
    torch.manual_seed(3)
    mask = draw_mask(x, 1 - p)
    assert_same_bits(torch.get_rng_state(), state)
    assert_same_bits(x * scale_mask(mask, 1 - p, dtype), expected)


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    graph = checkmate.trace(lambda x: F.dropout(x.sin(), 0.5).sum(), x).graph
    mask, noise = (next(op for op in graph.ops if name in op.target) for name in ("draw_mask", "scale_mask"))
    assert [graph.values[v].size_bytes for v in mask.outputs] == [64 * 64]
    assert mask.pinned
    assert not noise.pinned
    assert not any("native_dropout" in op.target for op in graph.ops)


def _unread(x: Tensor) -> Tensor:
    """Draws numbers that nobody reads; they are drawn all the same."""
    F.dropout(x, 0.5)
    torch.rand_like(x)
    return x.sum()


def _turned(x: Tensor) -> Tensor:
    """Tracing draws in logical order: each entry of a transposed tensor got the draw of another."""
    return (x * 2).t().contiguous().t()


def test_draws_are_those_of_plain_pytorch() -> None:
    for step in (
        _unread,
        lambda x: F.dropout(_turned(x), 0.3, inplace=True).square().sum(),
        lambda x: F.alpha_dropout(_turned(x), 0.3).square().sum(),
    ):
        assert_as_plain(step, torch.randn(6, 8, requires_grad=True))


def test_idle_views_are_read_through() -> None:
    weight = torch.randn(6, 6, requires_grad=True)
    problem = checkmate.trace(lambda x: torch.relu(x @ weight.t()).sum(), torch.randn(4, 6))
    targets = [str(n.target) for n in checkmate.solve(problem, "1 MB").modules.backward.graph.nodes]
    assert not [t for t in targets if "detach" in t]


CONVOLUTIONS = {
    "plain": (F.conv2d, (4, 8, 14, 15), (8, 8, 3, 3), {"padding": 1}),
    "of 1 x 1": (F.conv2d, (4, 8, 14, 15), (6, 8, 1, 1), {}),
    "with stride": (F.conv2d, (4, 8, 14, 15), (6, 8, 3, 3), {"stride": 2, "padding": 1}),
    "dilated": (F.conv2d, (4, 8, 14, 15), (6, 8, 3, 3), {"dilation": 2}),
    "in groups": (F.conv2d, (4, 8, 14, 15), (6, 4, 3, 3), {"groups": 2}),
    "depthwise": (F.conv2d, (4, 8, 14, 15), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
    "transposed": (F.conv_transpose2d, (4, 8, 14, 15), (8, 6, 2, 2), {"stride": 2}),
    "in one dimension": (F.conv1d, (4, 8, 30), (6, 8, 5), {}),
    "in three dimensions": (F.conv3d, (2, 4, 9, 8, 7), (6, 4, 3, 3, 3), {}),
    "of a wide weight": (F.conv2d, (1, 64, 4, 4), (64, 64, 3, 3), {"padding": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        *((kind, "contiguous", torch.float32) for kind in CONVOLUTIONS),
        ("plain", "channels-last", torch.float32),
        ("plain", "transposed", torch.float64),
        ("plain", "contiguous", torch.bfloat16),
        ("in groups", "channels-last", torch.bfloat16),
        ("transposed", "channels-last", torch.float32),
    ],
)
def test_a_split_convolution_has_the_same_bits(kind: str, layout: str, dtype: torch.dtype) -> None:
    convolve, shape, of_weight, options = CONVOLUTIONS[kind]
    x, *others = (torch.randn(one).to(dtype) for one in (shape, of_weight, *([6] if 6 in of_weight[:2] else [])))
    leaves = [leaf.requires_grad_() for leaf in (LAYOUTS[layout](x), *others)]

    def step(*leaves: Tensor) -> Tensor:
        return convolve(*leaves, **options).square().sum()

    problem = checkmate.trace(step, *leaves, profile="roofline:h100")
    assert sum("convolution_backward" in op.target for op in problem.graph.ops) == 2
    expected, found = (torch.autograd.grad(run(*leaves), leaves) for run in (step, at_smallest_budget(step, *leaves)))
    assert_same_bits(found, expected)
    assert [grad.stride() for grad in found] == [grad.stride() for grad in expected]


@pytest.mark.long
def test_of_a_split_convolution_the_smaller_gradient_is_first_and_the_peak_is_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def traced(images: int, channels: int) -> checkmate.Problem:
        shapes = (images, channels, 24, 24), (channels, channels, 3, 3)
        leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
        return checkmate.trace(lambda x, weight: F.conv2d(x, weight, padding=1).square().sum(), *leaves)

    def order(problem: checkmate.Problem) -> list[str]:
        return [op.name.rsplit("_", 1)[1] for op in problem.graph.ops if "convolution_backward" in op.target]

    large_images, large_weight = traced(8, 16), traced(1, 128)
    assert order(large_images) == ["weight", "input"]
    assert order(large_weight) == ["input", "weight"]
    monkeypatch.setattr(rewrite, "split_convolutions", lambda *_: None)
    assert checkmate.min_budget(large_images).peak < checkmate.min_budget(traced(8, 16)).peak
    assert checkmate.min_budget(large_weight).peak <= checkmate.min_budget(traced(1, 128)).peak


def test_statistics_of_batch_norm_are_not_saved() -> None:
    net = nn.BatchNorm1d(6)
    problem = checkmate.trace(lambda x: net(x).square().sum(), torch.randn(4, 6))
    backward = next(op for op in problem.graph.ops if "batch_norm_backward" in op.target)
    names = {problem.graph.values[v].name for v in backward.inputs}
    statistics = {f"{op.name}[{i}]" for op in problem.graph.ops if "batch_norm_legit" in op.target for i in (3, 4)}
    assert statistics
    assert not names & statistics


def test_buffers_are_written_in_one_call() -> None:
    net = nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(3)))
    graph = checkmate.trace(lambda x: net(x).square().sum(), torch.randn(4, 6)).graph
    (copy,) = [op for op in graph.ops if "copy_" in op.target]
    assert len(copy.inputs) == 2 * 9  # of each layer: mean, variance and the count of batches, old and new
    assert (copy.pinned or "").count(",") == 8


def _dropout_graph(device: str) -> fx.Graph:
    """Dropout forward and backward as AOTAutograd writes them, on a device that need not be there."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    dropout = graph.call_function(aten.native_dropout.default, (x, 0.25, True))
    y, mask = (graph.call_function(operator.getitem, (dropout, i)) for i in (0, 1))
    grad = graph.call_function(aten.native_dropout_backward.default, (tangent, mask, 1 / 0.75))
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(4, 6, dtype=torch.bool if node is mask else torch.float32, device=device)
    dropout.meta["val"] = y.meta["val"], mask.meta["val"]
    graph.output((y, grad))
    return graph


def test_on_cuda_dropout_is_one_kernel_and_stays() -> None:
    """The fused kernel draws from a stream of its own: the mask that it made is kept, and nothing draws again."""
    graph = _dropout_graph("cuda:0")
    before = [(n.op, n.target) for n in graph.nodes]
    rewrite.expose_dropout(graph)
    assert [(n.op, n.target) for n in graph.nodes] == before
    (dropout,) = graph.find_nodes(op="call_function", target=aten.native_dropout.default)
    assert is_random(dropout)
    rewrite.expose_dropout(graph := _dropout_graph("cpu"))
    assert not graph.find_nodes(op="call_function", target=aten.native_dropout.default)


@pytest.mark.parametrize(("kind", "p_at"), [("flash", 3), ("efficient", 5), ("cudnn", 5)])
def test_attention_on_cuda_is_random_only_with_dropout(kind: str, p_at: int) -> None:
    """Attention with dropout runs once; its seed and offset go to its backward as values."""
    op, graph = getattr(aten, f"_scaled_dot_product_{kind}_attention").default, fx.Graph()
    before = (graph.placeholder("q"),) * p_at
    for args, random in (((*before, 0.0), False), ((*before, 0.1), True), (before, False)):
        assert is_random(graph.call_function(op, args)) == random


def test_on_cuda_batch_norm_keeps_its_statistics() -> None:
    """The kernel there reads their type. On the CPU they change nothing: here they are kept there too."""
    graph = fx.Graph()
    with FakeTensorMode():
        grad, mean = graph.placeholder("tangents_1"), graph.placeholder("mean")
        grad.meta["val"], mean.meta["val"] = torch.empty(4, 6, device="cuda:0"), torch.empty(6, device="cuda:0")
    args = (grad, grad, *[mean] * 5, True, 1e-5, [True] * 3)
    backward = graph.call_function(aten.native_batch_norm_backward.default, args)
    rewrite.forget_running_statistics(graph)
    assert backward.args == args


def test_batch_norm_that_keeps_its_statistics_runs_again_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "forget_running_statistics", lambda graph: None)
    net = nn.Sequential(*(layer for _ in "123" for layer in (nn.BatchNorm1d(9), nn.Tanh())))
    again: dict[str, Any] = {"budget": "1 MB", "rules": {"aten._native_batch_norm_legit_functional": "recompute"}}
    plan, _ = train_as_plain(net, lambda net, x: net(x).square().sum(), torch.randn(64, 9), **again)
    assert any("batch_norm" in name for name in plan.modules.again)


def test_draws_that_tracing_would_change_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"test_rewrite.py:\d+.*rrelu.*contiguous"):
        checkmate.trace(lambda x: F.rrelu(x.t() * 2, training=True).sum(), torch.randn(6, 8, requires_grad=True))


MASKED = {"rows": ((2, 3), (4,), 0), "columns": ((3,), (1, 4), 1), "elements": ((2, 3, 4), (), 0)}


@pytest.mark.parametrize("name", MASKED)
def test_the_gradient_of_what_is_put_where_a_mask_is(name: str) -> None:
    """Its size depends on data in plain PyTorch; the bytes are those of a mask that selects all."""
    shape, token, before = MASKED[name]
    weight, value = leaves = torch.randn(2, 3, 4).requires_grad_(), torch.randn(token).requires_grad_()

    def step(x: Tensor, mask: Tensor) -> Tensor:
        y = x * weight
        y[(slice(None),) * before + (mask,)] = value
        return y.exp().sum()

    run = checkmate.compile(step, budget="1 MB", time_limit=1)
    for share in (0.5, -1.0, 1.0):
        batch = torch.randn(2, 3, 4), torch.rand(shape) <= share
        assert_as_plain(step, *batch, run=run, leaves=leaves)
        (plan,) = run.plans
        use = measure_peak(lambda batch=batch: torch.autograd.grad(run(*batch), leaves))
        assert use.peak == plan.peak - plan.problem.resident


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_sum_of_what_is_selected_takes_the_bytes_of_all(share: float) -> None:
    x, mask = torch.rand(30, 20, 2), torch.rand(30, 20) < share
    found = measure_peak(lambda: rewrite.sum_of_selected(x, mask, 0, [0], True))
    assert found.peak == 30 * 20 * (2 * 8 + 2 * 4)
    assert_same_bits(rewrite.sum_of_selected(x, mask, 0, [0], True), x[mask].sum(0, keepdim=True))


@pytest.mark.parametrize("call", [torch.ormqr, torch.Tensor.ormqr])
def test_the_gradient_of_complex_ormqr_is_refused_and_householder_products_are_not(call: Any) -> None:
    x, tau, other = (torch.randn(n, dtype=torch.cfloat, requires_grad=n == (5, 3)) for n in ((5, 3), (3,), (5, 4)))
    assert_refused(lambda: call(x * 1.5, tau, other).abs().sum(), words="householder_product")

    def product(x: Tensor) -> Tensor:
        return (torch.linalg.householder_product(x * 1.5, tau) @ other[:3]).abs().square().sum()

    assert_as_plain(product, x)


def test_half_precision_complex_numbers_are_captured_contiguous_only() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.cfloat, requires_grad=True)

    def step(x: Tensor, layout: torch.memory_format) -> Tensor:
        return torch.view_as_real((x * x).chalf(memory_format=layout)).square().sum().float()

    assert_as_plain(lambda x: step(x, torch.contiguous_format), x)
    assert_refused(lambda x: step(x, torch.channels_last), x, words="complex32 that is not contiguous")
