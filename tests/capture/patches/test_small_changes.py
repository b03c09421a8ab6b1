"""Small changes to Dynamo: what converts nothing gives the tensor itself; errors of descriptions are refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.versions import needs


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class _Moving(nn.Module):
    """Moves its buffer to where the input is, in each call."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 3))
        self.table = nn.Buffer(torch.linspace(-1, 1, 3), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(device=x.device, dtype=x.dtype)
        return (self.scale * x * self.table).sum()


def _compiled(step: Any) -> Any:
    return checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_assigned_to_its_name_again_stays_what_it_is(persistent: bool) -> None:
    model, x = _Moving(persistent), torch.ones(3)
    table, keys = model.table, [*model.state_dict()]
    compiled = _compiled(model)
    for _ in range(2):
        assert_same_bits(compiled(x), _Moving(persistent)(x))
    assert model.table is table
    assert [*model.state_dict()] == keys
    assert len(compiled.plans) == 1


OF_TYPE = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}


def test_each_conversion_that_converts_nothing_gives_the_buffer_itself() -> None:
    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(1, 2, 3))
            self.table = nn.Buffer(torch.linspace(-1, 1, 3))
            for name, dtype in OF_TYPE.items():
                self.register_buffer(f"of_{name}", torch.ones(3, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            self.table = self.table.contiguous().cpu().type(torch.float32).type_as(x).float()
            for name in OF_TYPE:
                setattr(self, f"of_{name}", getattr(getattr(self, f"of_{name}"), name)())
            return (self.scale * x * self.table).sum()

    model, x = Converting(), torch.ones(3)
    before = dict(model.named_buffers())
    assert_same_bits(_compiled(model)(x), Converting()(x))
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


def test_what_is_converted_is_another_tensor() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        same = [x.float() is x, x.to("cpu") is x, x.contiguous() is x, x.double() is x, x.clone() is x]
        other = x.to(torch.float64, copy=True)
        return (weight * x.contiguous() * other).sum() * (1 + sum(2**i for i, it_is in enumerate(same) if it_is))

    weight = torch.linspace(1, 2, 6).view(2, 3).requires_grad_()
    compiled = _compiled(step)
    for x in (torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(-1, 1, 6).view(3, 2).T):
        assert_same_bits(compiled(x, weight), step(x, weight))


def test_a_write_to_a_view_of_such_a_view_is_refused() -> None:
    weight = torch.ones(4, 4, requires_grad=True)

    def step() -> Tensor:
        turned = weight.square().sum(1).clone().view(4)
        turned.unsqueeze_(0)
        turned = turned.mT
        turned.nan_to_num_()
        return turned.sum()

    assert step() == 16
    with pytest.raises(
        checkmate.Unsupported, match=r"unsqueeze_ changed[^$]*test_small_changes.py:\d+[^$]*x\.unsqueeze\(0\)"
    ):
        checkmate.compile(step, budget="1 MB")()


def test_what_is_not_lost_is_captured() -> None:
    weight = torch.arange(12.0).view(3, 4).requires_grad_()

    def step() -> Tensor:
        made = weight * 1
        made.unsqueeze_(0)
        made.transpose_(1, 2)
        return (made @ weight).square().sum()

    found = [torch.autograd.grad(run(), weight) for run in (checkmate.compile(step, budget="1 MB"), step)]
    assert_same_bits(*found)
    with pytest.raises(RuntimeError, match=r"cannot be multiplied|must match|Expected size"):
        checkmate.compile(lambda: (weight * 1).unsqueeze_(0) @ torch.ones(7, 3), budget="1 MB")()


@needs("2.13", "its description takes them, too, and it is planned")
def test_what_a_kernel_takes_of_no_elements_is_refused() -> None:
    weight, nothing = torch.ones(1, 3, 2, requires_grad=True), torch.ones(1, 0, 3)

    def step() -> Tensor:
        return F.conv1d(nothing.bfloat16(), nothing[..., :2]).sum() + weight.sum()

    assert step() == 6
    with pytest.raises(checkmate.Unsupported, match=r"should be the same[^$]*no elements"):
        checkmate.compile(step, budget="1 MB")()


class _FirstHalved(torch.autograd.Function):
    """Its backward takes no scalars."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _first_halved(grad.clone())


def _first_halved(grad: Tensor) -> Tensor:
    grad[..., :1] *= 0.5
    return grad


def test_a_backward_that_would_fail_and_never_runs_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step() -> Tensor:
        _FirstHalved.apply(weight.mean())
        return weight.sum()

    step().backward()
    with pytest.raises(checkmate.Unsupported, match=r"too many indices[^$]*runs a backward only[^$]*small_changes"):
        checkmate.compile(step, budget="1 MB")()


def test_a_function_that_is_only_called_backward_fails_as_it_does_plainly() -> None:
    weight = torch.ones(3, requires_grad=True)

    def backward() -> Tensor:
        return _first_halved(weight.mean().clone())

    for run in (backward, checkmate.compile(lambda: backward(), budget="1 MB")):
        with pytest.raises(IndexError, match="too many indices"):
            run()


@pytest.mark.parametrize("dropout", [lambda x: F.dropout(x, 0.5), lambda x: torch.dropout(x, 0.5, train=True)])
def test_dropout_of_nothing_is_of_any_type(dropout: Callable[[Tensor], Tensor]) -> None:
    """Of integers plain PyTorch draws nothing, if there are none of them."""
    weight, nothing = torch.ones(3, requires_grad=True), torch.zeros(0, 3, dtype=torch.int64)

    def step() -> Tensor:
        return weight.sum() + dropout(nothing).sum()

    assert_same_bits(_compiled(step)(), step())
