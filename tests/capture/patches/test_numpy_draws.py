"""Draws from NumPy's global generator within a step are those of plain PyTorch."""

# ruff: noqa: NPY002

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_refused, compiled, outcome

pytestmark = pytest.mark.usefixtures("forgotten", "one_thread")
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def _spans(shape: tuple[int, int], length: int = 2) -> Any:
    """Draw a mask as SpecAugment does: as many spans as a draw says."""
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        count = int(1 + np.random.rand(1).item() * 2)
        for start in np.random.choice(np.arange(shape[1] - length + 1), count, replace=False):
            row[start : start + length] = True
    return mask


class _Steps:
    """Steps, named by how they draw."""

    def masked(x: Tensor) -> Tensor:
        mask = torch.tensor(_spans((5, 4)), dtype=torch.bool)
        x = x.clone()
        x[mask] = 0
        x[:, torch.tensor(_spans((2, 2), length=1)).any(0).repeat(2)] *= 2
        return (x @ WEIGHT).square().sum()

    def noisy(x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(5, 4)).float() * torch.rand(5, 4)
        order = torch.as_tensor(np.random.permutation(5))
        return ((x + noise) @ WEIGHT)[order].square().cumsum(0).sum()

    def layers_left_out(x: Tensor) -> Tensor:
        for _ in range(3):
            if np.random.rand() < 0.5:
                x = (x @ WEIGHT).tanh()
        return (x @ WEIGHT).square().sum()

    def crops(x: Tensor) -> Tensor:
        """The shape of what is drawn depends on a draw."""
        return (x @ WEIGHT)[torch.as_tensor(_rows())].square().sum() + x.sum() * torch.rand([])

    def seeded_within(x: Tensor) -> Tensor:
        """A seed holds from its place on."""
        first = torch.as_tensor(np.random.permutation(5))
        np.random.seed(3)
        second = torch.as_tensor(np.random.permutation(5))
        return ((x @ WEIGHT)[first].cumsum(0) * x[second]).sum()


def _rows() -> Any:
    return np.random.permutation(5)[: 2 + np.random.randint(2)]


STEPS = [step for name, step in vars(_Steps).items() if name[0] != "_"]


class _Drawing(nn.Module):
    """Draws in a method."""

    def __init__(self, most: Any) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return (x @ WEIGHT)[torch.as_tensor(self.row())].sum() + x.sum()

    def row(self) -> Any:
        return np.random.permutation(self.most)[:3]


@pytest.mark.parametrize("step", [*STEPS, _Drawing(5)])
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor], Tensor]) -> None:
    def train(run: Callable[[Tensor], Tensor]) -> list[Any]:
        torch.manual_seed(0)
        np.random.seed(0)
        return [outcome(run, torch.randn(5, 4, requires_grad=True), leaves=[WEIGHT], seed=None) for _ in range(5)]

    expected, run = train(step), compiled(step, time_limit=0.3)
    assert_same_bits(train(run), expected)
    if step in (_Steps.masked, _Steps.noisy):
        assert len(run.plans) == 1


def test_a_step_that_draws_is_not_called_to_be_captured() -> None:
    """A plain call of a step that takes no arguments would update the statistics of its batch norm."""
    norm, x = nn.BatchNorm1d(4), torch.randn(5, 4)
    twin = copy.deepcopy(norm)

    def step(norm: nn.Module) -> Tensor:
        return norm(x + np.random.rand(5, 4).astype(np.float32)).square().sum()

    found = []
    for run in (lambda: step(twin), compiled(lambda: step(norm))):
        np.random.seed(0)
        found.append(run())
    assert_same_bits((found[1], [*norm.buffers()]), (found[0], [*twin.buffers()]))


def test_a_trace_draws_nothing() -> None:
    before = np.random.get_state()[1:3]
    checkmate.trace(_Steps.noisy, torch.ones(5, 4))
    assert_same_bits(np.random.get_state()[1:3], before)


def test_what_was_captured_is_not_kept() -> None:
    """A function's closure holds its model, which was on the device for as long as the process ran."""
    model = nn.Linear(4, 4)
    alive = weakref.ref(model)

    def step(x: Tensor, model: nn.Module = model) -> Tensor:
        return (lambda: model(x).square().sum())()

    checkmate.trace(step, torch.ones(5, 4))
    torch._dynamo.reset()
    del model, step
    gc.collect()
    assert alive() is None


def _rows_of_arrays() -> list[Any]:
    return [np.random.permutation(np.arange(4.0)) for _ in range(5)]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: (x @ WEIGHT * torch.from_numpy(np.random.permutation(x.detach().numpy()))).sum(),
        lambda x: (x @ WEIGHT * torch.tensor(np.stack(_rows_of_arrays()))).sum(),
        _Drawing(np.arange(5)),
    ],
    ids=["of a tensor", "of an array", "of a module's array"],
)
def test_what_depends_on_tensors_or_arrays_is_refused(step: Callable[[Tensor], Tensor]) -> None:
    assert_refused(step, torch.ones(5, 4), words="Draw with torch")
