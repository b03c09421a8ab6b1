"""Losses that can run in parts are found; in parts they have the bits of the whole, without its logits in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import checkmate
from checkmate.backends.step_problem import joint_of
from checkmate.backends.tensor_state import same_bits
from checkmate.capture.loss import equal_bits, kernels
from checkmate.capture.loss.find import Loss, losses
from checkmate.capture.loss.kernels import CAST, Form, Layer, length, row_sums
from checkmate.capture.loss.write import LOSS_SPLITS, LossSplit, loss_splits_of
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.sampling import few, in_turn, long

aten = torch.ops.aten
ROWS, LENGTH, DEPTH, CLASSES = 3, 19, 24, 171  # none a power of two
X, Y = torch.randn(ROWS, LENGTH, DEPTH), torch.randint(CLASSES, (ROWS, LENGTH))
SCALE, WEIGHTS = torch.tensor(2.0, requires_grad=True), torch.rand(CLASSES) + 0.1
OfLogits = Callable[[Tensor, Tensor], Any]  # a loss, alone or with other results


def _losses(
    of_logits: OfLogits, *, dtype: torch.dtype = torch.float32, bias: bool = True, frozen: bool = False
) -> list[Loss]:
    """The losses that are found where a layer makes the logits, (ROWS, LENGTH, CLASSES) of a type."""
    first, head = (nn.Linear(DEPTH, size, bias=bias).to(dtype) for size in (DEPTH, CLASSES))
    head.requires_grad_(not frozen)
    problem = checkmate.trace(
        lambda x, y: of_logits(head(first(x.to(dtype)).relu()), y), X, Y, profile="roofline:laptop"
    )
    return losses(joint_of(problem).module.graph)


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
    """Found also for logits in half precision that are cast, and for a frozen layer."""
    of_logits = _of(lambda logits: logits.float(), reduction=reduction, ignore_index=3)
    (loss,) = _losses(of_logits, dtype=dtype, bias=bias, frozen=frozen)
    assert (loss.b is not None, loss.of_bias is not None) == (bias, bias and not frozen)
    assert loss.of_rows is not None
    assert (loss.of_weight is None) == frozen
    assert loss.ignore_index == 3
    assert [node.meta["val"].dtype for node in (loss.softmax, loss.product)] == [torch.float32, dtype]


NOT_SPLIT: dict[str, OfLogits] = {  # something reads or changes the logits elsewhere
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
def test_a_loss_that_stays_whole(kind: str) -> None:
    assert _losses(lambda logits, y: NOT_SPLIT[kind](logits.flatten(0, 1), y.flatten())) == []


def _of(change: Callable[[Tensor], Tensor] = lambda logits: logits, **options: Any) -> OfLogits:
    return lambda logits, y: F.cross_entropy(change(logits).flatten(0, 1), y.flatten(), **options).sum()


def _cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 30.0) * 30.0


def _shifted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1))


def _shown(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits.detach()


KINDS: dict[str, OfLogits] = {
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


def test_logits_that_the_step_shows_are_kept() -> None:
    for kind in ("shown", "scaled"):
        (loss,) = _losses(KINDS[kind])
        assert loss.shown == (kind == "shown")
        assert all(split.kept for split in loss_splits_of([loss])) == (kind == "shown")


class OneOrder(TorchDispatchMode):
    """Within it ``mm`` and ``addmm`` go row by row, so that a part of a product has the bits of the whole.

    The kernels of a processor may sum in an order that depends on how many rows and columns there are.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in (aten.mm, aten.addmm):
            return func(*args, **(kwargs or {}))
        *bias, a, b = args
        columns = b.t().float().contiguous()
        product = torch.stack([(row * columns).sum(-1) for row in a.float()])
        made = (product + bias[0].float() if bias else product).to(a.dtype)
        return kwargs["out"].copy_(made) if kwargs and "out" in kwargs else made


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are tried have equal bits in parts, on each processor."""
    monkeypatch.setattr(equal_bits, "outside_tracing", OneOrder)


@pytest.fixture(autouse=True)
def _nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_bits, "_tried", {})


@pytest.mark.slow
@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize(
    ("kind", "number", "dtype"),
    [
        *((kind, 1 + i % 2, torch.float32) for i, kind in enumerate(KINDS)),
        *few(4, [(kind, 1 + i % 2, torch.bfloat16) for i, kind in enumerate(KINDS)]),
    ],
)
def test_each_kind_has_the_bits_of_plain_pytorch(
    kind: str, number: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one thread or two, and without a bias or with one."""
    monkeypatch.setattr(equal_bits, "MOST_INPUTS", 3)
    (loss,) = _losses(KINDS[kind], dtype=dtype, bias=number == 2)
    assert loss.shown == kind.startswith("shown")
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        equal = [equal_bits.equal_inputs(loss, split) for split in loss_splits_of([loss])[:4]]
    finally:
        torch.set_num_threads(before)
    assert all(equal), equal


