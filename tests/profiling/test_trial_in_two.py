"""A convolution's backward is taken apart where a trial leaves the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.profiling import trial
from checkmate.profiling.trial import same_in_two
from tests.support.bits import assert_same_bits

aten = torch.ops.aten


def backward_of(x: torch.Size, weight: torch.Size, *, bias: bool = True) -> Any:
    """The node of a convolution's backward."""

    def step(*args: torch.Tensor) -> Any:
        return torch.autograd.grad(F.conv2d(*args).sum(), args)

    tensors = [torch.randn(shape, requires_grad=True) for shape in (x, weight, weight[:1])[: 2 + bias]]
    graph = make_fx(step, tracing_mode="fake")(*tensors).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    return node


@pytest.mark.parametrize("bias", [True, False])
def test_the_two_gradients_are_the_same_apart(bias: bool) -> None:
    node = backward_of(torch.Size([4, 3, 9, 9]), torch.Size([5, 3, 3, 3]), bias=bias)
    before = torch.get_rng_state()
    assert same_in_two(node)
    assert_same_bits(torch.get_rng_state(), before)


def test_other_bits_and_ops_that_do_not_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_known", {})
    node = backward_of(torch.Size([2, 2, 7, 7]), torch.Size([3, 2, 3, 3]))
    real = node.target

    def other(*args: Any) -> Any:
        results = real(*args)
        return (*results[:1], results[1] + 1e-6, *results[2:]) if args[-1] == [True, True, True] else results

    node.target = other
    assert not same_in_two(node)

    monkeypatch.setattr(trial, "_known", {})
    node.target = real
    monkeypatch.setattr(trial, "call_of", lambda node: partial(real, 1, 2, [True, True, True]))
    assert not same_in_two(node)
