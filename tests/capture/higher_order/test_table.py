"""Ops that run graphs which they are given: those that may run again do, with plain PyTorch's bits, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.compiler import nested_compile_region
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.capture.higher_order.table import AGAIN, runs_once
from checkmate.profiling.one_op import key_of
from checkmate.torch_internals.running import HigherOrderOperator
from tests.support.plainly import assert_as_plain, run_again, train_at_smallest_budget
from tests.support.sampling import long, slow

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, ROWS = 16, 64
Step = Callable[[nn.Module, Tensor], Tensor]


@torch.library.custom_op("checkmate_tests::add_sine", mutates_args=("total",))
def _add_sine(x: Tensor, total: Tensor) -> None:
    total += x.sin()


@torch.library.custom_op("checkmate_tests::draw", mutates_args=("to",), tags=(torch.Tag.nondeterministic_seeded,))
def _draw(to: Tensor) -> None:
    to.normal_()


class _Steps:
    """Steps of three layers, by the name of what each of these runs."""

    def cond(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (3 * x).tanh() * x, lambda x: x.sigmoid() + x.exp(), (layer(x),))

    def scan(layer: nn.Module, x: Tensor) -> Tensor:
        return scan(lambda h, x: ((h + x).tanh(), (h * x).sin()), torch.zeros(WIDTH), layer(x))[1]

    def map_impl(layer: nn.Module, x: Tensor) -> Tensor:
        return map_rows(lambda row: (row.sigmoid() * row).cumsum(0), layer(x))

    def auto_functionalized_v2(layer: nn.Module, x: Tensor) -> Tensor:
        h, total = layer(x), torch.zeros_like(x)
        _add_sine(h.detach(), total)
        return h * total

    def while_loop(layer: nn.Module, x: Tensor) -> Tensor:
        _, y = while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, (y * 0.5).sin()), (torch.zeros(()), x.detach()))
        return layer(y) * x

    def flex_attention(layer: nn.Module, x: Tensor) -> Tensor:
        heads = x.detach().view(1, 1, ROWS, WIDTH).expand(2, 4, ROWS, WIDTH)
        return layer(flex_attention(heads, heads, heads, score_mod=lambda s, b, h, i, j: s + h * (i - j)))[0, 0] * x


@nested_compile_region
def _region(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.nn.functional.dropout(torch.nn.functional.linear(x, w, b).tanh(), 0.5)
    return h * x, h.sum()


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sigmoid() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class _Taken:
    """Steps whose inner ops become ops of the step."""

    def invoke_subgraph(layer: nn.Module, x: Tensor) -> Tensor:
        return sum(_region(x, layer.weight, layer.bias))

    def tag_activation_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: (layer(x).tanh() * x).sin(), x, use_reentrant=False)

    def autograd_function_apply(layer: nn.Module, x: Tensor) -> Tensor:
        return _Gate.apply(layer(x).tanh() * x)


def _loss(layers: nn.ModuleList, x: Tensor, of_layer: Step) -> Tensor:
    for layer in layers:
        x = of_layer(layer, x)
    return x.sum()


def _model() -> tuple[nn.ModuleList, Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize(
    "name", ["map_impl", "auto_functionalized_v2", slow("cond"), *map(long, ("scan", "while_loop", "flex_attention"))]
)
def test_an_op_that_runs_graphs_runs_again(name: str) -> None:
    layers, x = _model()
    plan, peaks = train_at_smallest_budget(layers, partial(_loss, of_layer=getattr(_Steps, name)), x, target=name)
    assert name in run_again(plan)
    # either graph of a cond may run: the larger is planned; loops are not measured
    assert name in ("cond", "while_loop") or peaks == [plan.peak] * len(peaks)


@pytest.mark.parametrize(
    "name", ["invoke_subgraph", slow("tag_activation_checkpoint"), slow("autograd_function_apply")]
)
def test_what_only_holds_ops_together_is_taken_apart(name: str) -> None:
    layers, x = _model()
    target = "aten.mul.Tensor" if name == "autograd_function_apply" else "aten.tanh.default"
    plan, peaks = train_at_smallest_budget(layers, partial(_loss, of_layer=getattr(_Taken, name)), x, target=target)
    ops = plan.problem.graph.ops
    assert not [op.target for op in ops if not op.target.startswith(("aten.", "autograd", "checkmate."))]
    assert peaks == [plan.peak] * len(peaks)


def test_regions_within_regions_that_hold_constants_are_put_in_place() -> None:
    @nested_compile_region
    def inner(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0]).sum()

    @nested_compile_region
    def outer(x: Tensor) -> Tensor:
        return inner(inner(x).sin()) + torch.arange(4)

    run = assert_as_plain(lambda x: outer(outer(outer(x))).sum(), torch.randn(3, 4, requires_grad=True))
    assert {op.target.partition(".")[0] for op in run.plans[0].problem.graph.ops} == {"aten", "autograd"}


@pytest.mark.long
def test_measured_are_both_graphs_of_a_cond_within_a_graph() -> None:
    """Made-up numbers are positive, and lead to the smaller one."""

    def large(row: Tensor) -> Tensor:
        return (row[:, None, None] * row[None, :, None] * row).sum((0, 1))

    def mapped(layer: nn.Module, x: Tensor) -> Tensor:
        return map_rows(lambda r: torch.cond(r.sum() > 0, torch.sin, large, (r,)), layer(x))

    layers, x = _model()
    problem = checkmate.trace(lambda x: _loss(layers, x, mapped), x)
    of_maps = [k for k, op in enumerate(problem.graph.ops) if op.target == "map_impl" and op.phase == "forward"]
    assert min(int(problem.workspace[k]) for k in of_maps) >= 4 * WIDTH**3
    assert not {*of_maps} & {*problem.profile.estimated}


def _cond(body: Callable[[Tensor], Tensor]) -> fx.Node:
    """A `cond` of which one graph is that of a function."""
    other = make_fx(lambda x: x.sin())(torch.ones(3))
    root = nn.ModuleDict({"one": make_fx(body)(torch.ones(3)), "other": other})
    graph = fx.Graph(root)
    p, x = graph.placeholder("p"), graph.placeholder("x")
    graph.call_function(torch.ops.higher_order.cond, (p, graph.get_attr("one"), graph.get_attr("other"), (x,)))
    p.meta["val"], x.meta["val"] = torch.tensor(True), torch.ones(3)
    return next(n for n in fx.GraphModule(root, graph).graph.nodes if isinstance(n.target, HigherOrderOperator))


def test_what_a_graph_does_or_one_within_it_may_keep_it_from_running_again() -> None:
    drawing, nested = _cond(torch.bernoulli), _cond(lambda x: x)
    nested.graph.owning_module.one = drawing.graph.owning_module
    printed = fx.Graph().call_function(torch.ops.higher_order.print, ("here",))
    assert "print" not in AGAIN
    for node, reason in (
        (_cond(lambda x: x * 2), None),
        (drawing, "runs a graph that draws random numbers, by aten.bernoulli.default"),
        (_cond(lambda x: x.mul_(2)), "runs a graph that writes over a tensor, by aten.mul_.Tensor"),
        (_cond(lambda x: torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,))), None),
        (nested, "runs a graph that runs a graph that draws random numbers, by aten.bernoulli.default"),
        (printed, "runs print, which may leave other bits another time"),
    ):
        assert runs_once(node) == reason


def test_an_op_of_somebodys_that_draws_into_a_tensor_runs_once() -> None:
    def step(x: Tensor) -> Tensor:
        _draw(noise := torch.empty_like(x))
        return (x * noise).sum()

    (op,) = (op for op in checkmate.trace(step, torch.ones(4, requires_grad=True)).graph.ops if "auto_" in op.target)
    assert op.pinned == "draws random numbers, by checkmate_tests.draw.default"


def test_keys_tell_graphs_apart_and_hold_in_every_process() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    same, others = _cond(lambda y: y * 2), [_cond(lambda x: x * 3), _cond(lambda x: x + 2), _cond(lambda x: 2 * x * 2)]
    assert key_of(_cond(doubled)) == key_of(same)
    assert len({key_of(node) for node in (same, *others)}) == 4
    assert " at 0x" not in key_of(same)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")
def test_gradients_of_what_scores_read_are_summed_in_no_fixed_order_on_a_gpu() -> None:
    with torch.device("meta"):
        q, bias = torch.randn(1, 2, 128, 16, requires_grad=True), torch.randn(2, requires_grad=True)

    def reasons(learnt: Tensor) -> dict[str, str | None]:
        def step(q: Tensor) -> Tensor:
            return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + learnt[h]).sum()

        ops = checkmate.trace(step, q, profile="roofline:h100").graph.ops
        return {op.target: op.pinned for op in ops if op.target.startswith("flex")}

    unordered = "runs a graph that adds in no fixed order on a GPU, by flex_lib.zeros_and_scatter.default"
    assert reasons(bias.detach()) == {"flex_attention": None, "flex_attention_backward": None}
    assert reasons(bias) == {"flex_attention": None, "flex_attention_backward": unordered}
