"""What the functions that run in parts compute, move and hold, for estimates without running them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from checkmate.capture.splits.loss import (
    APART,
    CAST,
    COLUMNS,
    OF_RESULT,
    ROWS,
    Form,
    Layer,
    gradient_of_rows,
    gradients_of_weights,
    length,
    row_sums,
)

_PASSES = {row_sums: 5, gradient_of_rows: 9, gradients_of_weights: 10}  # over all logits, reading or writing
_STEP = 2  # such passes of each step between the product and the softmax


@dataclass(frozen=True)
class Estimate:
    """Of one call, beyond what it reads and makes."""

    flop: int
    launches: int  # of kernels
    moved_bytes: int
    workspace_bytes: int


def estimate(node: fx.Node) -> Estimate | None:
    """Of a node that runs in parts; None of another."""
    if node.target not in _PASSES:
        return None
    args: Any = node.args
    form: Form = args[1]
    layer = Layer(*(None if one is None else one.meta["val"] for one in args[0]))
    (rows, columns), forward = layer.shape, node.target is row_sums
    of_weights = node.target is gradients_of_weights
    by_columns, block = of_weights and form.by_columns, length(columns, form.parts, COLUMNS)
    part = length(rows, form.parts, ROWS)
    inside = rows * (block + APART) if by_columns else part * columns
    again = -(-columns // block) if of_weights and not by_columns else 1
    products = (0 if layer.z is not None else again) + (not forward and (not of_weights or args[5]))
    depth = 0 if not products else layer.h.shape[1] if layer.h is not None else args[5].meta["val"].shape[1]
    passes = _PASSES[node.target] + _STEP * (len(form.forward) + (0 if forward else len(form.backward)))
    whole, each = (columns, block) if of_weights else (rows, part)
    return Estimate(
        flop=2 * rows * columns * depth * products,
        launches=passes * -(-whole // each),
        moved_bytes=(_PASSES[node.target] + passes * (again - 1)) * rows * columns * form.dtype.itemsize,
        workspace_bytes=inside * _bytes_each(layer, form, forward)
        + (rows * block * layer.dtype.itemsize if of_weights and not by_columns else 0),
    )


def _bytes_each(layer: Layer, form: Form, forward: bool) -> int:
    """Bytes for each logit of a part."""
    types = [] if layer.z is not None else [layer.dtype]
    last = layer.dtype
    stays = set() if forward else {place for name, place in form.backward if name in OF_RESULT}
    for i, (name, what) in enumerate(form.forward or ((CAST, form.dtype),)):
        before, last = last, (what if name == CAST else last)
        if i in stays or last != before or not types:
            types.append(last)
    if forward:
        return sum(dtype.itemsize for dtype in types)
    types += [form.dtype, *({what for name, what in form.backward if name == CAST} - {form.dtype})]
    wide = 4 if form.dtype.itemsize == 2 else 0  # the kernel of the gradient has a buffer in float32
    return sum(dtype.itemsize for dtype in types) + wide
