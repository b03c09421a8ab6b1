"""Cross entropy of a linear layer without its logits: loss and gradients in parts, with the bits of the whole.

    x = h W + b                        (N, V): logits
    q = x - m - log(sum(exp(x - m)))   m: the largest of each row
    loss = nll_loss(q, y)

Plain PyTorch holds x, q and their gradients, each N x V. Here the forward goes through the rows part by part and keeps
of each row what is in `row_sums`: three numbers. The loss is ATen's own, of the one column of log-probabilities
that the targets choose, in its order of summation. The backward computes logits again, part by part: by rows for the
gradient of h, and by blocks of the vocabulary for those of W and b, since a sum over parts of the rows would round
otherwise. That is five products of N x V x D in place of three.

The columns of a block need the whole row's m and log-sum, and these are exact: the largest logit of a row has the
log-probability 0 - log-sum. Where logits are in half precision log-sums are not, since they are rounded: there each
block computes whole rows, at one more product for each block.

Parts are about of one length: the last overlaps the one before where they do not divide. Blocks begin at multiples of
64 columns, as the kernel of the bias's sum goes through blocks of columns. Kernels may still sum in another order for
other lengths, so a split is taken only where `checkmate.capture.splits.trial` found all bits equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten

ROWS, COLUMNS = 16, 64  # parts have a multiple of these
APART = 16  # columns beside a block, for targets outside of it; so many keep its rows aligned
EXACT = torch.float32  # log-sums of this type are as the kernel has them, and products by columns have the same bits


def length(whole: int, parts: int, multiple: int) -> int:
    """Of each of so many parts."""
    return min(whole, -(-whole // (parts * multiple)) * multiple)


def _slices(whole: int, part: int, multiple: int = 1) -> Iterator[slice]:
    """Parts of a whole; the last begins early enough to be as long as the others, up to a multiple."""
    for begin in range(0, whole, part):
        late = max(0, begin + part - whole) // multiple * multiple
        yield slice(begin - late, min(begin + part, whole))


def one_class(y: Tensor, ignore_index: int) -> Tensor:
    """Targets for the column of log-probabilities that was chosen: its only class, or none."""
    return y.where(y == ignore_index, 0)


def row_sums(h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, ignore: int, dtype: torch.dtype, parts: int) -> Tensor:
    """For each row the log-probability of its target, its largest logit, and the largest log-probability: (3, N).

    Args:
        h: (N, D); w: (D, V); b: (V,) or None; y: (N,), targets.
        ignore: the target of rows that do not count.
        dtype: of the softmax.
        parts: rows are in about so many parts.
    """
    (rows, _), columns = h.shape, w.shape[1]
    part = length(rows, parts, ROWS)
    found = h.new_empty((3, rows), dtype=dtype)
    chosen = y.where(y != ignore, 0)[:, None]
    logits = _Logits(h, w, b, dtype, part, columns)
    for at in _slices(rows, part):
        x = logits(at)
        torch.amax(x, 1, out=found[1, at])
        torch.log_softmax(x, 1, out=x)
        torch.amax(x, 1, out=found[2, at])
        torch.gather(x, 1, chosen[at], out=found[0, at, None])
    return found


def gradient_of_rows(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    y: Tensor,
    g: Tensor,
    sums: Tensor,
    back: Tensor,
    ignore: int,
    parts: int,
) -> Tensor:
    """The gradient of h: (N, D).

    Args:
        h, w, b, y, ignore, parts: as for `row_sums`; sums: what that gives.
        g: (N, 1), gradients of the log-probabilities of the targets.
        back: (V, D), the weight as the backward reads it.
    """
    (rows, _), columns = h.shape, w.shape[1]
    part = length(rows, parts, ROWS)
    result = torch.empty_like(h)
    gradient = _Gradient(g, y, ignore, h, sums.dtype, part, columns)
    logits = _Logits(h, w, b, sums.dtype, part, columns)
    for at in _slices(rows, part):
        x = _log_probabilities(logits(at), sums, at)
        torch.mm(gradient(x, at, 0, columns), back, out=result[at])
    return result


def gradients_of_weights(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    y: Tensor,
    g: Tensor,
    sums: Tensor,
    ignore: int,
    parts: int,
    with_weight: bool,
    with_bias: bool,
) -> tuple[Tensor, ...]:
    """The gradients of the weight, (V, D), and of the bias, (1, V), those that are asked for; arguments as above."""
    depth, columns = w.shape
    block = length(columns, parts, COLUMNS)
    of_weight = h.new_empty((columns, depth)) if with_weight else None
    of_bias = h.new_empty((1, columns)) if with_bias else None
    run = _by_columns if sums.dtype is EXACT else _by_whole_rows
    for at, dx in run(h, w, b, y, g, sums, ignore, parts, block):
        if of_weight is not None:
            torch.mm(dx.t(), h, out=of_weight[at])
        if of_bias is not None:
            torch.sum(dx, [0], True, out=of_bias[:, at])
    return tuple(result for result in (of_weight, of_bias) if result is not None)


def _by_columns(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    y: Tensor,
    g: Tensor,
    sums: Tensor,
    ignore: int,
    parts: int,
    block: int,
) -> Iterator[tuple[slice, Tensor]]:
    """Gradients of the logits, (N, block), block by block."""
    rows, columns = h.shape[0], w.shape[1]
    whole = h.new_zeros((rows, block + APART), dtype=sums.dtype)
    gradient = _Gradient(g, y, ignore, h, sums.dtype, rows, block + APART)
    everything = slice(0, rows)
    for at in _slices(columns, block, COLUMNS):
        wide = at.stop - at.start
        logits = _Logits(h, w[:, at], None if b is None else b[at], sums.dtype, rows, wide, into=whole)
        whole[:, wide:].zero_()
        _log_probabilities(logits(everything), sums, everything)
        yield at, gradient(whole, everything, at.start, wide)


def _by_whole_rows(
    h: Tensor,
    w: Tensor,
    b: Tensor | None,
    y: Tensor,
    g: Tensor,
    sums: Tensor,
    ignore: int,
    parts: int,
    block: int,
) -> Iterator[tuple[slice, Tensor]]:
    """The same, from whole rows, part by part, for each block."""
    rows, columns = h.shape[0], w.shape[1]
    part = length(rows, parts, ROWS)
    result = h.new_empty((rows, block))
    logits = _Logits(h, w, b, sums.dtype, part, columns)
    gradient = _Gradient(g, y, ignore, h, sums.dtype, part, columns)
    for at in _slices(columns, block, COLUMNS):
        dx = result[:, : at.stop - at.start]
        for some in _slices(rows, part):
            x = _log_probabilities(logits(some), sums, some)
            dx[some].copy_(gradient(x, some, 0, columns)[:, at])
        yield at, dx


def _log_probabilities(x: Tensor, sums: Tensor, at: slice) -> Tensor:
    """In place of logits."""
    if sums.dtype is not EXACT:
        return torch.log_softmax(x, 1, out=x)
    return x.sub_(sums[1, at, None]).add_(sums[2, at, None])


class _Logits:
    """Computes logits of some rows, in the type of the softmax, each time into the same memory."""

    def __init__(
        self,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        dtype: torch.dtype,
        rows: int,
        columns: int,
        into: Tensor | None = None,
    ) -> None:
        self.h, self.w, self.b = h, w, b
        self.wide = h.new_empty((rows, columns), dtype=dtype) if into is None else into[:, :columns]
        self.own = self.wide if dtype == h.dtype else h.new_empty((rows, columns))

    def __call__(self, at: slice) -> Tensor:
        if self.b is None:
            torch.mm(self.h[at], self.w, out=self.own)
        else:
            torch.addmm(self.b, self.h[at], self.w, out=self.own)
        return self.wide if self.own is self.wide else self.wide.copy_(self.own)


class _Gradient:
    """Computes gradients of logits of some rows from log-probabilities, in their place, in the type of the product.

    ATen's kernel reads a gradient of all log-probabilities, which is zero but for the target's: that is kept, and
    written to at the targets only.
    """

    def __init__(self, g: Tensor, y: Tensor, ignore: int, h: Tensor, dtype: torch.dtype, rows: int, width: int) -> None:
        self.g = g
        self.y = y.where(y != ignore, 0)[:, None]
        self.given = h.new_zeros((rows, width), dtype=dtype)
        self.own = None if dtype == h.dtype else h.new_empty((rows, width))

    def __call__(self, q: Tensor, at: slice, first: int, columns: int) -> Tensor:
        """The gradients of so many columns from the first on; what follows these in q is the place of other targets."""
        y = self.y[at] - first
        place = y.where((y >= 0) & (y < columns), columns) if columns < q.shape[1] else y
        self.given.scatter_(1, place, self.g[at])
        aten._log_softmax_backward_data.out(self.given, q, 1, q.dtype, out=q)
        self.given.scatter_(1, place, 0.0)
        return (q if self.own is None else self.own.copy_(q))[:, :columns]
