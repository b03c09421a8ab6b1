"""One device for a step, what is in use on it, and what a step on CUDA is rounded to."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from benchmarks.networks import CASES
from checkmate.capture import device as devices
from checkmate.capture.device import allocated_on, device_of, in_autograds_thread, random_states
from checkmate.capture.joint import read_joint
from checkmate.capture.op_order import TracedStep
from checkmate.devices import kind_of
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.budgets import between
from tests.support.plainly import at_smallest_budget
from tests.support.sampling import long

aten = torch.ops.aten
CPU = torch.device("cpu")


def _graph(*devices: str, shape: tuple[int, ...] = (3, 5), number_on: str = "") -> fx.Graph:
    """Inputs on these devices, as fake tensors: no device is there."""
    graph = fx.Graph()
    with FakeTensorMode():
        for i, device in enumerate(devices):
            graph.placeholder(f"primals_{i}").meta["val"] = torch.empty(shape, device=device)
        if number_on:
            graph.placeholder("seed").meta["val"] = torch.empty((), device=number_on)
    return graph


def test_one_device() -> None:
    """A number may be on the CPU. Several devices are refused, and those of other kinds."""
    for graph in (_graph("cpu", "cpu"), _graph(), _graph("cpu", shape=())):
        assert device_of(graph) == CPU
    for graph in (_graph("cuda:0", "cuda:0"), _graph("cuda:0", number_on="cpu")):
        assert device_of(graph) == torch.device("cuda:0")
    for kinds, said in (
        (("cuda:0", "cuda:1"), r"cuda:0, first at primals_0.*cuda:1, first at primals_1"),
        (("cuda:0", "cpu"), r"cpu, first at primals_1"),
        (("meta",), "runs on meta"),
    ):
        with pytest.raises(Unsupported, match=said):
            device_of(_graph(*kinds))


def test_what_is_held_counts_as_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
    problem = checkmate.trace(step, x)
    for allocated, more in ((0, 0), (problem.resident - 8, 0), (problem.resident + 3000, 3000)):
        monkeypatch.setattr("checkmate.backends.compilation.allocated_on", lambda device, count=allocated: count)
        held = checkmate.trace(step, x)
        assert held.resident == problem.resident + more
        assert held.keep_all_peak == problem.keep_all_peak + more
        assert checkmate.min_budget(held).peak == checkmate.min_budget(problem).peak + more


@pytest.mark.slow
def test_what_an_allocator_holds_is_read_when_the_step_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on the CPU, with the reading that a CUDA device would give."""
    step, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
    problem = checkmate.trace(step, x)
    monkeypatch.setattr("checkmate.backends.compilation.allocated_on", lambda device: problem.resident + 5000)
    assert checkmate.trace(step, x).resident == problem.resident + 5000
    with pytest.raises(InfeasibleBudget) as caught:
        checkmate.compile(step, budget=5000)(x)
    assert caught.value.min_budget == checkmate.min_budget(problem).peak + 5000


def test_products_before_the_allocator_is_read_leave_no_trace() -> None:
    """Here on the CPU, where they do nothing but run: without gradients enabled, and while random numbers wait."""
    assert allocated_on(CPU) is None
    state = torch.get_rng_state()
    with torch.no_grad():
        devices.have_libraries_take_workspaces(CPU)
        assert not torch.is_grad_enabled()
    assert_same_bits(torch.get_rng_state(), state)


def test_libraries_take_their_workspaces_before_the_allocator_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(devices, "have_libraries_take_workspaces", lambda device: calls.append("products"))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: calls.append("read") or 512)
    assert allocated_on(torch.device("cuda", 0)) == 512
    assert calls == ["products", "read"]


@pytest.mark.cuda
def test_after_that_products_take_no_more_in_either_thread() -> None:
    """Products by either library, in the caller's thread and in autograd's; memory is read as while tracing."""

    def product() -> None:
        layer(x) @ x

    with torch.device("cuda"):
        layer, x = torch.nn.Linear(256, 256), torch.ones(256, 256)
    gc.collect()  # what tests before it left
    torch._C._cuda_clearCublasWorkspaces()
    with torch.autograd.set_multithreading_enabled(False):
        before = allocated_on(x.device)
    product()
    in_autograds_thread(x.device, product)
    assert torch.accelerator.memory_allocated(x.device) == before