def test_products_that_have_other_bits_in_parts_are_told() -> None:
    """Products of this processor may have other bits or not: the trial says which."""
    (loss,) = _losses(KINDS["scaled"], bias=False)
    a, b = torch.randn(ROWS * LENGTH, DEPTH), torch.randn(CLASSES, DEPTH).t()
    for split in loss_splits_of([loss])[:4]:
        rows = kernels.slices(len(a), length(len(a), split.parts, kernels.ROWS))
        if any(not same_bits(a[at] @ b, (a @ b)[at]) for at in rows):
            assert not equal_bits.equal_inputs(loss, split)


OTHERS: dict[str, Any] = {  # functions whose bits are not those of the kernel
    "aten.div.Tensor": lambda x, by, out: torch.mul(x, 1 / by, out=out),
    "aten.tanh_backward.default": lambda g, y, out: torch.mul(g, y.square().neg_().add_(1).abs_(), out=out).mul_(2),
}


@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize("name", OTHERS)
def test_other_bits_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (loss,) = _losses(KINDS["capped"], bias=False)
    assert equal_bits.equal_inputs(loss, LossSplit(4))
    monkeypatch.setattr(equal_bits, "_tried", {})
    monkeypatch.setitem(kernels.POINTWISE, name, OTHERS[name])
    assert not any(equal_bits.equal_inputs(loss, split) for split in LOSS_SPLITS)


REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _in_parts(
    h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, dtype: torch.dtype, parts: int, how: int, *, kept: bool = False
) -> list[Any]:
    """The loss, and the gradients that its sum has."""
    there, back = (((CAST, to),) if dtype != h.dtype else () for to in (dtype, h.dtype))
    form = Form(-100, dtype, there, back, False, parts)
    layer = Layer(h, w.t(), b, y, F.linear(h, w, b) if kept else None)
    sums = row_sums(layer, form)
    column, targets = sums[0][:, None], kernels.one_class(y, -100)
    loss, total = aten.nll_loss_forward(column, targets, None, how, -100)
    g = aten.nll_loss_backward(torch.ones_like(loss), column, targets, None, how, -100, total)
    dh = kernels.gradient_of_rows(layer, form, g, None, sums, w)
    dw, *db = kernels.gradients_of_weights(layer, form, g, None, sums, True, b is not None)
    return [loss, dh, dw, *(bias.view(-1) for bias in db)]


@pytest.mark.slow
@in_turn(dtype=[torch.float32, torch.bfloat16], upcast=[False, True], seed=[0, *map(long, range(1, 6))])
def test_random_losses_have_the_bits_of_plain_pytorch(
    dtype: torch.dtype, upcast: bool, seed: int, threads: int
) -> None:
    """If its products have them: those of some processors have not, in some shapes, which a trial finds."""
    draw = random.Random(f"{dtype} {upcast} {seed}")
    rows, depth, classes = draw.choice([64, 127, 200, 513]), draw.choice([24, 64, 100]), draw.choice([101, 1000, 3001])
    parts, how, scale = draw.choice([2, 4, 16]), draw.choice(list(REDUCTIONS)), draw.choice([0.1, 3.0])
    torch.manual_seed(seed)
    h, w = torch.randn(rows, depth).to(dtype), (scale * torch.randn(classes, depth)).to(dtype)
    b = torch.randn(classes).to(dtype) if draw.random() < 0.5 else None
    y = torch.randint(classes, (rows,))
    y[: rows // 3 : 2] = -100
    leaves = [tensor.clone().requires_grad_() for tensor in (h, w, b) if tensor is not None]
    kept = draw.random() < 0.5
    with OneOrder():
        logits = F.linear(*leaves)
        loss = F.cross_entropy(logits.float() if upcast else logits, y, reduction=how)
        grads = torch.autograd.grad(loss.sum(), leaves)
        made = _in_parts(h, w, b, y, torch.float32 if upcast else dtype, parts, REDUCTIONS[how], kept=kept)
    assert_same_bits(made, [loss.detach(), *grads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_buffer_is_as_large_as_the_logits(dtype: torch.dtype) -> None:
    rows, depth, classes = 256, 16, 4096
    h, w, y = torch.randn(rows, depth).to(dtype), torch.randn(classes, depth).to(dtype), torch.zeros(rows).long()
    logits, grown = rows * classes * dtype.itemsize, (rows + classes) * depth * dtype.itemsize
    assert measure_peak(lambda: F.linear(h, w)).peak >= logits
    peaks = [
        measure_peak(lambda: _in_parts(h, w, None, y, dtype, parts, 1)).peak  # noqa: B023  # called at once
        for parts in (1, 8, 32)
    ]
    assert peaks[0] > 2 * logits
    logits *= 4 // dtype.itemsize  # the kernel of the gradient has a buffer in float32
    assert peaks[1] < 0.4 * logits + grown
    assert peaks[2] < 0.2 * logits + grown


def test_targets_out_of_range_are_an_error_as_in_plain_pytorch() -> None:
    h, w = torch.randn(4, 3), torch.randn(5, 3)
    for wrong in (5, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            row_sums(Layer(h, w.t(), None, torch.tensor([0, 1, wrong, 2])), Form(-100, torch.float32, (), (), False, 2))


def test_parts_are_multiples_and_no_longer_than_the_whole() -> None:
    assert [length(100, parts, 16) for parts in (1, 2, 4, 64)] == [100, 64, 32, 16]
    assert length(10, 4, 16) == 10
