"""Only what leaves the same bits, in the very memory of its argument, is a way; and it is kept with the costs.

What costs of another place say of ops that run block by block is tried before it runs here. A convolution's backward is
taken apart where a trial leaves the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import checkmate
from checkmate.capture.inplace import kernels, rules
from checkmate.capture.inplace.rules import TABLE, Written
from checkmate.memory import measure_peak
from checkmate.profiling import cost_cache, trial
from checkmate.profiling import measure as measuring
from checkmate.profiling.cost_cache import OpCost
from checkmate.profiling.measure import export, measure_ops
from checkmate.profiling.trial import same_in_two
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn

aten = torch.ops.aten
N = 3 * trial.LENGTH + 5
NORM = aten.native_batch_norm_backward.default
pytestmark = pytest.mark.usefixtures("nothing_known")


def _node(op: Any, *args: Any) -> fx.Node:
    graph = fx.Graph()

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = leaf
        return node

    node = graph.call_function(op, tuple(map(placeholder, args)))
    node.meta["val"] = op(*args)
    return node


def _measure(node: fx.Node) -> OpCost:
    ((_, cost),) = measure_ops({0: node})
    return cost


WRONG: dict[str, Callable[[Tensor], Any]] = {  # in place of abs
    "sign of zero": lambda out: out.copy_(torch.where(out == 0, out, out.abs())),
    "denormals": lambda out: out.copy_(torch.where(out.abs() < 1e-37, 0.0, out.abs())),
    "not a number": lambda out: out.copy_(torch.where(out.isnan(), -out.abs(), out.abs())),
    "infinity": lambda out: out.abs_().clamp_(max=torch.finfo(out.dtype).max),
    "last bit": lambda out: (out.abs_(), out.view(torch.int32)[-1:].bitwise_xor_(1), out)[2],
    "elsewhere": lambda out: out.abs(),
    "nothing": lambda out: None,
    "shorter": lambda out: out.abs_()[:-1],
    "error": lambda out: out.view(7, 7),
}


@in_turn(wrong=WRONG)
def test_what_differs_in_any_way_is_not_offered(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Written(lambda x, *, out: WRONG[wrong](out), (0,))
    monkeypatch.setattr(rules, "TABLE", {**TABLE, aten.abs.default: over})
    assert _measure(_node(aten.abs.default, torch.ones(N))).over == {0: None}


def test_what_differs_on_usual_numbers_only_is_not_offered_where_elements_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something special spreads, a result may be nothing but NaN."""

    def over(x: Tensor, dim: int, half: bool, *, out: Tensor) -> Tensor:
        aten._softmax.out(x, dim, half, out=out)
        return out if out.isnan().any() else out.mul_(1 + 2e-7)

    monkeypatch.setattr(rules, "TABLE", {**TABLE, aten._softmax.default: Written(over, (0,), pointwise=False)})
    assert _measure(_node(aten._softmax.default, torch.ones(8, 30), 1, False)).over == {0: None}


def test_an_op_is_tried_over_each_argument_and_its_bytes_are_counted() -> None:
    x, y = torch.ones(N), torch.ones(N)
    cost = _measure(_node(aten.mul.Tensor, x, y))
    assert (cost.allocated_bytes, cost.over) == (4 * N, {0: 0, 1: 0})
    assert _measure(_node(aten.mul.Tensor, x, torch.ones(()))).over == {0: 0}
    assert _measure(_node(aten.mm.default, torch.ones(8, 8), torch.ones(8, 8))).over == {}
    cost = _measure(_node(aten._safe_softmax.default, torch.ones(64, 96), 1))
    assert cost.over == {0: 64 * 96 + 64}  # where it is -inf, and in which rows
    assert cost.allocated_bytes >= 64 * 96 * 4


def test_two_arguments_meet_in_all_special_numbers() -> None:
    x, y = torch.empty(N), torch.empty(N)
    trial._fill(x, "special", 0)
    trial._fill(y, "special", 1)
    kinds = [torch.isnan, torch.isposinf, torch.isneginf, lambda t: (t == 0) & t.signbit(), lambda t: t == 1]
    kinds += [lambda t: (t == 0) & ~t.signbit(), lambda t: (t != 0) & (t.abs() < 1e-38), lambda t: t.abs() > 3e38]
    assert all((a(x) & b(y)).any() for a in kinds for b in kinds)
    assert all((a(x[trial.SPECIAL :])).any() for a in kinds[3:4] + kinds[5:7])
    assert torch.isfinite(x[trial.SPECIAL :]).all()


IMAGES = torch.randn(4, 3, 8, 8)


