"""The written modules do what the plan says, copy by copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

import checkmate
from checkmate.codegen.emit import AGAIN
from checkmate.core.plan import Plan, Run
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, lower
from tests.support.plainly import assert_as_plain


def test_a_result_that_an_op_makes_again_is_handed_out_as_it_was_made_first() -> None:
    """The simulator counts so: the first copy stays, and the second is freed at once."""
    x, scale, shift = (torch.randn(size, requires_grad=True) for size in ((4, 8), (8,), (8,)))
    problem = checkmate.trace(
        lambda: F.layer_norm(x.tanh(), (8,), scale, shift).square().sum(), profile="roofline:laptop"
    )
    graph = problem.graph
    (norm,) = (k for k, op in enumerate(graph.ops) if "native_layer_norm_backward" in op.target)
    plan = lower(problem, Schedule.from_runs(graph, np.eye(len(graph.ops), dtype=bool)))
    at = plan.steps.index(Run(norm))
    twice = Plan((*plan.steps[:at], Run(norm), *plan.steps[at:]), plan.boundary)
    assert check_plan(twice, problem) == []

    assert problem.codegen is not None
    module: fx.GraphModule = problem.codegen(twice).backward

    made = [node for node in module.graph.nodes if "native_layer_norm_backward" in str(node.target)]
    assert [AGAIN in node.name for node in made] == [False, True]
    assert not made[1].users


class _Remembered(torch.autograd.Function):
    """A product whose gradient with respect to its second factor is a tensor that the forward made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        made = x.sin()
        ctx.save_for_backward(made)
        return made.exp() * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0]


def test_a_gradient_that_the_forward_made_is_saved() -> None:
    x, w = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    assert_as_plain(lambda x, w: _Remembered.apply(x, w).sum(), x, w)
