"""Costs are measured op by op, on made-up inputs, without touching anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from checkmate.memory import measure_peak
from checkmate.profiling import measure as measuring


@pytest.fixture(autouse=True)
def _measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_known", {})


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 50))


def _step(net: nn.Module) -> object:
    return lambda tokens: F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def test_every_op_has_a_time() -> None:
    problem = checkmate.trace(_step(_net()), torch.randint(50, (8, 16)))
    real = [k for k, op in enumerate(problem.graph.ops) if op.target != "autograd"]
    assert (problem.seconds[real] > 0).all()
    assert problem.seconds.sum() < 1
    assert problem.profile.source.startswith("measured on cpu")
    assert "guessed" not in problem.profile.source


def test_equal_ops_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    monkeypatch.setattr(measuring, "_time", lambda node: timed.append(node.name) or 1e-6)
    weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(4)]

    def step(x: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
        return x.sum()

    problem = checkmate.trace(step, torch.randn(32, 32))
    assert sum("mm" in name for name in timed) <= 3  # of 4 + 7: forward, gradient of the weight, of the input
    assert sum("tanh" in name for name in timed) <= 3  # of 4 + 4: forward, backward, backward of an expanded scalar
    first = len(timed)
    checkmate.trace(step, torch.randn(32, 32))
    assert len(timed) == first
    assert sum("mm" in op.name for op in problem.graph.ops) == 11


def test_workspace_is_what_an_op_allocates_beyond_its_outputs(one_thread: None) -> None:
    x = torch.randn(300, 200, requires_grad=True)
    problem = checkmate.trace(lambda x: x.sort(dim=0).values.sum(), x)
    k = next(k for k, op in enumerate(problem.graph.ops) if "sort" in op.target)
    outputs = sum(problem.graph.values[v].size_bytes for v in problem.graph.ops[k].outputs)
    with torch.no_grad():
        peak = measure_peak(lambda: torch.sort(x, dim=0)).peak
    assert problem.workspace[k] == peak - outputs > 0


def test_only_one_ops_tensors_exist_at_a_time() -> None:
    """The whole step needs many times what measuring it does."""
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(20)]

    def step(x: Tensor) -> Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
        return x.sum()

    x = torch.randn(20_000, 64)
    level = peak = 0
    made = measuring._make_up

    def count(leaf: object) -> object:
        nonlocal peak
        result = made(leaf)
        if isinstance(result, torch.Tensor):
            import weakref

            nonlocal level
            level += result.nbytes
            peak = max(peak, level)
            size = result.nbytes

            def gone() -> None:
                nonlocal level
                level -= size

            weakref.finalize(result, gone)
        return result

    measuring._make_up, original = count, made
    try:
        problem = checkmate.trace(step, x)
    finally:
        measuring._make_up = original
    assert problem.keep_all_peak > 15 * x.nbytes
    assert peak <= 3 * x.nbytes


def test_an_op_that_does_not_run_alone_is_guessed_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = measuring._call

    def fail_on_tanh(node: torch.fx.Node) -> object:
        if "tanh" in str(node.target):
            raise RuntimeError("not on its own")
        return made(node)

    monkeypatch.setattr(measuring, "_call", fail_on_tanh)
    x = torch.randn(8, 8, requires_grad=True)
    problem = checkmate.trace(lambda x: torch.tanh(x).sum(), x)
    assert "guessed for aten.tanh.default" in problem.profile.source
    assert "aten.tanh.default" in caplog.text
    k = next(k for k, op in enumerate(problem.graph.ops) if op.target == "aten.tanh.default")
    assert problem.seconds[k] > 0
    assert problem.workspace[k] > 0


def test_tensors_without_data_are_refused() -> None:
    layer, x = nn.Linear(3, 3, device="meta"), torch.randn(2, 3, device="meta")
    with pytest.raises(
        checkmate.Unsupported, match=r'weight is a fake tensor or on the meta .* profile="roofline:h100"'
    ):
        checkmate.trace(layer, x)
    with pytest.raises(checkmate.Unsupported, match=r'profile="roofline:h100"'):
        checkmate.compile(layer, budget="1 MB")(x)
    with FakeTensorMode():
        layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(checkmate.Unsupported, match=r'profile="roofline:h100"'):
        checkmate.trace(layer, x)


def test_other_devices_are_refused() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.ones(2, device="meta")
    graph.output(node)
    joint = SimpleNamespace(module=torch.fx.GraphModule({}, graph))
    with pytest.raises(checkmate.Unsupported, match="x is on meta: so far only steps on the CPU"):
        measuring.measure(joint)
