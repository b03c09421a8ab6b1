"""A joint graph is read as ops, values, views, phases and pins, each with the line that it comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends.step_problem import joint_of
from checkmate.core.graph import Graph, Op
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from tests.support.plainly import verify_to_the_byte
from tests.support.versions import needs


def _graph(step: object, *batch: Tensor) -> Graph:
    return checkmate.trace(step, *batch).graph


def _op(graph: Graph, target: str, phase: str = "forward") -> Op:
    return next(op for op in graph.ops if target in op.target and op.phase == phase)


def test_views_are_no_ops_and_share_the_value() -> None:
    weight = torch.randn(8, 6, requires_grad=True)
    graph = _graph(lambda x: (x @ weight.t()).view(4, 2, 4).transpose(1, 2).unsqueeze(0).sin().sum(), torch.randn(4, 6))
    names = [op.target.split(".")[1] for op in graph.ops if op.phase == "forward" and "aten" in op.target]
    assert names == ["mm", "sin", "sum"]
    product, sine, *_ = graph.ops
    assert sine.inputs == product.outputs
    assert graph.values[product.outputs[0]].size_bytes == 4 * 8 * 4


def test_multi_output_ops_have_a_value_for_each_output() -> None:
    x = torch.randn(4, 10, requires_grad=True)
    graph = _graph(lambda x: x.sort(dim=1).values.sum(), x)
    outputs = _op(graph, "sort").outputs
    assert [graph.values[v].size_bytes for v in outputs] == [4 * 10 * 4, 4 * 10 * 8]
    assert [len(graph.users[v]) for v in outputs] == [1, 1]  # values are read by the sum, indices by the backward


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
    """Four kernels return one number within the storage of all terms; a fake tensor says that it is alone."""
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

    x, sizes = torch.randn(8, 64, requires_grad=True), []
    for _ in range(3):
        torch._dynamo.reset()
        sizes.append([value.size_bytes for value in checkmate.trace(step, x).graph.values])
    assert sizes[0] == sizes[1] == sizes[2]


def test_roles_and_resident_bytes() -> None:
    net, x = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5)), torch.randn(7, 6)
    problem = checkmate.trace(lambda x: net(x).square().sum(), x)
    assert {"0.weight", "1.running_var", "args.0"} <= {value.name for value in problem.graph.values}
    expected = {"parameter": [20, 20, 5 * 6 * 4], "buffer": [8, 20, 20], "input": [7 * 6 * 4], "tangent": [4]}
    roles = {role: sorted(v.size_bytes for v in problem.graph.values if v.role == role) for role in expected}
    assert roles == expected
    assert problem.resident == sum(t.nbytes for t in [*net.parameters(), *net.buffers(), x])


def test_tied_parameters_and_inputs_count_once() -> None:
    weight, x = nn.Parameter(torch.randn(16, 16)), torch.randn(16, 16)
    problem = checkmate.trace(lambda a, b: (a @ weight + b[:4].sum() * weight).sum(), x, x)
    assert problem.resident == weight.nbytes + x.nbytes


def test_pinned_ops_say_why() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3))
    scale = torch.ones(5)

    def step(x: Tensor) -> Tensor:
        y = net(x) + scale.exp()
        scale.mul_(2)
        y = F.scaled_dot_product_attention(*[y.view(1, 1, 7, 5)] * 3)
        return (y + torch.rand_like(y)).square().sum()

    graph = _graph(step, torch.randn(7, 6))
    assert _op(graph, "draw_mask").target == "checkmate.draw_mask"  # without an address in memory
    assert "overwrites" in (_op(graph, "exp").pinned or "")
    assert (_op(graph, "copy_").pinned or "").startswith("overwrites")
    assert "1.running_mean" in (_op(graph, "copy_").pinned or "")
    for target, pinned in {
        "draw_mask": "draws random numbers",
        "rand_like": "draws random numbers",
        "autograd": "is handed in by autograd",
        "batch_norm": None,  # its results do not depend on the running statistics
        "addmm": None,
        "attention": None,  # without dropout
    }.items():
        assert _op(graph, target).pinned == pinned


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


def test_ops_name_their_module_and_line() -> None:
    class Block(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    block = Block({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    for fn in (block, lambda x: block(x)):
        where = [op.where or "" for op in _graph(fn, torch.randn(2, 4)).ops if "addmm" in op.target]
        assert [w.split()[0].removeprefix("block.") for w in where] == ["layers.0", "layers.1"]
        assert all("Linear, test_joint.py:" in w for w in where)


@needs("2.13", "the backward of this op does not look, and is planned")
def test_a_side_effect_within_the_backward_is_refused() -> None:
    """The backward of this op looks whether its matrix could be inverted."""
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(Unsupported, match=r"test_joint.py:\d+: aten\._linalg_check_errors.* side effect"):
        checkmate.trace(lambda x: torch.linalg.eig(x)[0].abs().sum(), x)


def test_a_side_effect_within_the_forward_is_no_parameter() -> None:
    """The check that a matrix can be inverted is handed a token before all inputs, which has no gradient."""
    x = (torch.eye(6) + 0.1 * torch.ones(6, 6)).requires_grad_()
    for step in (lambda x: torch.linalg.cholesky(x).square().sum(), lambda x: torch.linalg.inv(x).square().sum()):
        assert verify_to_the_byte(step, x, budget="1 MB").gradients == 1


def test_constants_that_nothing_reads_are_let_go() -> None:
    """Their bytes would be held beside the plan's: of a number in a tensor that is read while the step is captured."""
    weight = torch.randn(8, requires_grad=True)
    for step, held in (
        (lambda x: (weight * x * torch.tensor(2.0)).sum(), 1),
        (lambda x: (weight * x)[torch.tensor(3)].sum(), 0),
    ):
        problem = checkmate.trace(step, torch.ones(8), profile="roofline:h100")
        assert len([*joint_of(problem).module.named_buffers()]) == held


@pytest.mark.usefixtures("one_thread")
def test_a_number_that_is_made_a_tensor_is_captured() -> None:
    """As `torch.func.vmap` does of the two, where nothing is differentiated."""
    mask, weight = torch.ones(4), torch.randn(4, requires_grad=True)
    certificate = checkmate.verify(lambda w: (w * torch.func.vmap(lambda row: row.softmax(0) * 2)(mask)).sum(), weight)
    assert certificate.repeats