def step_of_images() -> Callable[[Tensor], Tensor]:
    """A convolution and a batch norm."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8))
    return lambda x: F.cross_entropy(net(x), torch.zeros(4, dtype=torch.int64, device=x.device))


def _ways(problem: checkmate.Problem) -> list[tuple[str, str, int]]:
    """Op, value that it writes over, workspace."""
    graph = problem.graph
    return sorted((graph.ops[w.op].target, graph.values[w.over].name, w.workspace) for w in problem.profile.ways)


@pytest.mark.slow
def test_ways_come_with_measured_costs_and_go_wherever_these_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, x = step_of_images(), IMAGES
    problem = checkmate.trace(step, x)
    expected = _ways(problem)
    targets = [target for target, _, _ in expected]
    assert targets.count("aten.relu.default") == 1
    assert targets.count("aten.threshold_backward.default") == 2  # the gradient, or what the forward rectified
    (norm,) = (w for w in problem.profile.ways if "batch_norm_legit" in problem.graph.ops[w.op].target)
    assert problem.graph.values[norm.over].name == "convolution"
    assert norm.workspace == problem.workspace[norm.op]  # statistics are outputs of its own, as of the plain op
    monkeypatch.setattr(measuring, "measure_ops", lambda *_: pytest.fail("they are known"))
    assert _ways(checkmate.trace(step, x)) == expected  # from the process
    monkeypatch.setattr(cost_cache, "_known", {})
    assert _ways(checkmate.trace(step, x)) == expected  # from disk
    export(tmp_path / "ops.json")
    assert _ways(checkmate.trace(step, x, profile=tmp_path / "ops.json")) == expected
    assert _ways(checkmate.trace(step, x, profile=problem.profile)) == expected
    problem.to_json(tmp_path / "problem.json")
    assert _ways(checkmate.Problem.from_json(tmp_path / "problem.json")) == expected
    estimated = _ways(checkmate.trace(step, x, profile="roofline:laptop"))
    assert {way[:2] for way in estimated} >= {way[:2] for way in expected}
    block = 3 * 4 * 4 * 6 * 6  # bytes: of one channel of four images, twice what the op reads and once what it makes
    assert {(way[0], way[2]) for way in estimated if way[2]} == {(str(NORM), block)}


def test_files_of_before_ways_have_none_and_are_measured_again_where_they_are_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, x, path = step_of_images(), IMAGES, tmp_path / "ops.json"
    expected = _ways(checkmate.trace(step, x))
    export(path)
    document = json.loads(path.read_text())
    document |= {"version": 1, "ops": {key: cost and cost[:2] for key, cost in document["ops"].items()}}
    path.write_text(json.dumps(document))
    assert _ways(checkmate.trace(step, x, profile=path)) == []
    conditions = cost_cache.conditions_on(torch.device("cpu"))
    known = cost_cache.load(conditions)
    cost_cache.store(conditions, {key: cost and replace(cost, over={}) for key, cost in known.items()})
    monkeypatch.setattr(cost_cache, "_known", {})
    measured: list[str] = []

    def noting(nodes: dict[Any, fx.Node], known: Any) -> Any:
        measured.extend(str(node.target) for node in nodes.values())
        return measure_ops(nodes, known)

    monkeypatch.setattr(measuring, "measure_ops", noting)
    assert _ways(checkmate.trace(step, x)) == expected
    assert "aten.relu.default" in measured
    assert "aten.convolution.default" not in measured


def test_on_cuda_ways_are_tried_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the CPU in its place: what is not PyTorch's on CUDA is the same code."""
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(measuring, "allocated_bytes", lambda run, device: measure_peak(run).peak)
    monkeypatch.setattr(measuring, "time_on_accelerator", lambda run, device: 1.0)
    node = _node(aten._safe_softmax.default, torch.ones(64, 96), 1)
    cost = measuring._measure_on_accelerator(node, None)
    assert cost == replace(_measure(node), seconds=1.0)
    assert cost.over == {0: 64 * 96 + 64}


def _slower(problem: checkmate.Problem) -> set[str]:
    return {problem.graph.ops[way.op].target for way in problem.profile.ways if way.slower}


@pytest.mark.slow
def test_what_leaves_other_bits_here_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    step, estimate = step_of_images(), "roofline:laptop"
    good = checkmate.trace(step, IMAGES, profile=estimate)
    assert _slower(good) == {str(NORM)}

    def last_bit(*args: Any, out: Tensor) -> Any:
        made = kernels.batch_norm_backward_over(*args, out=out)
        out.view(torch.int32)[-1, -1] ^= 1
        return made

    monkeypatch.setattr(rules, "TABLE", {**TABLE, NORM: replace(TABLE[NORM], into=last_bit)})
    assert _slower(checkmate.trace(step, IMAGES, profile=estimate)) == _slower(good)  # it has been tried
    trial._known.clear()
    found = checkmate.trace(step, IMAGES, profile=estimate)
    assert _slower(found) == set()
    assert {way for way in good.profile.ways if not way.slower} == {*found.profile.ways}
    trial._known.clear()
    assert _slower(checkmate.trace(step, IMAGES, profile=good.profile)) == set()  # handed in


def test_what_is_measured_here_or_has_no_data_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ways_of", lambda *_: pytest.fail("it is tried"))
    assert _slower(checkmate.trace(step_of_images(), IMAGES))
    with torch.device("meta"):
        step = step_of_images()
    assert _slower(checkmate.trace(step, IMAGES.to("meta"), profile="roofline:laptop"))


def backward_of(x: torch.Size, weight: torch.Size, *, bias: bool = True) -> Any:
    """The node of a convolution's backward."""

    def step(*args: torch.Tensor) -> Any:
        return torch.autograd.grad(F.conv2d(*args).sum(), args)

    tensors = [torch.randn(shape, requires_grad=True) for shape in (x, weight, weight[:1])[: 2 + bias]]
    graph = make_fx(step, tracing_mode="fake")(*tensors).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    return node


def test_two_gradients_are_computed_apart_where_they_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for bias in (True, False):
        node = backward_of(torch.Size([4, 3, 9, 9]), torch.Size([5, 3, 3, 3]), bias=bias)
        before = torch.get_rng_state()
        assert same_in_two(node), bias
        assert_same_bits(torch.get_rng_state(), before)
    node = backward_of(torch.Size([2, 2, 7, 7]), torch.Size([3, 2, 3, 3]))
    real = node.target

    def other(*args: Any) -> Any:
        results = real(*args)
        return (*results[:1], results[1] + 1e-6, *results[2:]) if args[-1] == [True, True, True] else results

    node.target = other
    assert not same_in_two(node)
    monkeypatch.setattr(trial, "_known", {})
    node.target = real
    monkeypatch.setattr(trial, "call_of", lambda node: partial(real, 1, 2, [True, True, True]))
    assert not same_in_two(node)
