"""What is read from a joint graph: ops, values, views, phases, pins, and where it all comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkmate
from checkmate.backends.capture_cache import capture
from checkmate.backends.compilation import Backend
from checkmate.backends.step_problem import joint_of
from checkmate.capture.provenance import module_path
from checkmate.core.graph import Graph, Op
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.memory import measure_peak
from checkmate.solvers.solve import solve
from tests.support.versions import needs


def _graph(fn: object, *args: Tensor) -> Graph:
    return checkmate.trace(fn, *args).graph


def _op(graph: Graph, target: str, phase: str = "forward") -> Op:
    return next(op for op in graph.ops if target in op.target and op.phase == phase)


def test_views_are_no_ops_and_share_the_value() -> None:
    weight = torch.randn(8, 6, requires_grad=True)
    graph = _graph(lambda x: (x @ weight.t()).view(4, 2, 4).transpose(1, 2).unsqueeze(0).sin().sum(), torch.randn(4, 6))
    assert [op.target.split(".")[1] for op in graph.ops if op.phase == "forward" and "aten" in op.target] == [
        "mm",
        "sin",
        "sum",
    ]
    product, sine = graph.ops[0], graph.ops[1]
    assert sine.inputs == product.outputs
    assert graph.values[product.outputs[0]].size_bytes == 4 * 8 * 4


def test_multi_output_ops_have_a_value_for_each_output() -> None:
    x = torch.randn(4, 10, requires_grad=True)
    graph = _graph(lambda x: x.sort(dim=1).values.sum(), x)
    sort = _op(graph, "sort")
    sizes = [graph.values[v].size_bytes for v in sort.outputs]
    assert sizes == [4 * 10 * 4, 4 * 10 * 8]
    assert len(graph.users[sort.outputs[1]]) == 1  # the indices, by the backward
    assert len(graph.users[sort.outputs[0]]) == 1  # the values, by the sum


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y, reduction="sum"),
    "mse of broadcast": lambda x, y: F.mse_loss(x, y[:1]),
    "mse without a reduction": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_holds_the_storage_of_its_terms(name: str, one_thread: None) -> None:
    """What is one number for a fake tensor is, in four kernels, one within the storage of all terms."""
    net, x, y = nn.Linear(96, 32), torch.randn(64, 96), torch.rand(64, 32)
    step = checkmate.compile(lambda x, y: LOSSES[name](net(x), y), budget="1 MB", time_limit=1)
    step(x, y).backward()
    net.zero_grad()
    (plan,) = step.plans
    assert plan.peak == plan.problem.resident + measure_peak(lambda: step(x, y).backward()).peak


def test_a_step_traced_again_has_the_same_bytes() -> None:
    """Writing into a part of a tensor copies all of it. PyTorch's cache of fake results makes only the part."""

    def step(x: Tensor) -> Tensor:
        copy = x.sin()
        part = copy[:, 2:6]
        part[0].mul_(2)
        part[:, 1:] = x[:, :3].cos()
        return copy.exp().square().sum()

    x = torch.randn(8, 64, requires_grad=True)
    sizes = []
    for _ in range(3):
        torch._dynamo.reset()
        sizes.append([value.size_bytes for value in checkmate.trace(step, x).graph.values])
    assert sizes[1] == sizes[0]
    assert sizes[2] == sizes[0]


def test_roles_and_resident_bytes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5))
    x = torch.randn(7, 6)
    problem = checkmate.trace(lambda x: net(x).square().sum(), x)
    assert {"0.weight", "1.running_var", "args.0"} <= {value.name for value in problem.graph.values}
    roles = {}
    for value in problem.graph.values:
        roles.setdefault(value.role, []).append(value.size_bytes)
    assert sorted(roles["parameter"]) == [20, 20, 5 * 6 * 4]
    assert sorted(roles["buffer"]) == [8, 20, 20]
    assert roles["input"] == [7 * 6 * 4]
    assert roles["tangent"] == [4]
    assert problem.resident == sum(t.nbytes for t in [*net.parameters(), *net.buffers(), x])


def test_tied_parameters_and_inputs_count_once() -> None:
    weight = nn.Parameter(torch.randn(16, 16))
    x = torch.randn(16, 16)
    problem = checkmate.trace(lambda a, b: (a @ weight + b[:4].sum() * weight).sum(), x, x)
    assert problem.resident == weight.nbytes + x.nbytes


def test_pinned_ops_say_why() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))
    scale = torch.ones(5)

    def step(x: Tensor) -> Tensor:
        y = net(x) + scale.exp()
        scale.mul_(2)
        return (y + torch.rand_like(y)).square().sum()

    graph = _graph(step, torch.randn(7, 6))
    assert _op(graph, "draw_mask").pinned == "draws random numbers"
    assert _op(graph, "draw_mask").target == "checkmate.draw_mask"  # without an address in memory
    assert _op(graph, "rand_like").pinned == "draws random numbers"
    assert "overwrites" in (_op(graph, "exp").pinned or "")
    assert (_op(graph, "copy_").pinned or "").startswith("overwrites")
    assert "1.running_mean" in (_op(graph, "copy_").pinned or "")
    assert _op(graph, "autograd").pinned == "is handed in by autograd"
    assert _op(graph, "batch_norm").pinned is None  # its results do not depend on the running statistics
    assert _op(graph, "addmm").pinned is None


