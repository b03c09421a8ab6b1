"""Reasons against writing over an argument, one by one; and random programs that write over all they may."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import checkmate
from checkmate.backends.step_problem import joint_of
from checkmate.capture.inplace.aliasing import Candidate, Reason, candidates, reason_against, seen_by_others
from checkmate.capture.inplace.rules import call_over, positions_to_try
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import is_mutating
from checkmate.profiling.one_op import make_up
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain
from tests.support.programs import Program, Spec, batch, programs
from tests.support.sampling import long

aten = torch.ops.aten
PROGRAMS = 10  # of each seed


def _joint(step: Callable[..., Any], *args: Tensor) -> Joint:
    return joint_of(checkmate.trace(step, *args, profile="roofline:laptop"))


def _reasons(step: Callable[..., Any], target: Any, *args: Tensor) -> list[tuple[Reason | None, ...]]:
    """Why each op of a kind must not write over each of its arguments that is like its result."""
    joint = _joint(step, *args)
    seen = seen_by_others(joint)
    return [
        tuple(reason_against(joint, k, node.args[i], seen) for i in positions_to_try(node))
        for k, node in enumerate(joint.nodes)
        if node is not None and node.target is target
    ]


X = torch.randn(6, 8, requires_grad=True)
V = torch.randn(8)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[Reason | None, ...]]] = {  # y is the cosine of x
    "free": (lambda x, y: (y * x.sin()).sum(), (None, None)),
    "input": (lambda x, y: (y * x).sum(), (None, Reason.CALLERS)),
    "broadcast": (lambda x, y: (y * V).sum(), (None,)),
    "read later": (lambda x, y: (y * x.sin()).sum() + 0 * y.sum(), (None, None)),
    "shown": (lambda x, y: ((y * x.sin()).sum(), y), (Reason.HANDED_OUT, None)),
    "view shown": (lambda x, y: ((y * x.sin()).sum(), y[2:]), (Reason.HANDED_OUT, None)),
    "part": (lambda x, y: (y[:3] * x.sin()[:3].clone()).sum(), (Reason.PART, None)),
    "twice": (lambda x, y: (y * y).sum(), (Reason.TWICE, Reason.TWICE)),
    "two views": (lambda x, y: (y.view(8, 6) * y.view(-1).view(8, 6)).sum(), (Reason.OTHER_VIEW,) * 2),
    "transposed": (lambda x, y: (y.t() * x.sin().t()).sum(), (None, None)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_may_write_over_what_only_the_plan_knows(name: str) -> None:
    """In the forward. Whether somebody reads the argument later is not asked: the plan tells."""
    step, expected = PRODUCTS[name]
    assert _reasons(lambda x: step(x, x.cos()), aten.mul.Tensor, X)[0] == expected


def test_a_gradient_that_autograd_hands_in_is_not_written_over() -> None:
    reasons = _reasons(lambda x: x.tanh(), aten.tanh_backward.default, X)
    assert reasons == [(Reason.HELD, Reason.HANDED_OUT)]


def test_ops_of_others_and_what_they_read_are_not_written_over() -> None:
    @torch.library.custom_op("checkmate_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: grad * 2)
    reasons = _reasons(lambda x: (doubled(x.cos()).exp() * x.sin()).sum() + x.cos().exp().sum(), aten.exp.default, X)
    assert reasons == [(Reason.KEPT,), (None,)]
    reasons = _reasons(lambda x: (doubled(x.cos().exp()) * x.sin()).sum(), aten.exp.default, X)
    assert reasons == [(Reason.KEPT,)]


def test_zeros_without_memory_are_not_written_over() -> None:
    """PyTorch refuses to write to them, whatever was added to them or multiplied by them.

    PyTorch folds what is made of them, save what its cache knows from other tensors of such shapes: here the transpose.
    """

    def step(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return (make(x).t() * x.cos().t()).sum()

    FakeTensorMode.cache_clear()
    other = _reasons(lambda x: step(x, torch.sin), aten.mul.Tensor, X)
    found = _reasons(lambda x: step(x, lambda x: aten._efficientzerotensor([6, 8])), aten.mul.Tensor, X)
    assert other[0] == (None, None)
    assert found[0] == (Reason.ZEROS, None)


def test_a_step_with_a_forward_derivative_runs() -> None:
    """Its products are of such zeros: ``dot`` with them is one more."""
    assert_as_plain(
        lambda x: torch.func.jvp(lambda u: (u @ x).square().sum(), (x,), (torch.ones_like(x),))[1],
        torch.arange(1.0, 9.0, requires_grad=True),
        profile="measure",
    )


def test_a_gradient_that_autograd_takes_is_made_over_another() -> None:
    """The result may go to anybody; the argument that is written over must be nobody's."""
    joint = _joint(lambda x, y: ((x @ y).tanh() @ y).sum(), X, torch.randn(8, 8))
    over = {joint.graph.ops[c.op].name: joint.graph.values[c.over].name for c in candidates(joint)}
    assert "tanh_backward" in over


