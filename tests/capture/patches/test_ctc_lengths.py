"""The loss of connectionist temporal classification, with the bits and the bytes of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate

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