def test_attention_without_dropout_is_not_random() -> None:
    q = torch.randn(2, 2, 8, 4, requires_grad=True)
    graph = _graph(lambda q: F.scaled_dot_product_attention(q, q, q).sum(), q)
    assert _op(graph, "attention").pinned is None


def test_phases_and_the_place_of_what_only_the_backward_needs() -> None:
    """A mask that only the backward reads stands next to its reader, not where the forward ended."""
    x = torch.randn(5, 5, requires_grad=True)
    graph = _graph(lambda x: F.hardtanh(F.hardtanh(x).sin() * 3).sum(), x)
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, reverse=True)  # forward, then backward
    assert graph.ops[graph.forward_length - 1].name == "tangents"
    assert {op.target.split(".")[1] for op in graph.ops if op.phase == "backward"} >= {"hardtanh_backward", "cos"}


def test_results_are_outputs_tangents_and_gradients() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    graph = _graph(lambda a, b: (a @ b).sum(), a, b)
    sizes = sorted(graph.values[v].size_bytes for v in graph.outputs)
    assert sizes == sorted([4, 4, a.nbytes, b.nbytes])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_ops_name_their_module_and_line() -> None:
    block = _Block()
    for fn in (block, lambda x: block(x)):
        where = [op.where or "" for op in _graph(fn, torch.randn(2, 4)).ops if "addmm" in op.target]
        assert [w.split()[0].removeprefix("block.") for w in where] == ["layers.0", "layers.1"]
        assert all("Linear, test_joint.py:" in w for w in where)


@pytest.mark.parametrize(
    ("traced", "read"),
    [
        ("L['fn'].__closure__[0].cell_contents._modules['layer1'][0].conv", "layer1.0.conv"),
        ("L['args'][0]._modules['2']", "2"),
        ("L['fn']", ""),
        ("G['__import_train_dot_main'].model.head", "model.head"),
        ("G['net']._modules['1']._buffers['running_mean']", "net.1.running_mean"),
        ("L['self'].encoder._orig_mod.layer[3]", "encoder.layer.3"),
    ],
)
def test_module_paths_as_people_write_them(traced: str, read: str) -> None:
    assert module_path(traced) == read


def test_collectives_run_once() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:

        def step(x: Tensor) -> Tensor:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            return (x - mean).tanh().sum()

        talking = [op for op in _graph(step, torch.randn(4, 3, requires_grad=True)).ops if "c10d" in op.target]
    finally:
        dist.destroy_process_group()
    assert [op.pinned for op in talking] == ["exchanges data with other ranks"]  # launch and wait are one op


@needs("2.13", "the backward of this op does not look, and is planned")
def test_a_side_effect_within_the_backward_is_refused() -> None:
    """The backward of this op looks whether its matrix could be inverted."""
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(checkmate.Unsupported, match=r"test_joint.py:\d+: aten\._linalg_check_errors.* side effect"):
        checkmate.trace(lambda x: torch.linalg.eig(x)[0].abs().sum(), x)


@pytest.mark.parametrize("factorize", [torch.linalg.cholesky, torch.linalg.inv])
def test_a_side_effect_within_the_forward_is_no_parameter(factorize: Callable[[Tensor], Tensor]) -> None:
    """The check that a matrix can be inverted is handed a token before all inputs, which has no gradient."""
    x = torch.eye(6) + 0.1 * torch.ones(6, 6)
    report = checkmate.verify(lambda x: factorize(x).square().sum(), x.requires_grad_(), budget="1 MB", time_limit=1)
    assert report.gradients == 1
    assert report.measured_peak == report.predicted_peak


def test_constants_that_nothing_reads_are_let_go() -> None:
    """Their bytes would be held beside the plan's: of a number in a tensor that is read while the step is captured."""
    weight = torch.randn(8, requires_grad=True)
    held: list[list[str]] = []

    def planner(problem: Problem) -> Solution:
        held.append([name for name, _ in joint_of(problem).module.named_buffers()])
        return solve(problem, problem.keep_all_peak, method="checkpoint-all")

    for step, expected in (
        (lambda x: (weight * x * torch.tensor(2.0)).sum(), 1),
        (lambda x: (weight * x)[torch.tensor(3)].sum(), 0),
    ):
        capture(step, Backend(planner))(torch.ones(8))
        assert len(held.pop()) == expected


@pytest.mark.usefixtures("one_thread")
def test_a_number_that_is_made_a_tensor_is_captured() -> None:
    """As `torch.func.vmap` does of the two, where nothing is differentiated."""
    mask, weight = torch.ones(4), torch.randn(4, requires_grad=True)
    certificate = checkmate.verify(lambda w: (w * torch.func.vmap(lambda row: row.softmax(0) * 2)(mask)).sum(), weight)
    assert certificate.repeats
