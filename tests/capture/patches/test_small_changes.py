"""Small changes to Dynamo: what converts nothing gives the tensor itself; errors of descriptions are refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, assert_each_as_plain, assert_refused, compiled
from tests.support.versions import needs

pytestmark = pytest.mark.usefixtures("forgotten", "one_thread")
NAMES = ("half", "bfloat16", "double", "bool", "byte", "char", "short", "int", "long")


class _Converting(nn.Module):
    """Converts its buffers, in each call, to what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 3))
        self.table = nn.Buffer(torch.linspace(-1, 1, 3))
        self.moved = nn.Buffer(torch.linspace(0, 1, 3), persistent=False)
        for name in NAMES:
            self.register_buffer(f"of_{name}", getattr(torch.ones(3), name)())

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.contiguous().cpu().type(torch.float32).type_as(x).float()
        self.moved = self.moved.to(device=x.device, dtype=x.dtype)
        for name in NAMES:
            setattr(self, f"of_{name}", getattr(getattr(self, f"of_{name}"), name)())
        return (self.scale * x * self.table + self.moved).sum()


def test_a_buffer_that_is_assigned_to_its_name_again_stays_what_it_is() -> None:
    model, x = _Converting(), torch.ones(3)
    buffers, keys = dict(model.named_buffers()), [*model.state_dict()]
    run = compiled(model)
    for _ in range(2):
        assert_same_bits(run(x), _Converting()(x))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert [*model.state_dict()] == keys
    assert len(run.plans) == 1


def test_what_is_converted_is_another_tensor() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        same = [x.float() is x, x.to("cpu") is x, x.contiguous() is x, x.double() is x, x.clone() is x]
        other = x.to(torch.float64, copy=True)
        return (weight * x.contiguous() * other).sum() * (1 + sum(2**i for i, it_is in enumerate(same) if it_is))

    weight, x = torch.linspace(1, 2, 6).view(2, 3).requires_grad_(), torch.linspace(-1, 1, 6)
    assert_each_as_plain(step, (x.view(2, 3), weight), (x.view(3, 2).T, weight), plans=2)


class _FirstHalved(torch.autograd.Function):
    """Its backward takes no scalars."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _backward(grad)


def _backward(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[..., :1] *= 0.5
    return grad


class _Refused:
    """Steps that plain PyTorch computes, and tracing does not."""

    def changed_in_place(weight: Tensor) -> Tensor:
        """Change a view so that AOTAutograd loses a write to a view of it."""
        turned = weight.square().sum(1).clone().view(4)
        turned.unsqueeze_(0)
        turned = turned.mT
        turned.nan_to_num_()
        return turned.sum()

    def of_no_elements(weight: Tensor) -> Tensor:
        """The kernel takes tensors of no elements that its description refuses."""
        nothing = torch.ones(1, 0, 3)
        return F.conv1d(nothing.bfloat16(), nothing[..., :2]).sum() + weight.sum()

    def failing_backward(weight: Tensor) -> Tensor:
        """Plain PyTorch never runs this backward."""
        _FirstHalved.apply(weight.mean())
        return weight.sum()


TAKEN = needs("2.13", "its description takes them, too, and it is planned")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_Refused.changed_in_place, r"unsqueeze_ changed[^$]*test_small_changes.py:\d+[^$]*x\.unsqueeze\(0\)"),
        pytest.param(_Refused.of_no_elements, r"should be the same[^$]*no elements", marks=TAKEN),
        (_Refused.failing_backward, r"too many indices[^$]*runs a backward only[^$]*small_changes"),
    ],
)
def test_what_plain_pytorch_computes_and_tracing_does_not_is_refused(step: Callable[..., Any], words: str) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    step(weight).backward()
    assert_refused(step, weight, words=words)


def test_what_fails_in_plain_pytorch_fails_as_it_does_there() -> None:
    for step, error, words in (
        (lambda w: _backward(w.mean()), IndexError, "too many indices"),  # that is only called backward
        (lambda w: (w * 1).unsqueeze_(0) @ torch.ones(7, 3), RuntimeError, "cannot be multiplied|must match|Expected"),
    ):
        for run in (step, checkmate.compile(step, budget="1 MB")):
            with pytest.raises(error, match=words):
                run(torch.ones(4, 4, requires_grad=True))


def _transposed_in_place(weight: Tensor) -> Tensor:
    """Changed in place as well, and nothing is lost."""
    made = weight * 1
    made.unsqueeze_(0)
    made.transpose_(1, 2)
    return (made @ weight).square().sum()


def test_the_bits_of_plain_pytorch() -> None:
    for step in (
        _transposed_in_place,
        lambda w: w.sum() + F.dropout(torch.zeros(0, 3, dtype=torch.int64), 0.5).sum(),  # nothing is drawn of none
        lambda w: w.sum() + torch.dropout(torch.zeros(0, 3, dtype=torch.int64), 0.5, train=True).sum(),
    ):
        assert_as_plain(step, torch.arange(12.0).view(3, 4).requires_grad_())
