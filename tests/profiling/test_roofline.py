"""Estimates against figures computed by hand, and the profile that `trace` takes by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch.nn.attention.flex_attention import flex_attention

import checkmate
from benchmarks.networks import CASES
from checkmate import Problem
from checkmate.backends import passes
from checkmate.capture import random_draws
from checkmate.errors import Unsupported
from checkmate.profiling.data_sheets import device_named
from checkmate.profiling.roofline import DEVICES, STATED, Device
from tests.support.sampling import in_turn, long

PLAIN = Device(  # 1 FLOP a second and 1 byte a second, to read FLOP or bytes off the estimate
    "unit", {"float32": 1.0, "float16": 1.0, "bfloat16": 1.0}, 1.0, 0.0, compute_efficiency=1.0, memory_efficiency=1.0
)
FLOP = replace(PLAIN, bandwidth=1e18)
BYTES = replace(PLAIN, flops=dict.fromkeys(PLAIN.flops, 1e18))


@pytest.fixture(autouse=True)
def _unit_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "flop", FLOP)
    monkeypatch.setitem(DEVICES, "bytes", BYTES)


def _seconds(problem: Problem, target: str) -> list[float]:
    pairs = zip(problem.graph.ops, problem.seconds, strict=True)
    return [float(seconds) for op, seconds in pairs if op.target.partition(".")[2] == target]


def _traced(device: str, step: Callable[..., Tensor], *inputs: Tensor) -> Problem:
    return checkmate.trace(step, *inputs, profile=f"roofline:{device}")


def test_a_matrix_product_by_hand() -> None:
    weight = torch.empty(1024, 2048, device="meta", requires_grad=True)
    by_flop, by_bytes = 2 * 4096 * 1024 * 2048 / (0.7 * 0.768e12), 4 * (1024 + 1024 * 2048 + 2048) / (0.8 * 76.8e9)
    for rows, least in ((4096, by_flop), (1, by_bytes)):
        problem = _traced("laptop", lambda x: (x @ weight).sum(), torch.empty(rows, 1024, device="meta"))
        assert _seconds(problem, "mm.default")[0] == pytest.approx(2e-6 + least, rel=1e-12)


def test_a_convolution_by_hand() -> None:
    net = nn.Conv2d(64, 128, 3, padding=1, bias=False, device="meta")
    x = torch.empty(32, 64, 56, 56, device="meta", requires_grad=True)
    flop = 2 * 32 * 128 * 56 * 56 * 64 * 9
    problem = _traced("laptop", lambda x: net(x).sum(), x)
    for op in ("convolution.default", "convolution_backward.default", "convolution_backward_input"):
        assert _seconds(problem, op) == [pytest.approx(2e-6 + flop / (0.7 * 0.768e12), rel=1e-12)]


@in_turn(kind=[nn.Conv2d, nn.ConvTranspose2d], groups=[1, 4, 16])
def test_flop_of_a_grouped_convolution_and_its_backward(kind: type[nn.Module], groups: int) -> None:
    net = kind(16, 16, 3, padding=1, groups=groups, bias=False)
    x = torch.ones(8, 16, 10, 10)
    flop = 2 * 8 * 16 * 10 * 10 * (16 // groups) * 9
    problem = _traced("flop", lambda x: net(x).sum(), x)
    assert _seconds(problem, "convolution.default") == [flop]
    assert _seconds(problem, "convolution_backward.default") == [flop]  # of the weight only
    problem = _traced("flop", lambda x: net(x).sum(), x.requires_grad_())
    assert _seconds(problem, "convolution_backward.default") == [flop]
    assert _seconds(problem, "convolution_backward_input") == [flop]


def test_flop_of_attention_on_the_cpu() -> None:
    q = torch.ones(2, 4, 128, 64, requires_grad=True)
    problem = _traced("flop", lambda q: F.scaled_dot_product_attention(q, q, q).sum(), q)
    product = 2 * 2 * 4 * 128 * 128 * 64
    op = "_scaled_dot_product_flash_attention_for_cpu"
    assert _seconds(problem, f"{op}.default") == [pytest.approx(2 * product, rel=1e-6)]
    assert _seconds(problem, f"{op}_backward.default") == [pytest.approx(5 * product, rel=1e-6)]  # one again


def test_bytes_are_what_is_read_and_written() -> None:
    """An expanded tensor is read once."""
    x, row = torch.ones(10, 20, requires_grad=True), torch.ones(20)
    problem = _traced("bytes", lambda x: ((x.exp() + x[:1]) * row.expand(10, 20)).sum(), x)
    assert _seconds(problem, "exp.default") == [2 * 800]
    assert _seconds(problem, "add.Tensor")[0] == _seconds(problem, "mul.Tensor")[0] == 800 + 80 + 800
    assert _seconds(problem, "sum.default") == [800 + 4]


def test_a_lookup_reads_what_it_picks() -> None:
    table, tokens = nn.Embedding(1000, 64), torch.zeros(128, dtype=torch.long)
    problem = _traced("bytes", lambda tokens: F.cross_entropy(table(tokens), tokens), tokens)
    rows = 128 * 64 * 4
    assert _seconds(problem, "embedding.default") == [2 * (128 * 8 + rows)]  # at most as much of the table as the rest
    assert _seconds(problem, "nll_loss_forward.default") == [2 * (128 * 8 + 4 + 4)]
    assert _seconds(problem, "embedding_dense_backward.default") == [rows + 128 * 8 + 1000 * 64 * 4]


@pytest.mark.slow
def test_what_autograd_does_costs_nothing_and_nothing_needs_workspace() -> None:
    _, step, batch = CASES["mlp"].make(0)
    problem = _traced("l4", step, *batch)
    free = [op.target for op, seconds in zip(problem.graph.ops, problem.seconds, strict=True) if seconds == 0]
    assert set(free) == {"autograd"}
    assert not problem.workspace.any()
    assert problem.profile.source == f"roofline estimate for NVIDIA L4, {STATED}"


@pytest.mark.parametrize("name", ["mlp", long("resnet18"), long("gpt2-sdpa")])
def test_the_graph_is_that_of_the_measured_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for masks that a CPU may draw again and a GPU may not, and for inputs that only a CPU does without."""
    monkeypatch.setattr(passes, "forget_inputs", lambda graph: None)
    monkeypatch.setattr(random_draws, "WORTH_BYTES", 2**40)
    _, step, batch = CASES[name].make(0)
    measured = checkmate.trace(step, *batch)
    assert checkmate.trace(step, *batch, profile="roofline:laptop").graph == measured.graph
    rounded = checkmate.trace(step, *batch, profile="roofline:h100")
    assert rounded.graph.ops == measured.graph.ops
    sizes = np.array([value.size_bytes for value in measured.graph.values])
    blocks = -(-sizes // 512) * 512
    assert [value.size_bytes for value in rounded.graph.values] == blocks.tolist()
    resident = [value.producer is None for value in measured.graph.values]
    assert rounded.resident == blocks[resident].sum() > measured.resident


@in_turn(profile=["roofline:h1000", "roofline", "roofline:", "guess", "h100", ""])
def test_unknown_profiles_are_refused_with_the_list(profile: str) -> None:
    with pytest.raises(ValueError, match=r'There is no (profile .*"measure"|device ).*h100, .*laptop'):
        checkmate.trace(nn.Linear(3, 3), torch.ones(2, 3), profile=profile)


@in_turn(name=["rtx4090", "RTX 4090", "rtx-4090", "4090", "RTX_4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"])
def test_a_device_is_found_however_its_name_is_written(name: str) -> None:
    assert device_named(name) is DEVICES["rtx4090"]


@in_turn(asked={"4900": "'rtx4090'", "h1000": "'h100'", "rtx3070ti": "'rtx3070'", "a100-40": "'a100-40gb'"}.items())
def test_a_device_that_is_not_known_is_told_the_nearest_and_the_way_out(asked: tuple[str, str]) -> None:
    with pytest.raises(
        ValueError, match=rf"There is no device .* Did you mean .*{asked[1]}.*budget='8 GB'.*--budget 8GB"
    ):
        device_named(asked[0])


def test_a_card_of_each_common_size_is_known() -> None:
    sizes = {round(device.memory_bytes / 2**30) for name, device in DEVICES.items() if name.startswith("rtx")}
    assert {8, 10, 12, 16, 24, 32} <= sizes


def test_a_device_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Device("my card", {"float32": 1e12}, bandwidth=1e11, latency=1e-5, block_bytes=256)
    monkeypatch.setitem(DEVICES, "mine", mine)
    problem = checkmate.trace(nn.Linear(3, 3), torch.ones(2, 3), profile="roofline:mine")
    assert problem.profile.source == "roofline estimate for my card"
    assert {value.size_bytes for value in problem.graph.values} == {256}


def test_impossible_devices_and_types_that_a_device_has_no_rate_for_are_refused_by_name() -> None:
    layer, x = nn.Linear(3, 3).double(), torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(Unsupported, match="unit has no rate for float64, only for float32, float16, bfloat16"):
        _traced("flop", layer, x)
    negative: dict[str, object] = {"latency": -1e-6, "flops": {"float32": -1.0}, "host": -1e-6}
    for name, value in {"bandwidth": 0.0, "block_bytes": 0, **negative}.items():
        with pytest.raises(ValueError, match="must be positive"):
            replace(PLAIN, **{name: value})
    with pytest.raises(ValueError, match="no rate for float32"):
        replace(PLAIN, flops={"float16": 1.0})


@pytest.mark.long
def test_faster_devices_take_less_time() -> None:
    _, step, batch = CASES["vgg"].make(0)
    names = {*DEVICES} - {"flop", "bytes"}
    costs = {name: _traced(name, step, *batch).keep_all_cost for name in names}
    assert len(names) == 20  # each is below
    assert costs["h200"] <= costs["h100"] <= costs["a100"] <= costs["l4"] < costs["laptop"]
    assert costs["a100"] <= costs["a100-40gb"] <= costs["v100"] <= costs["t4"] < costs["laptop"]
    assert costs["l40s"] <= costs["l4"]
    assert costs["rtx5090"] <= costs["rtx4090"] <= costs["rtx3090"] <= costs["rtx3060"] < costs["laptop"]
    assert costs["rtx4090"] <= costs["rtx4080"] <= costs["rtx4070"] <= costs["rtx4060"] < costs["laptop"]
    assert costs["rtx3090"] <= costs["rtx3080"] <= costs["rtx3070"] <= costs["rtx3060"]
    assert costs["rtx5090"] <= costs["rtx5080"] <= costs["rtx5070"] <= costs["rtx4070"]
    assert costs["a100"] <= costs["v100"] < costs["laptop"]


def _by_graphs(device: str, run: Callable[[Tensor], Tensor]) -> tuple[float, int]:
    """Seconds and workspace of the higher-order op of a forward."""
    w = torch.randn(8, 8, requires_grad=True)
    problem = _traced(device, lambda x: run(x @ w).sum(), torch.randn(4, 8))
    ops = enumerate(problem.graph.ops)
    (k,) = (k for k, op in ops if op.target in ("cond", "map_impl") and op.phase == "forward")
    return float(problem.seconds[k]), int(problem.workspace[k])


def test_of_two_graphs_that_counts_which_takes_longer() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x @ x.t().sin() @ x, (x,))

    sine, products = 2 * 4 * 4 * 8, 4 * (4 * 8 + 8 * 4 + 4 * 4)
    assert _by_graphs("bytes", run)[0] == pytest.approx(sine + 2 * products)
    seconds, workspace = _by_graphs("flop", run)
    assert seconds == pytest.approx(2 * 2 * 4 * 4 * 8)
    assert workspace == 4 * 4 * 4  # the sine beside the result


def test_a_graph_counts_once_for_each_row() -> None:
    seconds, workspace = _by_graphs("bytes", lambda x: map_rows(lambda row: (row.sin() * 2).cos(), x))
    assert seconds == pytest.approx(4 * 3 * 2 * 8 * 4)
    assert workspace == 4 * 8 * 4 + 8 * 4  # the rows of the result before they are one tensor, and what is within one


def test_flop_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "flop", replace(FLOP, capability=(9, 0)))  # PyTorch has no backward of it on the CPU
    torch.ones(1, requires_grad=True).sum().backward()  # autograd has its threads from then on, and none for a GPU
    with torch.device("meta"):
        q = torch.randn(2, 4, 256, 32, requires_grad=True)
    problem = _traced("flop", lambda q: flex_attention(q, q, q).sum(), q)
    seconds = {op.target: s for op, s in zip(problem.graph.ops, problem.seconds.tolist(), strict=True)}
    product = 2 * 2 * 4 * 256 * 256 * 32
    assert seconds["flex_attention"] == pytest.approx(2 * product)
    assert seconds["flex_attention_backward"] == pytest.approx(5 * product)