def test_a_loss_that_keeps_the_memory_of_its_terms_is_not_written_over() -> None:
    """PyTorch makes the mean within the storage of all terms: a number behind which many bytes stand."""
    joint = _joint(lambda x: F.mse_loss(x, torch.zeros(6, 8)).exp(), X)
    (k,) = (k for k, op in enumerate(joint.graph.ops) if op.target == "aten.exp.default")
    assert reason_against(joint, k, joint.nodes[k].args[0], {}) is Reason.OTHER_SIZE


def _run(joint: Joint, given: list[Any], over: dict[fx.Node, Candidate]) -> tuple[Any, int]:
    """The outputs of a joint graph, and what is then in its inputs; how often an op has written over an argument."""
    env: dict[fx.Node, Any] = {}
    inputs = [x.clone() if isinstance(x, Tensor) else x for x in given]
    rest, count, nodes = iter(inputs), 0, [*joint.module.graph.nodes]
    last = {v: i for i, n in enumerate(nodes) for a in n.all_input_nodes for v in joint.value_of.get(a, ())}
    torch.manual_seed(7)
    for i, node in enumerate(nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(rest)
        elif node.op == "get_attr":
            env[node] = operator.attrgetter(node.target)(joint.module).clone()
        elif node.op == "output":
            return (args, inputs), count
        else:
            target = node.target
            if node in over and last[over[node].over] == i:
                target, args, kwargs = call_over(target, args, kwargs, over[node].position)
                count += 1
            env[node] = target(*args, **kwargs)
    raise AssertionError("a graph ends in its output")


def _over_and_plain(joint: Joint, position: int) -> int:
    """Compare a step with the same one in which ops write over what goes with them."""
    in_order = sorted(candidates(joint), key=lambda c: c.position, reverse=bool(position))
    over = {joint.nodes[c.op]: c for c in in_order}
    assert not any(map(is_mutating, over))
    vals = [n.meta["val"] for n in joint.module.graph.nodes if n.op == "placeholder"]
    torch.manual_seed(3)
    given = [make_up(val, 4) for val in vals]
    with torch.no_grad():
        expected, none = _run(joint, given, {})
        found, count = _run(joint, given, over)
    assert none == 0
    assert_same_bits(found, expected)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", [0, *map(long, range(1, 12))])
def test_random_programs_that_write_over_all_they_may_have_the_bits_of_plain_ones(first_seed: int) -> None:
    counts: list[int] = []
    quick = {"deadline": None, "database": None, "phases": [Phase.generate], "suppress_health_check": [*HealthCheck]}

    @seed(first_seed)
    @settings(max_examples=PROGRAMS, print_blob=False, **quick)
    @given(programs())
    def compare(spec: Spec) -> None:
        try:
            result = Program(spec)(*batch(spec))
            (result[0] if isinstance(result, tuple) else result).backward()
        except RuntimeError:  # a write to what the backward needs
            return
        joint = _joint(Program(spec), *batch(spec))
        torch._dynamo.reset()
        counts.extend(_over_and_plain(joint, position) for position in (0, 1))

    compare()
    assert sum(counts) > PROGRAMS