@pytest.mark.cuda
def test_the_first_planned_backward_takes_no_more_than_is_foretold() -> None:
    """The backward runs in autograd's thread, where libraries have taken nothing before."""
    with torch.device("cuda"):
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        x = torch.randn(128, 64)
    torch._C._cuda_clearCublasWorkspaces()
    compiled = checkmate.compile(lambda x: net(x).square().mean(), budget="1 GB")
    loss = compiled(x)
    use = measure_peak(loss.backward, device="cuda")
    assert use.before + use.peak <= compiled.plans[0].peak


def test_a_call_in_autograds_thread_gives_what_it_gives_here() -> None:
    """On the CPU the caller's thread is autograd's; what is raised there is raised here."""
    assert in_autograds_thread(CPU, threading.get_ident) == threading.get_ident()
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        in_autograds_thread(CPU, lambda: 1 // 0)


@pytest.mark.cuda
def test_an_accelerator_has_a_thread_of_autograds() -> None:
    device = torch.device("cuda", 0)
    with torch.autograd.set_multithreading_enabled(False), torch.no_grad():
        assert in_autograds_thread(device, threading.get_ident) != threading.get_ident()
        assert in_autograds_thread(device, torch.is_grad_enabled) is False
        with pytest.raises(ZeroDivisionError):
            in_autograds_thread(device, lambda: 1 // 0)


def test_each_backward_of_attention_on_a_device_adds_in_no_order() -> None:
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    backwards = {name for name in names if "attention" in name and name.endswith("_backward")}
    assert backwards - devices.UNORDERED == {"_scaled_dot_product_flash_attention_for_cpu_backward"}


def test_random_state_comes_back() -> None:
    before = random_states(CPU)
    with devices.same_random_state(CPU):
        torch.rand(3)
    assert_same_bits(random_states(CPU), before)


def test_a_step_on_cuda_is_counted_in_blocks() -> None:
    """A joint graph as AOTAutograd writes it, y = sin(x) and dx = dy cos(x), of 60 bytes each."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    y, slope = (graph.call_function(target, (x,)) for target in (aten.sin.default, aten.cos.default))
    grad = graph.call_function(aten.mul.Tensor, (tangent, slope))
    with FakeTensorMode():
        for node in graph.nodes:
            node.meta["val"] = torch.empty(3, 5, device="cuda:0")
    graph.output((y, grad)).meta["desc"] = [None, None]
    module = fx.GraphModule(torch.nn.Module(), graph)
    joint = read_joint(TracedStep(module, 1), block_bytes=kind_of(device_of(graph)).block_bytes)
    assert [value.size_bytes for value in joint.graph.values] == [512] * 5
    assert joint.resident_bytes == 512


@pytest.mark.cuda
@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_step_on_cuda_keeps_its_budget(share: float) -> None:
    """The budget covers memory in use elsewhere; the certificate compares the numbers with plain PyTorch."""
    with torch.device("cuda"):
        module, step, batch = CASES["vit"].make(0)
        elsewhere = torch.ones(1_000_000)
    problem = checkmate.trace(step, *batch)
    assert problem.resident >= elsewhere.nbytes
    budget = between(problem, share, time_limit=1)
    compiled = checkmate.compile(step, budget=budget, time_limit=1, verify=True)
    compiled(*batch).backward()
    module.zero_grad(set_to_none=True)
    use = measure_peak(lambda: compiled(*batch).backward(), device="cuda")
    assert use.before + use.peak <= budget


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.bfloat16)])
def test_dropout_on_cuda_is_that_of_eager(dtype: torch.dtype) -> None:
    x = torch.rand(64, 65, dtype=dtype, device="cuda", requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        for p in (0.1, 0.37, 0.5):
            x = torch.nn.functional.dropout(x.sin(), p, training=True)
        return (x * x).sum()

    found = []
    for run in (at_smallest_budget(step, x), step):
        torch.manual_seed(3)
        found.append((torch.autograd.grad(run(x), x)[0], torch.cuda.get_rng_state()))
    assert_same_bits(*found)
