"""Results that nobody differentiates: as in plain PyTorch, they leave no trace in the gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_alike

Step = Callable[..., tuple[Tensor, ...]]
_compiled: Callable[[Any], Any] = partial(checkmate.compile, budget="1 MB")


def _grads(step: Step, weights: list[Tensor], used: tuple[int, ...]) -> list[Tensor | None]:
    for weight in weights:
        weight.grad = None
    results = step(*weights)
    torch.stack([results[i].sum() for i in used]).sum().backward()
    return [w.grad for w in weights]


class _Steps:
    """Steps of two weights, with two results each."""

    def zero_times_infinity(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = w * v
        return (y * y).sum(), y.sqrt()

    def minus_zero(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = w * -1.0
        return (y * v.detach() * 0.0).sum(), y * 2

    def own_parameter(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (w * 2).sum(), (w * v).sum()

    def view(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = w * v
        return (y * y).sum(), y[1:]

    def parts(w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Join both kinds of gradient by an op that is no sum."""
        return tuple((w * v).exp().split([1, 2]))


@pytest.mark.parametrize("name", [name for name in vars(_Steps) if name[0] != "_"])
def test_gradients_are_those_of_plain_pytorch(name: str) -> None:
    step = getattr(_Steps, name)
    weights = [torch.tensor([0.0, 1.0, 2.0], requires_grad=True), torch.ones(3, requires_grad=True)]
    compiled = _compiled(step)
    for used in ((1,), (0, 1), (1,), (0,), (0, 1), (0,)):  # the whole backward is still there afterwards
        assert_same_bits(_grads(compiled, weights, used), _grads(step, weights, used))


def test_a_parameter_that_no_loss_reaches_is_not_decayed() -> None:
    """With zeros for a gradient, weight decay would shrink it."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    step = _compiled(lambda x: (body(x).sum(), head(body(x))))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, weight_decay=0.5)
    before = head.weight.detach().clone()
    step(torch.ones(3, 4))[0].backward()
    optimizer.step()
    assert head.weight.grad is None
    assert_same_bits(head.weight, before)


class _Twice(torch.autograd.Function):
    """A function that makes zeros of an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_what_a_step_never_differentiates_is_left_alone() -> None:
    """Hooks of tensors that are only read or handed out are not called, and their sources have no gradient."""
    trained, read, source, shown = (torch.ones(3, requires_grad=True) for _ in range(4))
    made, seen = _Twice.apply(source), []

    @_compiled
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return (trained * x * read.detach() * made.detach()).sum(), shown.detach().view(3, 1)

    for tensor in (trained, read, made, shown):
        tensor.register_hook(lambda grad: seen.append(grad.sum().item()))
    loss, detached = step(torch.ones(3))
    loss.backward()
    assert seen == [6.0]
    assert read.grad is source.grad is shown.grad is None
    assert_same_bits(detached, torch.ones(3, 1))
    torch.autograd.backward((step(torch.ones(3))[0], read.sum()))
    assert seen[1:] == [3.0, 6.0]


def test_a_step_that_leads_to_no_gradient_can_be_differentiated() -> None:
    """The sign of a determinant needs one, and has none for the matrix."""
    matrix = torch.eye(3, requires_grad=True)
    _compiled(lambda: torch.slogdet(matrix)[0] * 2.0)().backward()
    assert matrix.grad is None


def test_a_buffer_that_holds_the_graph_of_the_step_before() -> None:
    """It is overwritten by what needs a gradient, and the loss does not depend on it: plain PyTorch trains."""
    weight = torch.ones(3, requires_grad=True)

    def step(buffer: Tensor) -> Tensor:
        buffer.copy_(weight.mean())
        return weight.square().sum()

    for run in (step, _compiled(step)):
        weight.grad, buffer = None, torch.zeros(2, 3)
        for _ in range(3):
            run(buffer).backward()
        assert_same_bits(weight.grad, torch.full((3,), 6.0))
        assert buffer.requires_grad


def test_a_gradient_that_leads_back_into_an_earlier_call_is_refused() -> None:
    """Plain PyTorch trains: the subtraction saves nothing. A second backward of one call is PyTorch's error."""
    weight, buffer = torch.ones(3, requires_grad=True), torch.zeros(3)

    @_compiled
    def step(buffer: Tensor) -> Tensor:
        buffer.sub_(weight)
        return buffer.sin().sum()

    step(buffer).backward()
    loss = step(buffer)
    with pytest.raises(Unsupported, match=r"value\.detach\(\)"):
        loss.backward()
    again = step(torch.zeros(3))
    again.backward()
    with pytest.raises(RuntimeError, match="second time"):
        again.backward()


def test_a_gradient_of_zeros_is_one_where_another_is_not_defined() -> None:
    """The gradient of ``round`` depends on none that is handed in, and a second result has none."""
    x = torch.tensor([1.2, -0.7], requires_grad=True)
    step = lambda: (x.round().sum(), F.hardsigmoid(x))  # noqa: E731
    assert_alike(lambda run: torch.autograd.grad(run()[0], x), _compiled(step), step)


def test_an_earlier_compiled_step_is_left_as_it_is() -> None:
    """A compiled step of PyTorch before ours still gets its zeros."""
    before = torch.compile(lambda w: (w * 2, w.exp()), backend="aot_eager")
    after = _compiled(lambda y: (y * 3).sum())
    w = torch.ones(3, requires_grad=True)
    y, _ = before(w)
    after(y).backward()
    assert_same_bits(w.grad, torch.full((3,), 6.0))


def test_a_batch_of_gradients_is_refused() -> None:
    """Kernels of a batch are chosen by which saved tensors require a gradient: on some processors bits were others."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    x, rows = torch.randn(4, 8), torch.randn(3, 4, 8)
    step = _compiled(net)
    with pytest.raises(Unsupported, match="Take the gradients one after another"):
        torch.autograd.grad(step(x), [*net.parameters()], rows, is_grads_batched=True)
    assert_alike(lambda run: [torch.autograd.grad(run(x), [*net.parameters()], row) for row in rows], step, net)


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "sums of rows": (lambda y: y.sum(-1).square().sum(), True),
    "a product with the transposed": (lambda y: (y.t() @ torch.ones(len(y), 3)).square().sum(), False),
    "cross entropy": (lambda y: F.cross_entropy(y, torch.arange(len(y)) % 8), False),
}


@pytest.mark.parametrize(("loss", "is_told"), LOSSES.values(), ids=LOSSES)
def test_a_gradient_that_is_laid_out_anew_is_told_once(
    loss: Callable[[Tensor], Tensor], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels sum an expanded gradient in another order; one loss within the step is a gradient of one number."""
    net, x = nn.Linear(16, 8), torch.randn(64, 16)
    step = _compiled(net)
    for _ in range(2):
        loss(step(x)).backward()
    _compiled(lambda x: loss(net(x)))(x).backward()
    told = [record.getMessage() for record in caplog.records if "laid out anew" in record.getMessage()]
    assert len(told) == is_told
    assert all("of shape (64, 8)" in message for message in told)
