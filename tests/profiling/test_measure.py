"""Costs are measured op by op, on made-up inputs, without touching anything."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import checkmate
from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.compilation import Backend
from checkmate.backends.step_problem import joint_of
from checkmate.devices import KERNELS
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from checkmate.profiling import cost_cache
from checkmate.profiling import measure as measuring
from checkmate.profiling import one_op as inputs
from checkmate.profiling.cost_cache import OpCost, conditions_on
from checkmate.profiling.measure import fill, measure_ops
from checkmate.profiling.one_op import call_of
from checkmate.profiling.roofline import DEVICES, roofline_seconds
from checkmate.profiling.source import profile_of
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("nothing_known")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_repeats() -> None:
    """As many as wherever steps are measured: these tests are about them."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops whose inputs are made up from now on, each time that they are."""
    names: list[str] = []
    monkeypatch.setattr(measuring, "call_of", lambda node: names.append(node.name) or call_of(node))
    return names


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 8, requires_grad=True)


def _tanh(x: Tensor) -> Tensor:
    return torch.tanh(x).sum()


def _nodes(step: object, *args: Tensor) -> list[torch.fx.Node]:
    """The nodes of a captured step that run."""
    found: list[torch.fx.Node] = []

    def plan(problem: checkmate.Problem) -> checkmate.Solution:
        found.extend(node for node in joint_of(problem).nodes if node is not None)
        return checkmate.solve(problem, problem.keep_all_peak, method="checkpoint-all")

    CaptureCache(step, Backend(plan, profile=DEVICES["laptop"]))(*args)
    return found


def _products(count: int, width: int) -> Callable[[Tensor], Tensor]:
    weights = [nn.Parameter(torch.randn(width, width)) for _ in range(count)]
    return lambda x: functools.reduce(lambda x, w: torch.tanh(x @ w), weights, x).sum()


def test_ops_are_measured_as_they_run() -> None:
    """What a kernel calls runs as kernels, not as the formulas in Python that stand for them in a trace."""
    traced = set()

    @torch.library.custom_op("tests::kernel", mutates_args=())
    def kernel(x: Tensor) -> Tensor:
        traced.add(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))
        return x.sin()

    kernel.register_fake(torch.empty_like)
    kernel.register_autograd(lambda _, gradient: gradient)
    problem = checkmate.trace(lambda x: kernel(x.cos()).sum(), torch.ones(8, requires_grad=True))
    assert any(op.target == "tests.kernel.default" for op in problem.graph.ops)
    assert traced == {False}


def test_every_op_has_a_time_and_neither_the_random_state_nor_a_tensor_is_touched() -> None:
    net = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 8), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(8, 50))
    step = lambda tokens: F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())  # noqa: E731
    tokens = torch.randint(50, (8, 16))
    state, before = torch.get_rng_state(), {name: t.clone() for name, t in net.state_dict().items()}
    problem = checkmate.trace(step, tokens)
    assert_same_bits(torch.get_rng_state(), state)
    assert_same_bits(net.state_dict(), before)
    real = [k for k, op in enumerate(problem.graph.ops) if op.target != "autograd"]
    assert (problem.seconds[real] > 0).all()
    assert problem.seconds.sum() < 1
    assert problem.profile.source.startswith("measured on cpu")
    assert "estimated" not in problem.profile.source
    assert problem.profile.estimated == ()


def test_equal_ops_are_measured_once(called: list[str]) -> None:
    step = _products(4, 32)
    problem = checkmate.trace(step, torch.randn(32, 32))
    # made up twice each, for the bytes and for the seconds
    assert sum("mm" in name for name in called) <= 2 * 3  # of 4 + 7: forward, gradient of the weight, of the input
    assert sum("tanh" in name for name in called) <= 2 * 3  # of 4 + 4: forward, backward, that of an expanded scalar
    first = len(called)
    checkmate.trace(step, torch.randn(32, 32))
    assert len(called) == first
    assert sum("mm" in op.name for op in problem.graph.ops) == 11


def test_workspace_is_what_an_op_allocates_beyond_its_outputs(one_thread: None) -> None:
    x = torch.randn(300, 200, requires_grad=True)
    problem = checkmate.trace(lambda x: x.sort(dim=0).values.sum(), x)
    k = next(k for k, op in enumerate(problem.graph.ops) if "sort" in op.target)
    outputs = sum(problem.graph.values[v].size_bytes for v in problem.graph.ops[k].outputs)
    with torch.no_grad():
        peak = measure_peak(lambda: torch.sort(x, dim=0)).peak
    assert problem.workspace[k] == peak - outputs > 0


