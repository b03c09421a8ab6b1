"""The loss of connectionist temporal classification, with the bits and the bytes of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits

CASES = {
    "sum": ((6, 2, 5), torch.tensor([[1, 2, 3], [2, 2, 0]]), (6, 5), (3, 2)),
    "none": ((6, 2, 5), torch.tensor([1, 2, 3, 2, 1]), (6, 5), (3, 2)),
    "one": ((12, 5), torch.tensor([1, 2, 3]), (12,), (3,)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_lengths_that_are_numbers(name: str) -> None:
    shape, targets, lengths, target_lengths = CASES[name]
    model = nn.Linear(4, 5)

    def step(x: Tensor) -> Tensor:
        log_probs = model(x).view(shape).log_softmax(-1)
        reduction = name if name == "none" else "sum"
        return F.ctc_loss(log_probs, targets, lengths, target_lengths, reduction=reduction, zero_infinity=True).sum()

    report = checkmate.verify(step, torch.randn(12, 4), budget="1 MB", time_limit=1)
    assert report.gradients == 2
    assert report.predicted_peak == report.measured_peak


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_that_depend_on_an_input(reduction: str) -> None:
    """As models of transformers compute them, of labels that are padded, with cuDNN turned off."""
    model = nn.Linear(4, 5)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        log_probs = model(x).view(6, 2, 5).log_softmax(-1)
        mask = labels > 0
        with torch.backends.cudnn.flags(enabled=False):
            loss = F.ctc_loss(
                log_probs,
                labels.masked_select(mask),
                torch.full((2,), 6) - mask[:, 2].long(),
                mask.sum(-1),
                reduction=reduction,
                zero_infinity=True,
            )
        return loss.sum()

    def train(run: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
        torch.manual_seed(0)
        for labels in ([[1, 2, 3], [2, 2, 0]], [[1, 0, 0], [3, 2, 1]], [[4, 2, 3], [1, 2, 0]]):
            yield from torch.autograd.grad(run(torch.randn(12, 4), torch.tensor(labels)), [*model.parameters()])

    expected = [*train(step)]
    compiled = checkmate.compile(step, budget="1 MB", time_limit=0.3)
    assert_same_bits([*train(compiled)], expected)
    assert len(compiled.plans) == 2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_numbers(name: str) -> None:
    shape, targets, lengths, target_lengths = CASES[name]
    model = nn.Linear(4, 5)

    def step(x: Tensor) -> Tensor:
        return F.ctc_loss(model(x).view(shape).log_softmax(-1), targets, lengths, target_lengths)

    assert checkmate.verify(step, torch.randn(12, 4), budget="1 MB", time_limit=1).gradients == 2


def test_a_call_without_all_arguments_is_pytorchs_error() -> None:
    def step(x: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), (6, 5))  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'target_lengths'"):
        checkmate.compile(step, budget="1 MB")(torch.randn(6, 2, 5, requires_grad=True))
