"""Which losses of a step can run in parts: those whose logits nothing else reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends.step_problem import joint_of
from checkmate.capture.loss.find import Loss, losses
from checkmate.capture.loss.write import loss_splits_of

ROWS, DEPTH, CLASSES = 32, 8, 40
X, Y = torch.randn(2, ROWS // 2, DEPTH), torch.randint(CLASSES, (ROWS,))
SCALE, WEIGHTS = torch.tensor(2.0, requires_grad=True), torch.ones(CLASSES)


class _Net(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(DEPTH, DEPTH)
        self.head = nn.Linear(DEPTH, CLASSES, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu()).flatten(0, 1)


def _losses(step: Callable[..., Any]) -> list[Loss]:
    return losses(joint_of(checkmate.trace(step, X, Y, profile="roofline:laptop")).module.graph)


@pytest.mark.parametrize(
    ("bias", "reduction", "dtype", "frozen"),
    [
        *((bias, reduction, torch.float32, False) for bias in (False, True) for reduction in ("mean", "sum", "none")),
        *((True, "mean", torch.bfloat16, False), (True, "mean", torch.float32, True)),
    ],
)
def test_a_linear_layer_and_its_cross_entropy_are_found(
    bias: bool, reduction: str, dtype: torch.dtype, frozen: bool
) -> None:
    """Also of logits in half precision that are cast, and of a layer that is frozen."""
    net, options = _Net(bias=bias).to(dtype), {"reduction": reduction, "ignore_index": 3}
    net.head.requires_grad_(not frozen)
    (loss,) = _losses(lambda x, y: F.cross_entropy(net(x.to(dtype)).float(), y, **options).sum())
    assert (loss.b is not None, loss.of_bias is not None) == (bias, bias and not frozen)
    assert loss.of_rows is not None
    assert (loss.of_weight is None) == frozen
    assert loss.ignore_index == 3
    assert [node.meta["val"].dtype for node in (loss.softmax, loss.product)] == [torch.float32, dtype]


def test_logits_that_the_step_shows_are_kept() -> None:
    net = _Net()

    def shows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return F.cross_entropy(logits, y), logits.detach()

    (loss,) = _losses(shows)
    assert loss.shown
    assert all(split.kept for split in loss_splits_of([loss]))
    (loss,) = _losses(lambda x, y: F.cross_entropy(net(x), y))
    assert not loss.shown
    assert not all(split.kept for split in loss_splits_of([loss]))


NOT_SPLIT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "returned": lambda logits, y: (F.cross_entropy(logits, y), logits),
    "read elsewhere": lambda logits, y: F.cross_entropy(logits, y) + logits.square().mean(),
    "scaled by a learned number": lambda logits, y: F.cross_entropy(logits * SCALE, y),
    "cut in half": lambda logits, y: F.cross_entropy(logits[:, : CLASSES // 2], y % (CLASSES // 2)),
    "weights and smoothing": lambda logits, y: F.cross_entropy(logits, y, weight=WEIGHTS, label_smoothing=0.1),
    "two losses of one": lambda logits, y: F.cross_entropy(logits, y) + F.cross_entropy(logits, y, reduction="sum"),
    "softmax along the rows": lambda logits, y: F.nll_loss(logits.log_softmax(0), y),
    "a hook": lambda logits, y: (logits.register_hook(lambda g: g.clamp(-1, 1)), F.cross_entropy(logits, y))[1],
}


@pytest.mark.parametrize("kind", NOT_SPLIT)
def test_what_reads_or_changes_logits_elsewhere_keeps_them_whole(kind: str) -> None:
    net = _Net()
    assert _losses(lambda x, y: NOT_SPLIT[kind](net(x), y)) == []
