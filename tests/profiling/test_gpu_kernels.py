"""What kernels of a GPU are estimated to take, against figures by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import checkmate
from checkmate.profiling.data_sheets import DEVICES, Device
from checkmate.profiling.roofline import PASSES, product_seconds, queued, roofline_seconds
from tests.profiling.test_roofline import PLAIN
from tests.support.sampling import in_turn

aten = torch.ops.aten
# 1 byte and 1 FLOP a second, no cache, tiles that cost nothing beside their FLOP: to read these off
UNIT = replace(PLAIN, flops={**PLAIN.flops, "tf32": 1.0}, processors=1, clock=1.0)
BYTES = replace(UNIT, flops=dict.fromkeys(UNIT.flops, 1e18))
FLOP = replace(UNIT, bandwidth=1e18)


def _nodes(op: Any, *inputs: Any) -> list[fx.Node]:
    return [n for n in make_fx(op)(*inputs).graph.nodes if n.op == "call_function"]


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _seconds(device: Device, op: Any, *inputs: Any) -> float:
    """Of the one op that has a cost."""
    (node,) = (n for n in _nodes(op, *inputs) if isinstance(n.target, torch._ops.OpOverload))
    return roofline_seconds(node, device)


def test_a_large_product_takes_its_tiles_and_a_quarter_of_a_wave() -> None:
    """8192 x 4096 times 4096 x 8192 in float16 on the A100: 4096 tiles on 108 processors, 64 terms more for each."""
    a100 = DEVICES["a100"]
    x, w = _meta(8192, 4096, dtype=torch.float16), _meta(4096, 8192, dtype=torch.float16)
    tile = 2 * 128 * 128 * (4096 + 64) / (0.8 * 312e12 / 108)
    moving = 2 * (2 * 8192 * 4096 + 8192**2) / (0.8 * 2039e9)
    expected = 2e-6 + math.hypot((4096 / 108 + 0.25) * tile, moving)
    assert _seconds(a100, torch.mm, x, w) == pytest.approx(expected, rel=1e-12)
    bias = _meta(8192, dtype=torch.float16)
    assert _seconds(a100, torch.addmm, bias, x, w) == pytest.approx(expected, rel=1e-3)


def test_products_by_their_tiles() -> None:
    h100, a100 = DEVICES["h100"], DEVICES["a100"]
    # one row more than tiles takes another row of tiles
    rate = h100.flops["float16"]
    times = [product_seconds(h100, 1, rows, 4096, 4096, rate) for rows in (4096, 4097, 4160, 4224)]
    assert times[0] < times[1] == times[2] <= times[3]
    # a weight's gradient: 384 x 384, summed over 65536 tokens, by all processors; sums of 2048 by nine of 108
    rate = a100.flops["float16"]
    long, short = (product_seconds(a100, 1, 384, 384, terms, rate) for terms in (65536, 2048))
    assert long < 32 * short / 2
    assert product_seconds(a100, 1, 384, 384, 65536, rate) == pytest.approx(
        min(
            (9 * 12 / 108 + 0.25) * 2 * 128 * 128 * (65536 / 12 + 64) * 108 / (0.8 * rate),
            (18 * 6 / 108 + 0.25) * 2 * 64 * 128 * (65536 / 6 + 64) * 108 / (0.8 * 0.85 * rate),
            (36 * 3 / 108 + 0.25) * 2 * 64 * 64 * (65536 / 3 + 64) * 108 / (0.8 * 0.65 * rate),
        )
    )
    # few terms cost their loads: scores of attention, whose 64 terms take about twice as long as their FLOP do
    rate = h100.flops["float32"]
    assert product_seconds(h100, 80, 1024, 1024, 64, rate) == pytest.approx(
        (80 * 64 / 132 + 0.25) * 2 * 128 * 128 * 128 * 132 / (0.8 * rate)
    )


def test_what_the_cache_holds_comes_from_there() -> None:
    """Of 60 MB that an addition moves the A100's cache holds 40."""
    for numbers, near, far in ((5_000_000, 40e6, 20e6), (1_000_000, 12e6, 0)):
        x, expected = _meta(numbers), 2e-6 + near / (16 * 108 * 1.41e9) + far / (0.8 * 2039e9)
        assert _seconds(DEVICES["a100"], torch.add, x, x.clone()) == pytest.approx(expected, rel=1e-12)


def test_norms_and_softmax_go_over_their_bytes_again() -> None:
    x, w = _meta(64, 1000), _meta(1000)
    moved = 4 * (2 * 64 * 1000 + 2 * 1000 + 2 * 64)
    (norm,) = (n for n in _nodes(lambda x, w: F.layer_norm(x, (1000,), w, w.clone()), x, w) if "norm" in str(n.target))
    assert roofline_seconds(norm, BYTES) == pytest.approx(1.5 * moved, rel=1e-2)
    backward = lambda g, y: aten._softmax_backward_data(g, y, -1, torch.float32)  # noqa: E731
    assert _seconds(BYTES, backward, x, x.clone()) == 2 * 3 * 4 * 64 * 1000
    assert all(passes > 1 for passes in PASSES.values())


