"""What the functions that run in parts compute, move and hold, for estimates without running them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from checkmate.capture.splits.loss import (
    APART,
    COLUMNS,
    EXACT,
    ROWS,
    gradient_of_rows,
    gradients_of_weights,
    length,
    row_sums,
)

_PASSES = {row_sums: 5, gradient_of_rows: 9, gradients_of_weights: 10}  # over all logits, reading or writing


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
    (rows, depth), columns = args[0].meta["val"].shape, args[1].meta["val"].shape[1]
    product = 2 * rows * depth * columns
    own = args[0].meta["val"].element_size()
    if node.target is row_sums:
        dtype, parts, whole, multiple = args[5], args[6], rows, ROWS
        products, buffers, products_in = 1, 1, length(rows, parts, ROWS) * columns
    elif node.target is gradient_of_rows:
        dtype, parts, whole, multiple = args[5].meta["val"].dtype, args[8], rows, ROWS
        products, buffers, products_in = 2, 2, length(rows, parts, ROWS) * columns
    else:
        dtype, parts, whole, multiple = args[5].meta["val"].dtype, args[7], columns, COLUMNS
        block = length(columns, parts, COLUMNS)
        by_columns = dtype is EXACT
        again = 1 if by_columns else -(-columns // block)
        products, buffers = again + bool(args[8]), 2
        products_in = rows * (block + APART) if by_columns else length(rows, parts, ROWS) * columns
    cast = 0 if dtype.itemsize == own else buffers * own
    cast += 4 if dtype.itemsize == 2 and buffers == 2 else 0  # the kernel of the gradient has a buffer in float32
    held = products_in * (buffers * dtype.itemsize + cast)
    if node.target is gradients_of_weights and dtype is not EXACT:
        held += rows * length(columns, parts, COLUMNS) * own
    moved = _PASSES[node.target] * rows * columns * dtype.itemsize
    launches = _PASSES[node.target] * -(-whole // length(whole, parts, multiple))
    return Estimate(products * product, launches, moved, held)
