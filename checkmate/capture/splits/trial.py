"""Whether a loss in parts has the bits of the whole: tried on made-up inputs of its shapes, types and layouts.

Which order a kernel sums in depends on the shapes that it is given, the machine, and the number of threads, not on the
numbers. So what held for some inputs holds for others; an order that differs shows in a million numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from checkmate.capture.splits.find_loss import Loss
from checkmate.capture.splits.loss import gradient_of_rows, gradients_of_weights, one_class, row_sums

aten = torch.ops.aten
INPUTS, MOST_INPUTS = 2, 32  # on which all bits must be equal
ENOUGH = 2**20  # logits on which an order that differs shows
SCALES = (1.0, 8.0)  # of their logits: flat distributions, and some that are nearly certain
_tried: dict[tuple[Any, ...], bool] = {}


def same_bits_in_parts(loss: Loss, parts: int) -> bool:
    """Whether the loss and its gradients in so many parts have the bits of the whole, with as many threads as now."""
    nodes = (loss.h, loss.w, loss.b, loss.softmax, loss.of_rows, loss.of_weight, loss.of_bias)
    about = tuple(None if node is None else _about(node) for node in nodes)
    key = (*about, loss.forward.args[3:], parts, torch.get_num_threads())
    if key not in _tried:
        with _disable_current_modes(), torch.no_grad():
            _tried[key] = all(_equal(loss, parts, seed) for seed in range(inputs_of(loss)))
    return _tried[key]


def inputs_of(loss: Loss) -> int:
    """How many inputs a loss is tried on: more if it is small."""
    return min(MOST_INPUTS, max(INPUTS, ENOUGH // loss.softmax.meta["val"].numel()))


def _about(node: fx.Node) -> tuple[Any, ...]:
    val = node.meta["val"]
    return val.dtype, tuple(val.shape), tuple(val.stride()), val.device.type


def _equal(loss: Loss, parts: int, seed: int) -> bool:
    draw = torch.Generator().manual_seed(seed)
    scale = SCALES[seed % len(SCALES)]
    h, w = _made_up(loss.h, draw, 1.0), _made_up(loss.w, draw, scale * loss.w.meta["val"].shape[0] ** -0.5)
    b = None if loss.b is None else _made_up(loss.b, draw, 1.0)
    ignore, (rows, columns) = loss.ignore_index, loss.softmax.meta["val"].shape
    y = torch.randint(columns, (rows,), generator=draw).to(h.device)
    y[:: 2 + rows // 8] = ignore
    t = h.new_ones(loss.backward.args[0].meta["val"].shape, dtype=loss.softmax.meta["val"].dtype)  # type: ignore[union-attr]
    pairs = zip(_in_parts(loss, parts, h, w, b, y, t), _whole(loss, h, w, b, y, t), strict=True)
    return all(bool((_bytes(one) == _bytes(other)).all()) for one, other in pairs)


def _made_up(node: fx.Node, draw: torch.Generator, scale: float) -> Tensor:
    val = node.meta["val"]
    made = torch.empty_strided(val.shape, val.stride(), dtype=torch.float32).normal_(generator=draw)
    like = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    return like.copy_(made.mul_(scale))


def _whole(loss: Loss, h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, t: Tensor) -> Iterator[Tensor]:
    """Results as plain PyTorch computes them."""
    reduction, dtype = loss.forward.args[3:], loss.softmax.meta["val"].dtype
    logits = torch.mm(h, w) if b is None else torch.addmm(b, h, w)
    q = aten._log_softmax(logits.to(dtype), 1, False)
    del logits
    value, total = aten.nll_loss_forward(q, y, None, *reduction)
    yield value
    given = aten.nll_loss_backward(t, q, y, None, *reduction, total)
    dx = aten._log_softmax_backward_data(given, q, 1, dtype).to(h.dtype)
    del q, given
    if loss.of_rows is not None:
        yield dx.mm(w.t())
    if loss.of_weight is not None:
        yield dx.t().mm(h)
    if loss.of_bias is not None:
        yield dx.sum([0], True)


def _in_parts(loss: Loss, parts: int, h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, t: Tensor) -> Iterator[Tensor]:
    """The same results in parts."""
    reduction, ignore = loss.forward.args[3:], loss.ignore_index
    sums = row_sums(h, w, b, y, ignore, loss.softmax.meta["val"].dtype, parts)
    column, targets = sums[0][:, None], one_class(y, ignore)
    value, total = aten.nll_loss_forward(column, targets, None, *reduction)
    yield value
    g = aten.nll_loss_backward(t, column, targets, None, *reduction, total)
    if loss.of_rows is not None:
        yield gradient_of_rows(h, w, b, y, g, sums, w.t(), ignore, parts)
    wanted = loss.of_weight is not None, loss.of_bias is not None
    yield from gradients_of_weights(h, w, b, y, g, sums, ignore, parts, *wanted) if any(wanted) else ()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