def test_tensor_cores_have_channels_last() -> None:
    """What is not in that order is brought into it, and the result out of it: 1 + 2 times the bytes."""
    first = _meta(8, 64, 14, 14, dtype=torch.float16), _meta(32, 64, 1, 1, dtype=torch.float16)
    last = [t.to(memory_format=torch.channels_last) for t in first]
    moved = 2 * (8 * 64 * 14 * 14 + 32 * 64 + 8 * 32 * 14 * 14)
    flop = 2 * 8 * 32 * 14 * 14 * 64
    fast = replace(BYTES, flops={**BYTES.flops, "float32": 1e9})
    no_tensor_cores = replace(FLOP, flops=dict.fromkeys(FLOP.flops, 1.0))
    for tensors, times in ((first, 3), (last, 1)):
        assert _seconds(fast, F.conv2d, *tensors) == pytest.approx(times * moved)
        assert _seconds(no_tensor_cores, F.conv2d, *tensors) == pytest.approx(flop)


@in_turn(of=[(1, 16.0), (8, 16.0), (16, 1.0), (64, 1.0)])
def test_groups_of_fewer_than_eight_channels_are_not_for_tensor_cores(of: tuple[int, float]) -> None:
    groups, rate = of
    x, w = (_meta(*shape, dtype=torch.float16) for shape in ((8, 64, 14, 14), (64, 64 // groups, 3, 3)))
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    flop = 2 * 8 * 64 * 14 * 14 * 64 // groups * 9
    device = replace(FLOP, flops={"float32": 1.0, "float16": 16.0})
    assert _seconds(device, partial(F.conv2d, padding=1, groups=groups), x, w) == pytest.approx(flop / rate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")
def test_causal_attention_computes_half(dtype: torch.dtype) -> None:
    """Forward and backward, by the kernels for float32 (efficient) and for half precision (cuDNN's)."""
    q = torch.empty(8, 16, 2048, 64, dtype=dtype, device="meta", requires_grad=True)
    costs = []
    for causal in (False, True):
        step = lambda q, causal=causal: F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum()  # noqa: E731
        problem = checkmate.trace(step, q, profile="roofline:h100")
        pairs = zip(problem.graph.ops, problem.seconds, strict=True)
        costs.append([seconds for op, seconds in pairs if "attention" in op.target])
    flop = 2 * 2 * 8 * 16 * 2048 * 2048 * 64
    rate = 0.55 * DEVICES["h100"].flops[str(dtype).removeprefix("torch.")]
    assert np.divide(*costs) == pytest.approx([2, 2], rel=0.1)
    assert costs[0] == pytest.approx([flop / rate, 2.5 * flop / rate], rel=0.1)


def test_short_ops_wait_for_the_host_and_long_ones_hide_it() -> None:
    seconds, launches = np.array([1.0, 1.0, 9.0, 1.0, 0.0, 1.0]), np.array([1, 1, 1, 1, 0, 3])
    assert queued(seconds, launches, 2.0).tolist() == [3.0, 2.0, 10.0, 1.0, 0.0, 1.0]
    assert queued(seconds, launches, 0.0).tolist() == seconds.tolist()
    rng = np.random.default_rng(0)
    for _ in range(100):
        seconds, launches = rng.exponential(size=50), rng.integers(0, 3, size=50)
        total = queued(seconds, launches, 1.0).sum()
        assert max(seconds.sum(), launches.sum() - (launches[-1] == 0) * 50) <= total + 1e-9
        assert total <= seconds.sum() + launches.sum() + 1e-9


def test_a_step_of_small_ops_takes_the_host_s_time() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).to("meta")
    problem = checkmate.trace(lambda x: net(x).sum(), _meta(4, 8), profile="roofline:h100")
    ops = sum(op.target != "autograd" and not op.target.startswith("aten.view") for op in problem.graph.ops)
    assert problem.keep_all_cost == pytest.approx(5e-6 * ops, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")
def test_softmax_backward_takes_its_product_of_memory() -> None:
    step = lambda x: (x.softmax(-1) * x).sum()  # noqa: E731
    x = torch.empty(256, 512, device="meta", requires_grad=True)
    problem = checkmate.trace(step, x, profile="roofline:a100")
    of = {op.target: int(bytes_) for op, bytes_ in zip(problem.graph.ops, problem.workspace, strict=True) if bytes_}
    assert of == {"aten._softmax_backward_data.default": 4 * 256 * 512}
    assert not checkmate.trace(step, x, profile="roofline:laptop").workspace.any()


def test_a_reserve_is_left_for_what_nobody_measured() -> None:
    """8 % of the card, 2 GB at least; nothing is known of a CPU."""
    rooms = {name: (device.memory_bytes, device.room) for name, device in DEVICES.items()}
    assert rooms["h200"] == (141 * 2**30, 141 * 2**30 - int(0.08 * 141 * 2**30))
    assert rooms["rtx3060"] == (12 * 2**30, 12 * 2**30 - 2 * 10**9)
    assert rooms["laptop"] == (0, 0)
