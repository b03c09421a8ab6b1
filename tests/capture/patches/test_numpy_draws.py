"""Draws from NumPy's global generator within a step are those of plain PyTorch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import outcome

pytestmark = pytest.mark.usefixtures("forgotten")
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def _spans(shape: tuple[int, int], length: int = 2) -> Any:
    """As SpecAugment draws its masks: as many spans as a draw says."""

    def count() -> int:
        return int(1 + np.random.rand(1).item() * 2)  # noqa: NPY002

    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        for start in np.random.choice(np.arange(shape[1] - length + 1), count(), replace=False):  # noqa: NPY002
            row[start : start + length] = True
    return mask


class _Steps:
    """By how they draw."""

    def masked(x: Tensor) -> Tensor:
        mask = torch.tensor(_spans((5, 4)), dtype=torch.bool)
        x = x.clone()
        x[mask] = 0
        x[:, torch.tensor(_spans((2, 2), length=1)).any(0).repeat(2)] *= 2
        return (x @ WEIGHT).square().sum()

    def noisy(x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(5, 4)).float() * torch.rand(5, 4)  # noqa: NPY002
        order = torch.as_tensor(np.random.permutation(5))  # noqa: NPY002
        return ((x + noise) @ WEIGHT)[order].square().cumsum(0).sum()

    def layers_left_out(x: Tensor) -> Tensor:
        for _ in range(3):
            if np.random.rand() < 0.5:  # noqa: NPY002
                x = (x @ WEIGHT).tanh()
        return (x @ WEIGHT).square().sum()

    def crops(x: Tensor) -> Tensor:
        """The shape of what is drawn depends on a draw."""
        return (x @ WEIGHT)[torch.as_tensor(_rows())].square().sum() + x.sum() * torch.rand([])

    def seeded_within(x: Tensor) -> Tensor:
        """A seed holds from its place on."""
        first = torch.as_tensor(np.random.permutation(5))  # noqa: NPY002
        np.random.seed(3)  # noqa: NPY002
        second = torch.as_tensor(np.random.permutation(5))  # noqa: NPY002
        return ((x @ WEIGHT)[first].cumsum(0) * x[second]).sum()


def _rows() -> Any:
    return np.random.permutation(5)[: 2 + np.random.randint(2)]  # noqa: NPY002


STEPS = [step for name, step in vars(_Steps).items() if name[0] != "_"]


class _Drawing(nn.Module):
    """Draws in a method."""

    def __init__(self, most: Any) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return (x @ WEIGHT)[torch.as_tensor(self.row())].sum() + x.sum()

    def row(self) -> Any:
        return np.random.permutation(self.most)[:3]  # noqa: NPY002


@pytest.mark.parametrize("step", [*STEPS, _Drawing(5)])
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor], Tensor]) -> None:
    def train(run: Callable[[Tensor], Tensor]) -> list[Any]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        return [outcome(run, torch.randn(5, 4, requires_grad=True), leaves=[WEIGHT], seed=None) for _ in range(5)]

    expected = train(step)
    compiled = checkmate.compile(step, budget="1 MB", time_limit=0.3)
    assert_same_bits(train(compiled), expected)
    if step in (_Steps.masked, _Steps.noisy):
        assert len(compiled.plans) == 1


def test_a_step_that_draws_is_not_called_to_be_captured() -> None:
    """It is given nothing, and a call of it as it is would update the statistics of a batch norm."""
    x, found = torch.randn(5, 4), []
    for wrap in (lambda step: step, lambda step: checkmate.compile(step, budget="1 MB", time_limit=0.3)):
        norm = nn.BatchNorm1d(4)

        def normed(norm: nn.Module = norm) -> Tensor:
            noise = np.random.rand(5, 4)  # noqa: NPY002
            return norm(x + noise.astype(np.float32))

        np.random.seed(0)  # noqa: NPY002
        found.append((wrap(lambda normed=normed: normed().square().sum())(), [*norm.buffers()]))
    assert_same_bits(found[1], found[0])


def test_a_trace_draws_nothing() -> None:
    before = np.random.get_state()[1:3]  # noqa: NPY002
    checkmate.trace(_Steps.noisy, torch.ones(5, 4))
    assert_same_bits(np.random.get_state()[1:3], before)  # noqa: NPY002


def test_what_was_captured_is_not_kept() -> None:
    """A function's closure holds its model, which was on the device for as long as the process ran."""
    model = nn.Linear(4, 4)
    alive = weakref.ref(model)

    def step(x: Tensor, model: nn.Module = model) -> Tensor:
        def inner() -> Tensor:
            return model(x).square().sum()

        return inner()

    checkmate.trace(step, torch.ones(5, 4))
    torch._dynamo.reset()
    del model, step
    gc.collect()
    assert alive() is None


def _of_a_tensor(x: Tensor) -> Tensor:
    return (x @ WEIGHT * torch.from_numpy(np.random.permutation(x.detach().numpy()))).sum()  # noqa: NPY002


def _of_an_array(x: Tensor) -> Tensor:
    return (x @ WEIGHT * torch.tensor(np.stack(_rows_of_arrays()))).sum()


def _rows_of_arrays() -> list[Any]:
    return [np.random.permutation(np.arange(4.0)) for _ in range(5)]  # noqa: NPY002


@pytest.mark.parametrize("step", [_of_a_tensor, _of_an_array, _Drawing(np.arange(5))])
def test_what_depends_on_tensors_or_arrays_is_refused(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Unsupported, match="Draw with torch"):
        checkmate.compile(step, budget="1 MB")(torch.ones(5, 4))
