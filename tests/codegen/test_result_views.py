"""Results that are views of one value: their gradients are those of plain PyTorch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from checkmate.backends.tensor_state import same_bits
from checkmate.errors import Unsupported
from tests.support.plainly import compiled

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
MOMENTS = {
    "features and flat features": lambda r: r[1].sin().sum() + r[2].exp().sum(),
    "the loss alone": lambda r: r[0],
    "the loss and the value": lambda r: r[0] + r[1].sin().sum() + r[1].exp().sum(),
    "the loss and the view": lambda r: r[0] + r[2].sin().sum(),
    "all of them": lambda r: r[0] + r[1].sin().sum() + r[2].exp().sum(),
}


class _Steps:
    """Steps of a batch and a weight, whose results share memory."""

    def features(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        flat = y.view(-1)
        return flat.tanh().sum(), y, flat

    def three_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        return y.exp().sum() + y.sin().sum(), y.t(), y.view(-1)

    def one_view(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        flat = y.view(-1)
        return (flat * flat.sin()).exp().sum() + (y * y).sum(), w * 2, flat

    def parts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q, k = (x @ w).chunk(2, -1)
        return (q * k * q).sum(), q, k


def _gradient(step: Step, loss: Callable[[Any], Tensor]) -> Tensor:
    torch.manual_seed(0)
    x, w = torch.randn(6, 6), (torch.randn(6, 6) * 0.2).requires_grad_()
    (grad,) = torch.autograd.grad(loss(step(x, w)), w)
    return grad


REFUSED = {
    "features": ["all of them"],
    "three_views": ["the loss and the value", "the loss and the view", "all of them"],
}


@pytest.mark.parametrize("name", [name for name in vars(_Steps) if name[0] != "_"])
def test_gradients_are_those_of_plain_pytorch_or_refused(name: str) -> None:
    step: Step = getattr(_Steps, name)
    run = compiled(step, cache=False)
    for moment, loss in MOMENTS.items():
        if moment in REFUSED.get(name, []):
            with pytest.raises(Unsupported, match=r"views of one value, of shape \(6, 6\).*outside"):
                _gradient(run, loss)
        else:
            assert same_bits(_gradient(run, loss), _gradient(step, loss)), moment
