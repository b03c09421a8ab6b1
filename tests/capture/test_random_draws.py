"""Random numbers are drawn once, or the same ones again, however often what they go into runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.capture import random_draws as drawing
from checkmate.capture.random_draws import WORTH_BYTES, draw_again, draw_mask, draw_once, draw_saved, save_state
from checkmate.codegen import emit as codegen
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.plainly import run_again, train_as_plain
from tests.support.sampling import few
from tests.support.stepping import train

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, TOKENS, WIDTH = 4, 16, 32


class Block(nn.Sequential):
    """A layer with a dropout of one kind."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        wide, gelu, back = self
        return x + back(self.drop(gelu(wide(x))))


def _attention(x: Tensor, **options: bool) -> Tensor:
    q = x.view(BATCH, TOKENS, 4, -1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q, q * 2, dropout_p=0.2, **options)
    return mixed.transpose(1, 2).reshape(x.shape)


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.1),
    "in place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "channels": lambda x: F.dropout1d(x, 0.2),
    "attention": _attention,
    "causal attention": partial(_attention, is_causal=True),
    "noise": lambda x: x + 0.1 * torch.randn_like(x) * torch.sigmoid(x),
}


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


@pytest.mark.parametrize("name", ["dropout", *few(2, [(name,) for name in sorted({*DROPS} - {"dropout"})])])
def test_replays_at_the_tightest_budget(name: str) -> None:
    """Several steps: the random state goes on as in plain PyTorch from each to the next."""
    net, x = nn.Sequential(*(Block(DROPS[name]) for _ in range(3))), torch.randn(BATCH, TOKENS, WIDTH)
    budget = recomputing(checkmate.trace(lambda x: _loss(net, x), x), time_limit=1)
    plan, peaks = train_as_plain(net, _loss, x, budget=budget)
    assert run_again(plan)  # it is tight
    drawn = [k for k, op in enumerate(plan.problem.graph.ops) if op.pinned == "draws random numbers"]
    assert [plan.plan.runs.count(k) for k in drawn] == [1] * 3
    assert max(peaks) == plan.peak <= budget


def test_what_is_handed_a_seed_draws_nothing() -> None:
    """PyTorch marks as drawing also backwards of attention, and ops that write a mask or a state by a seed."""
    seeded, others = set(), set()
    for name in torch._C._dispatch_get_all_op_names():
        space, packet, overload = re.fullmatch(r"(\w+)::(\w+)\.?(.*)", name).groups()
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None) if space == "aten" else None
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        arguments = {a.name: 0.5 if a.name == "dropout_p" else None for a in op._schema.arguments}
        takes_seed = any("seed" in argument for argument in arguments)
        (seeded if takes_seed else others).add(packet)
        assert drawing.draws(op, [*arguments.values()], {}) != takes_seed, name
        assert drawing.draws(op, [], arguments) != takes_seed, name
    assert {f"_scaled_dot_product_{kind}_attention_backward" for kind in ("cudnn", "efficient")} <= seeded
    assert {"native_dropout", "_scaled_dot_product_cudnn_attention", "bernoulli"} <= others
    assert not any("backward" in name for name in others)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "sliced": lambda x: x[:, 1:4, ::2],
    "a number": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_is_drawn_from_a_saved_state_as_from_the_tensor_itself(layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(3, 5, 7, 9))
    torch.manual_seed(5)
    expected, after = draw_mask(x, 0.7), torch.get_rng_state()
    torch.manual_seed(5)
    saved = save_state(x)
    assert saved.numel() == drawing.STATE_BYTES + 8 * x.dim()
    first = draw_saved(saved, tuple(x.shape), 0.7)
    assert_same_bits(torch.get_rng_state(), after)
    torch.manual_seed(6)
    between = torch.get_rng_state()
    again = draw_again(saved, tuple(x.shape), 0.7)
    assert_same_bits(torch.get_rng_state(), between)
    for mask in (first, again):
        assert_same_bits((mask, mask.stride()), (expected, expected.stride()))


