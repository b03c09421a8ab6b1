"""Gradients that pass from one result to another in plain PyTorch are refused, not silently left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkmate.codegen.refused_backwards import computed_from
from checkmate.errors import Unsupported
from tests.support.plainly import assert_alike, compiled

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_a_watched_result_below_the_loss_is_refused(net: nn.Module) -> None:
    @compiled
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return F.cross_entropy(logits, y), logits

    for watch in (Tensor.retain_grad, lambda logits: logits.register_hook(lambda grad: None)):
        for with_logits in (False, True):
            loss, logits = step(X, Y)
            watch(logits)
            with pytest.raises(Unsupported, match=r"of shape \(6, 4\).*hook within the step"):
                (loss + logits.sum() if with_logits else loss).backward()


def test_what_a_hook_within_the_step_sees_is_that_of_plain_pytorch(net: nn.Module) -> None:
    """The error advises such a hook."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        logits.register_hook(lambda grad: grad * 2)
        return F.cross_entropy(logits, y), logits

    assert_alike(lambda run: torch.autograd.grad(run(X, Y)[0], [*net.parameters()]), compiled(step), step)


def test_where_the_gradient_comes_from_outside_it_is_that_of_plain_pytorch(net: nn.Module) -> None:
    """A result that is computed from the logits does not matter if nobody differentiates it."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return logits, logits.softmax(1)

    def gradient(run: Callable[..., tuple[Tensor, Tensor]]) -> Tensor | None:
        logits, _ = run(X)
        logits.retain_grad()
        F.cross_entropy(logits, Y).backward()
        return logits.grad

    assert_alike(gradient, compiled(step), step)


def test_results_side_by_side_or_detached_may_be_watched(net: nn.Module) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = net(x)
        return logits * 2, logits + 1, (logits * 2).detach().exp() * logits

    def gradients(run: Callable[..., tuple[Tensor, ...]]) -> list[Tensor | None]:
        results = run(X)
        for result in results[:2]:
            result.retain_grad()
        torch.stack([result.sum() for result in results]).sum().backward()
        return [result.grad for result in results[:2]]

    assert_alike(gradients, compiled(step), step)


def test_a_step_whose_graph_hands_on_a_token_of_effects() -> None:
    """`torch.linalg` checks what it has computed, by an op with an effect: results come after its token."""
    matrix = torch.eye(3, requires_grad=True)

    @compiled
    def step() -> tuple[Tensor, Tensor]:
        factor = torch.linalg.cholesky(matrix + matrix.mH)
        return (factor * 2).sum(), factor

    loss, factor = step()
    factor.register_hook(lambda grad: None)
    with pytest.raises(Unsupported, match="has a hook"):
        loss.backward()


def test_computed_from() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.exp.default, (x,))
    b = graph.call_function(torch.ops.aten.sin.default, (a,))
    c = graph.call_function(torch.ops.aten.detach.default, (b,))
    d = graph.call_function(torch.ops.aten.add.Tensor, (b, a))
    e = graph.call_function(torch.ops.aten.exp.default, (c,))
    graph.output((a, None, d, b, e, c))
    assert computed_from(graph, 5) == {0: (2, 3), 3: (2,)}