def test_only_one_ops_tensors_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step needs many times what measuring it does."""
    x = torch.randn(20_000, 64)
    alive, levels, made = weakref.WeakSet[Tensor](), [0], inputs.make_up

    def count(leaf: object, bound: int | None = None) -> object:
        result = made(leaf, bound)
        if isinstance(result, torch.Tensor):
            alive.add(result)
            levels.append(sum(tensor.nbytes for tensor in alive))
        return result

    monkeypatch.setattr(inputs, "make_up", count)
    problem = checkmate.trace(_products(20, 64), x)
    assert problem.keep_all_peak > 15 * x.nbytes
    assert 0 < max(levels) <= 3 * x.nbytes


def test_an_op_that_does_not_run_alone_is_estimated_and_marked(
    x: Tensor, tanh_fails: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    tanh_fails("not on its own")
    problem = checkmate.trace(_tanh, x)
    assert problem.profile.source.endswith("; 2 ops estimated")
    assert "aten.tanh.default, aten.tanh_backward.default" in caplog.text
    tanhs = [k for k, op in enumerate(problem.graph.ops) if "tanh" in op.target]
    assert problem.profile.estimated == tuple(tanhs)
    assert (problem.seconds[tanhs] > 0).all()
    assert (problem.workspace[tanhs] > 0).all()


def test_ops_are_recorded_a_few_at_a_time_and_long_ones_timed_where_their_bytes_are_counted(
    monkeypatch: pytest.MonkeyPatch, called: list[str], one_thread: None
) -> None:
    """So that a progress bar moves while bytes are counted, too. Inputs of long ops are made once.

    No garbage is looked for: in a large program that takes as long as to measure fifty ops.
    """
    nodes = dict(enumerate(_nodes(lambda x: (x @ x).sort(dim=0).values.sum(), torch.randn(64, 64, requires_grad=True))))
    expected = [cost and cost.allocated_bytes for _, cost in measure_ops(nodes)]
    monkeypatch.setattr(gc, "collect", lambda generation=2: pytest.fail("garbage is looked for"))
    for at_once, long, times in ((2, float("inf"), 2), (measuring.RECORDED_AT_ONCE, 0.0, 1)):
        called.clear()
        monkeypatch.setattr(measuring, "RECORDED_AT_ONCE", at_once)
        monkeypatch.setattr(measuring, "LONG", long)
        found = list(measure_ops(nodes))
        assert [i for i, _ in found] == list(range(len(nodes)))
        assert [cost and cost.allocated_bytes for _, cost in found] == expected
        assert all(cost.seconds > 0 for _, cost in found)
        assert len(called) == times * len(nodes)


def test_what_held_with_other_kernels_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen by the processor's instructions, which its name may not tell, and by the environment."""
    for name in KERNELS:
        monkeypatch.delenv(name, raising=False)
    conditions = conditions_on(CPU)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    settings = ", ".join(filter(None, [conditions.settings, "ONEDNN_MAX_CPU_ISA=AVX2"]))
    assert conditions_on(CPU) == replace(conditions, settings=settings)
    monkeypatch.setattr(Path, "read_text", lambda self: "model name : one\nflags : fpu avx2\n")
    one = conditions_on(CPU)
    monkeypatch.setattr(Path, "read_text", lambda self: "model name : one\nflags : fpu avx2 amx_tile\n")
    other = conditions_on(CPU)
    assert one.device.split()[:2] == other.device.split()[:2] == ["cpu", "one"]
    assert one.device != other.device