def _wide() -> tuple[nn.Module, Tensor]:
    """Masks that are worth more than a random state."""
    net = nn.Sequential(*(Block(DROPS["dropout"]) for _ in range(3)))
    return net, torch.randn(2 * WORTH_BYTES // (2 * WIDTH * TOKENS), TOKENS, WIDTH)


@pytest.mark.parametrize("reseeded", [False, True])
def test_large_masks_are_drawn_again_where_memory_is_short(reseeded: bool) -> None:
    """Whatever the generator is set to between forward and backward, it is found there after the backward."""
    net, x = _wide()
    twin, found = copy.deepcopy(net), []
    problem = checkmate.trace(lambda x: _loss(net, x), x)
    drawn = [k for k, op in enumerate(problem.graph.ops) if "draw_saved" in op.target]
    assert [problem.graph.ops[k].pinned for k in drawn] == [None] * 3
    compiled = checkmate.compile(lambda x: _loss(net, x), budget=recomputing(problem, time_limit=1), time_limit=1)
    for run, module in ((lambda x: _loss(twin, x), twin), (compiled, net)):
        torch.manual_seed(1)
        loss = run(x)
        if reseeded:
            torch.manual_seed(1)
        between = torch.get_rng_state()
        loss.backward()
        found.append([loss.detach(), between, torch.get_rng_state(), *(p.grad for p in module.parameters())])
    assert_same_bits(*found)
    (plan,) = compiled.plans
    assert any(plan.plan.runs.count(k) > 1 for k in drawn)
    assert any("draw_again" in str(node.target) for node in plan.modules.backward.graph.nodes)
    peaks = train(net, compiled, (x,)).peaks
    assert [plan.problem.resident + peak for peak in peaks] == [plan.peak] * len(peaks)


def test_no_random_state_is_saved_for_a_mask_that_is_drawn_once() -> None:
    net, x = _wide()
    plan, peaks = train_as_plain(net, _loss, x, budget="1 GB")
    targets = [node.target for node in plan.modules.forward.graph.nodes]
    assert (targets.count(draw_once), targets.count(save_state)) == (3, 0)
    assert peaks == [plan.peak] * len(peaks)


@pytest.mark.parametrize("again", [False, True])
def test_a_state_is_saved_where_the_tensor_is_not_read_again(again: bool) -> None:
    """Then the plan frees it before the mask is made, and drawing from it would hold it longer."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    state = graph.call_function(save_state, (x,))
    drawn = graph.call_function(draw_saved, (state, (WORTH_BYTES,), 0.5))
    graph.output((drawn, x) if again else (drawn,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(0)
    expected = module(torch.ones(WORTH_BYTES))[0]
    codegen._draw_once(module)
    found = [node.target for node in graph.nodes][1:3]
    assert found == ([drawing.hold_place, draw_once] if again else [save_state, draw_saved])
    torch.manual_seed(0)
    assert_same_bits(module(torch.ones(WORTH_BYTES))[0], expected)


def test_drawing_again_takes_no_more_memory_than_drawing() -> None:
    saved = save_state(torch.empty(300, 300))
    for draw in (draw_saved, draw_again):
        assert measure_peak(lambda draw=draw: draw(saved, (300, 300), 0.5)).peak == 300 * 300


def test_for_a_gpu_masks_are_kept() -> None:
    with torch.device("meta"):
        net, x = _wide()[0], torch.ones(4 * WORTH_BYTES // (2 * WIDTH * TOKENS), TOKENS, WIDTH)
    targets = {op.target for op in checkmate.trace(lambda x: _loss(net, x), x, profile="roofline:h100").graph.ops}
    assert any("native_dropout" in target for target in targets)
    assert not any("save_state" in target for target in targets)


def test_small_masks_and_those_that_nobody_reads_are_drawn_once() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        F.dropout(x, 0.5)
        return (F.dropout(x[0], 0.5) * weight).sum()

    batch = torch.randn(2, WORTH_BYTES - 1), torch.ones(1, requires_grad=True)
    targets = [op.target for op in checkmate.trace(step, *batch).graph.ops]
    assert targets.count("checkmate.draw_mask") == 2
    assert "checkmate.save_state" not in targets
