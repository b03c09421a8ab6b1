"""Losses of every kind that is split have the bits of the whole, and the trial tells those that have not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends.step_problem import joint_of
from checkmate.backends.tensor_state import same_bits
from checkmate.capture.loss import equal_bits
from checkmate.capture.loss import kernels as functions
from checkmate.capture.loss.find import Loss, losses
from checkmate.capture.loss.kernels import length, slices
from checkmate.capture.loss.write import LOSS_SPLITS, LossSplit, loss_splits_of
from tests.capture.loss.products import OneOrder
from tests.support.sampling import few

ROWS, LENGTH, DEPTH, CLASSES = 3, 19, 24, 171  # none a power of two
X, Y = torch.randn(ROWS, LENGTH, DEPTH), torch.randint(CLASSES, (ROWS, LENGTH))
WEIGHTS = torch.rand(CLASSES) + 0.1


def _cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 30.0) * 30.0


def _shifted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1))


def _shown(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits.detach()


def _of(
    change: Callable[[Tensor], Tensor] = lambda logits: logits, **options: object
) -> Callable[[Tensor, Tensor], Tensor]:
    def run(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(change(logits).flatten(0, 1), y.flatten(), **options).sum()

    return run


KINDS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "scaled": _of(lambda logits: logits * -0.37),
    "capped": _of(_cap),
    "capped in float": _of(lambda logits: _cap(logits.float())),
    "cast": _of(lambda logits: logits.float(), ignore_index=7),
    "class weights": _of(lambda logits: logits.float(), weight=WEIGHTS),
    "class weights, none": _of(lambda logits: logits.float(), weight=WEIGHTS, reduction="none", ignore_index=7),
    "class weights, sum": _of(lambda logits: logits.float(), weight=WEIGHTS, reduction="sum"),
    "label smoothing": _of(label_smoothing=0.1, ignore_index=7),
    "label smoothing, sum": _of(label_smoothing=0.2, reduction="sum"),
    "shifted": _shifted,
    "shifted, capped": lambda logits, y: _shifted(_cap(logits), y),
    "log-probabilities in three dimensions": lambda logits, y: F.nll_loss(
        logits.log_softmax(-1).flatten(0, 1), y.flatten()
    ),
    "shown": _shown,
    "shown, capped": lambda logits, y: _shown(_cap(logits), y),
}


def _loss(kind: str, dtype: torch.dtype, *, bias: bool) -> Loss:
    head, first = (nn.Linear(DEPTH, size, bias=bias).to(dtype) for size in (CLASSES, DEPTH))
    problem = checkmate.trace(
        lambda x, y: KINDS[kind](head(first(x.to(dtype)).relu()), y), X, Y, profile="roofline:laptop"
    )
    (loss,) = losses(joint_of(problem).module.graph)
    return loss


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are tried have equal bits in parts, on each processor, and nothing was tried before."""
    monkeypatch.setattr(equal_bits, "outside_tracing", OneOrder)
    monkeypatch.setattr(equal_bits, "_tried", {})


@pytest.mark.slow
@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize(
    ("kind", "threads", "dtype"),
    [
        *((kind, 1 + i % 2, torch.float32) for i, kind in enumerate(KINDS)),
        *few(4, [(kind, 1 + i % 2, torch.bfloat16) for i, kind in enumerate(KINDS)]),
    ],
)
def test_each_kind_has_the_bits_of_plain_pytorch(
    kind: str, threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_bits, "MOST_INPUTS", 3)
    loss = _loss(kind, dtype, bias=threads == 2)
    assert loss.shown == kind.startswith("shown")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        equal = [equal_bits.loss_keeps_bits(loss, split) for split in loss_splits_of([loss])[:4]]
    finally:
        torch.set_num_threads(before)
    assert all(equal), equal


def test_products_that_have_other_bits_in_parts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this processor may have them or not: the trial says what they do."""
    loss = _loss("scaled", torch.float32, bias=False)
    monkeypatch.setattr(equal_bits, "_tried", {})
    a, b = torch.randn(ROWS * LENGTH, DEPTH), torch.randn(CLASSES, DEPTH).t()
    for split in loss_splits_of([loss])[:4]:
        rows = slices(len(a), length(len(a), split.parts, functions.ROWS))
        if any(not same_bits(a[at] @ b, (a @ b)[at]) for at in rows):
            assert not equal_bits.loss_keeps_bits(loss, split)


@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("aten.div.Tensor", lambda x, by, out: torch.mul(x, 1 / by, out=out)),
        (
            "aten.tanh_backward.default",
            lambda g, y, out: torch.mul(g, y.square().neg_().add_(1).abs_(), out=out).mul_(2),
        ),
    ],
)
def test_other_bits_are_told(name: str, other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = _loss("capped", torch.float32, bias=False)
    monkeypatch.setattr(equal_bits, "_tried", {})
    assert equal_bits.loss_keeps_bits(loss, LossSplit(4))
    monkeypatch.setattr(equal_bits, "_tried", {})
    monkeypatch.setitem(functions.POINTWISE, name, other)
    assert not any(equal_bits.loss_keeps_bits(loss, split) for split in LOSS_SPLITS)
