"""The loss of connectionist temporal classification, with the bits and the bytes of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.support.plainly import assert_each_as_plain, verify_to_the_byte

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_that_depend_on_an_input(reduction: str) -> None:
    """Models of transformers compute lengths from padded labels, with cuDNN turned off."""
    model = nn.Linear(4, 5)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        log_probs, mask = model(x).view(6, 2, 5).log_softmax(-1), labels > 0
        chosen, lengths = labels.masked_select(mask), torch.full((2,), 6) - mask[:, 2].long()
        with torch.backends.cudnn.flags(enabled=False):
            loss = F.ctc_loss(log_probs, chosen, lengths, mask.sum(-1), reduction=reduction, zero_infinity=True)
        return loss.sum()

    labels = [[1, 2, 3], [2, 2, 0]], [[1, 0, 0], [3, 2, 1]], [[4, 2, 3], [1, 2, 0]]
    batches = [(torch.randn(12, 4), torch.tensor(each)) for each in labels]
    assert_each_as_plain(step, *batches, plans=2, leaves=[*model.parameters()])


CASES: dict[str, tuple[Any, ...]] = {  # shape, targets, and the lengths of both
    "sum": ((6, 2, 5), torch.tensor([[1, 2, 3], [2, 2, 0]]), (6, 5), (3, 2)),
    "none": ((6, 2, 5), torch.tensor([1, 2, 3, 2, 1]), (6, 5), (3, 2)),
    "one": ((12, 5), torch.tensor([1, 2, 3]), (12,), (3,)),
}


@pytest.mark.parametrize("mean", [False, True], ids=["summed", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_lengths_that_are_numbers(name: str, mean: bool) -> None:
    model, (shape, *targets) = nn.Linear(4, 5), CASES[name]
    options = {} if mean else {"reduction": name if name == "none" else "sum", "zero_infinity": True}

    def step(x: Tensor) -> Tensor:
        return F.ctc_loss(model(x).view(shape).log_softmax(-1), *targets, **options).sum()

    assert verify_to_the_byte(step, torch.randn(12, 4), budget="1 MB").gradients == 2


def test_a_call_without_all_arguments_is_pytorchs_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'target_lengths'"):
        checkmate.compile(
            lambda x: F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), (6, 5)), budget="1 MB"
        )(torch.randn(6, 2, 5, requires_grad=True))