@pytest.mark.slow
def test_the_next_process_takes_what_was_measured_and_without_the_cache_nothing_is_taken_and_nothing_kept(
    x: Tensor, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, times = checkmate.trace(_tanh, x), len(called)
    monkeypatch.setattr(cost_cache, "_known", {})  # as in another process
    again = checkmate.trace(_tanh, x)
    assert len(called) == times > 0
    assert again.seconds.tolist() == first.seconds.tolist()
    assert again.workspace.tolist() == first.workspace.tolist()
    before = cost_cache.load(conditions_on(CPU))
    assert before
    for times in (1, 2):
        called.clear()
        checkmate.trace(_tanh, x, cache=False)
        assert len(called) == 2 * 3, times
    checkmate.compile(_tanh, budget="1 MB", cache=False)(x)
    assert len(called) == 4 * 3
    assert cost_cache.load(conditions_on(CPU)) == before


def test_known_seconds_stay_where_an_op_takes_as_many_bytes_as_before() -> None:
    cost = OpCost(3.0, 64, {})
    assert [measuring._known_seconds(cost, allocated) for allocated in (64, 128)] == [3.0, None]
    assert measuring._known_seconds(None, 64) is None


def test_ops_run_on_inputs_made_up_for_them() -> None:
    """Those that index, draw or hold statistics, too."""
    x, rows, mask = torch.randn(5, 7, requires_grad=True), torch.tensor([4, 0, 4]), torch.rand(5, 7) > 0.5
    pairs, table = torch.randn(4, 2, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    image = torch.randn(2, 3, 8, 8, requires_grad=True)

    def step(x: Tensor, pairs: Tensor, table: Tensor, image: Tensor) -> Tensor:
        results = (
            *(F.embedding(torch.tensor([5, 5, 1]), table), x[rows], x[rows, rows], x.gather(1, rows[:, None])),
            *(x.scatter(0, rows[None], x[:1, :3]), x.index_select(1, rows), x.index_add(0, rows, x[:3])),
            *(x.masked_fill(mask, 0.0), torch.where(mask, x, 0.0), x.sort(dim=0).values, x.max(dim=0).values),
            F.cross_entropy(x, torch.tensor([6, 1, 2, 3, 0])),
            F.cross_entropy(image, torch.full((2, 8, 8), 2)),
            F.binary_cross_entropy(x.sigmoid(), mask.float()),
            *(F.max_pool2d(image, 2), F.adaptive_max_pool2d(image, 2), F.group_norm(image, 3), F.dropout(x, 0.5)),
            *(F.batch_norm(image, torch.zeros(3), torch.ones(3), training=training) for training in (True, False)),
            F.scaled_dot_product_attention(image, image, image, dropout_p=0.5),
            F.interpolate(image, scale_factor=2.0, mode="bilinear"),
            torch.view_as_real(torch.view_as_complex(pairs) * 2j),
        )
        return sum((result.sum() for result in results), torch.zeros(()))

    nodes = _nodes(step, x, pairs, table, image)
    assert len({node.target for node in nodes}) > 50
    for node in nodes:
        assert inputs.runs_alone(node), node
        inputs.call_of(node)()


def test_indices_are_spread_over_what_they_index() -> None:
    table = torch.randn(1000, 4, requires_grad=True)
    tokens = torch.zeros(500, dtype=torch.long)
    for node in _nodes(lambda w: F.embedding(tokens, w).sum(), table):
        if "embedding" in str(node.target):
            (index,) = (n for n in node.all_input_nodes if n.meta["val"].dtype is torch.long)
            made = inputs.make_up(index.meta["val"], inputs._index_bounds(node)[index])
            assert 0 <= int(made.min()) < 100 < 900 < int(made.max()) < 1000


def test_keys_tell_apart_what_costs_differently_and_hold_in_every_process() -> None:
    x = torch.randn(6, 4, requires_grad=True)

    def keys(step: object, x: Tensor = x) -> set[str]:
        return {inputs.key_of(node) for node in _nodes(step, x)}

    assert keys(lambda x: x.tanh().sum()) == keys(lambda y: y.tanh().sum())
    assert keys(lambda x: x.tanh().sum()) != keys(lambda x: x.t().tanh().sum())
    assert keys(lambda x: x.sum(0).prod()) != keys(lambda x: x.sum(1).prod())
    assert keys(lambda x: x.tanh().sum()) != keys(lambda x: x.tanh().sum(), x.detach().double().requires_grad_())
    assert any(key.startswith("checkmate.draw_mask") for key in keys(lambda x: F.dropout(x, 0.5).sum()))
    assert not any(" at 0x" in key for key in keys(lambda x: F.dropout(x, 0.5).sum()))


def test_ops_that_make_no_sense_alone_do_not_run() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    reduce = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    subgraph = graph.call_function(torch.ops.higher_order.cond, (x, x, x, ()))
    assert not inputs.runs_alone(reduce)
    assert not inputs.runs_alone(subgraph)
    assert inputs.runs_alone(graph.call_function(torch.ops.aten.copy_.default, (x, x)))


def test_what_is_no_property_of_an_op_is_an_error() -> None:
    """After a device-side assert every call on the device fails."""
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    stopped = torch.AcceleratorError("CUDA error: device-side assert triggered\nand more")
    with pytest.raises(RuntimeError, match="allocate memory"):
        inputs.attempt(node, Mock(side_effect=no_memory))
    with pytest.raises(RuntimeError, match=r"^aten\.sin\.default .* has stopped the device.*assert triggered Start it"):
        inputs.attempt(node, Mock(side_effect=stopped))


def test_an_estimate_is_scaled_to_what_was_measured() -> None:
    """A machine half as fast as the estimate says: what is estimated takes twice as long too."""
    x = torch.randn(100, 100, requires_grad=True)
    joint = joint_of(checkmate.trace(lambda x: x.exp().tanh().sum(), x, profile="roofline:laptop"))
    estimate = [None if n is None else roofline_seconds(n, DEVICES["laptop"]) for n in joint.nodes]
    costs = [None, *(None if s is None else OpCost(2 * s, 0) for s in estimate[1:])]
    filled = fill(joint, costs, "measured")
    assert filled.seconds[0] == pytest.approx(2 * estimate[0])
    assert filled.workspace_bytes[0] == 2 * 40_000  # all that it reads and makes
    assert filled.estimated == (0,)
    assert filled.source == "measured; 1 op estimated"


def test_the_median_is_taken_until_it_is_stable() -> None:
    assert not measuring._is_enough([1e-6] * (measuring.LEAST_REPEATS - 1))
    assert measuring._is_enough([1e-6] * measuring.LEAST_REPEATS)
    assert not measuring._is_enough([1e-6, 2e-6] * 5)
    assert measuring._is_enough([1e-6, 2e-6] * (measuring.MOST_REPEATS // 2))
    assert measuring._is_enough([measuring.SECONDS_PER_OP, 2 * measuring.SECONDS_PER_OP] * 3)
    for count in range(measuring.LEAST_REPEATS, 30):  # as the quartiles of NumPy say
        drawn = np.random.default_rng(count)
        for spread in (0.01, 0.05, 0.1, 0.2):
            seconds = (1e-6 * (1 + spread * drawn.random(count))).tolist()
            low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
            stable = (high - low) / count**0.5 < measuring.STABLE * middle
            assert measuring._is_enough(seconds) == stable, (count, spread)


def test_the_second_level_cache_as_the_system_describes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SECOND_LEVEL", tmp_path / "size")
    second_level = measuring._second_level_bytes.__wrapped__
    assert second_level() == measuring.USUAL_SECOND_LEVEL  # there is no such file
    for text, size in (("512K\n", 2**19), ("", measuring.USUAL_SECOND_LEVEL)):
        (tmp_path / "size").write_text(text)
        assert second_level() == size


def test_caches_are_overwritten_before_each_timed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[Tensor] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **kw: buffers.append(zeros(*sizes, **kw)) or buffers[-1])
    seen: list[int] = []
    measuring.time_on_cpu(lambda: seen.append(int(buffers[0][-1]) if buffers else -1))
    assert buffers[0].nbytes == 2 * measuring._second_level_bytes()
    assert seen == [-1, *(i % 256 for i in range(1, len(seen)))]  # the first run is not timed


@pytest.mark.cuda
@pytest.mark.long  # products of 4096 rows, which the simulated device makes on the CPU, some fifty times
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures on a CUDA device, and there is none")
def test_on_cuda_time_grows_with_work_and_workspaces_are_whole_blocks() -> None:
    step = lambda x: (x @ x).tanh().sum()  # noqa: E731
    x, larger = (torch.randn(n, n, device="cuda", requires_grad=True) for n in (512, 4096))
    nodes = _nodes(step, x)
    small_costs, large_costs = (dict(measure_ops(dict(enumerate(of)))) for of in (nodes, _nodes(step, larger)))
    for i, cost in small_costs.items():
        assert 0 < cost.seconds
        assert cost.allocated_bytes % 512 == 0
        assert large_costs[i].seconds > cost.seconds or "expand" in str(nodes[i].target)
    problem = checkmate.trace(step, x)
    assert problem.profile.source == "measured on cuda"
    assert (problem.seconds[[k for k, op in enumerate(problem.graph.ops) if op.target != "autograd"]] > 0).all()


def test_tensors_without_data_and_other_devices_are_refused() -> None:
    layer, x = nn.Linear(3, 3, device="meta"), torch.randn(2, 3, device="meta")
    says = r'weight is a fake tensor or on the meta .* profile="roofline:h100"'
    with pytest.raises(Unsupported, match=says):
        checkmate.trace(layer, x)
    with pytest.raises(Unsupported, match=r'profile="roofline:h100"'):
        checkmate.compile(layer, budget="1 MB")(x)
    with FakeTensorMode():
        layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(Unsupported, match=r'profile="roofline:h100"'):
        checkmate.trace(layer, x)
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.ones(2, device="meta")
    graph.output(node)
    joint = SimpleNamespace(module=torch.fx.GraphModule({}, graph))
    with pytest.raises(Unsupported, match="x is on meta: ops are measured on cpu and cuda only"):
        profile_of(joint, measuring.Measure())


def test_flex_attention_is_measured_on_all_of_its_blocks() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 384, device="cpu")
    x, keys, w = torch.randn(1, 1, 256, 16), torch.randn(1, 1, 384, 16), torch.randn(16, 16, requires_grad=True)
    nodes = _nodes(lambda x: (flex_attention(x, keys, keys, block_mask=mask) @ w).sum(), x)
    (node,) = (node for node in nodes if str(node.target) == "flex_attention")
    numbers, indices, full, *_ = inputs.call_of(node).args[4][2:]
    assert numbers.tolist() == [[[3, 3]]]
    assert indices.tolist() == [[[[0, 1, 2], [0, 1, 2]]]]
    assert full.tolist() == [[[0, 0]]]
