"""Cross entropy of a linear layer without its full logits: loss and gradients in parts, with the bits of the whole.

    z = h W + b                        (N, V): the layer's product
    x = f(z)                           logits: scaled, capped, cast, or as they are
    q = x - m - log(sum(exp(x - m)))   m: the largest of each row
    loss = nll_loss(q, y)

Plain PyTorch holds z, x, q and their gradients, each N x V. Here the forward goes through the rows part by part and
keeps of each row what is in `row_sums`. The loss is ATen's own, of the one column of log-probabilities that the targets
choose, in its order of summation. The backward has x again, part by part: by rows for the gradient of h, and by blocks
of the vocabulary for those of W and b, since a sum over parts of the rows would round otherwise.

Either z is computed again for each part: five products of N x V x D in place of three, and no buffer of that size. Or z
is kept: three products, as plain PyTorch has, and one such buffer.

The columns of a block need the whole row's m and log-sum, and these are exact: the largest logit of a row has the
log-probability 0 - log-sum. Where logits are in half precision log-sums are not, since they are rounded: there each
block has whole rows, which is one more product for each block if z is not kept. So it is with label smoothing, where
gradients of log-probabilities do not add up exactly.

Parts are about of one length: the last overlaps the one before where they do not divide. Blocks begin at multiples of
64 columns, as the kernel of the bias's sum goes through blocks of columns. Kernels may still sum in another order for
other lengths, so a split is taken only where `checkmate.capture.loss.equal_bits` found all bits equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

aten = torch.ops.aten

ROWS, COLUMNS = 16, 64  # parts have a multiple of these
APART = 16  # columns beside a block, for targets outside of it; so many keep its rows aligned
EXACT = torch.float32  # log-sums of this type are as the kernel has them, and products by columns have the same bits
CAST = "aten._to_copy.default"

Pointwise = tuple[str, Any]  # an op, and what it takes beside the value: a number, a type, the place of a logit

POINTWISE: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {  # each writes to its last argument
    CAST: lambda x, _, out: out.copy_(x),
    "aten.div.Tensor": lambda x, by, out: torch.div(x, by, out=out),
    "aten.mul.Tensor": lambda x, by, out: torch.mul(x, by, out=out),
    "aten.tanh.default": lambda x, _, out: torch.tanh(x, out=out),
    "aten.tanh_backward.default": lambda g, y, out: aten.tanh_backward.grad_input(g, y, grad_input=out),
}
OF_RESULT = {"aten.tanh_backward.default"}  # they read a value of the forward


class Layer(NamedTuple):
    """A linear layer and the targets of its logits, as nodes or tensors; None if unread."""

    h: Any  # (N, D)
    w: Any  # (D, V)
    b: Any  # (V,), or None
    y: Any  # (N,)
    z: Any = None  # (N, V), the product, where that is kept

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return (self.h.shape[0], self.w.shape[1]) if self.z is None else tuple(self.z.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the product."""
        return (self.h if self.z is None else self.z).dtype


class Form(NamedTuple):
    """The steps from logits to log-probabilities, and the parts."""

    ignore: int  # the target of rows that do not count
    dtype: torch.dtype  # of the softmax
    forward: tuple[Pointwise, ...]  # from the product to the logits
    backward: tuple[Pointwise, ...]  # from the gradient of the logits to that of the product
    smooth: bool  # log-probabilities of all columns count, not of the target alone
    parts: int

    @property
    def by_columns(self) -> bool:
        """Tell whether blocks of columns have the bits of the whole."""
        return self.dtype is EXACT and not self.smooth


def length(whole: int, parts: int, multiple: int) -> int:
    """Rows or columns per part, a multiple of ``multiple``."""
    return min(whole, -(-whole // (parts * multiple)) * multiple)


def slices(whole: int, part: int, multiple: int = 1) -> Iterator[slice]:
    """Cut a whole into parts; the last begins early enough to be as long as the others, up to a multiple."""
    for begin in range(0, whole, part):
        late = max(0, begin + part - whole) // multiple * multiple
        yield slice(begin - late, min(begin + part, whole))


def one_class(y: Tensor, ignore_index: int) -> Tensor:
    """Targets for a column of chosen log-probabilities: its only class, or none."""
    return y.where(y == ignore_index, 0)


def class_weights(weight: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    """The class weight of each target: (N, 1)."""
    return weight[y.where(y != ignore_index, 0)][:, None]


def weighted_loss(q: Tensor, y: Tensor, weights: Tensor, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Compute ``nll_loss_forward`` with class weights from one column, with a weight per row, summed in its order."""
    how = 2 if reduction == 1 else reduction
    loss, _ = aten.nll_loss_forward(q * weights, y, None, how, ignore_index)
    total, _ = aten.nll_loss_forward(-weights, y, None, 2, ignore_index)
    return (loss / total if reduction == 1 else loss), total


def row_sums(layer: Layer, form: Form) -> Tensor:
    """For each row the log-probability of the target, the largest logit and the largest log-probability: (3, N).

    With label smoothing also the sum of its log-probabilities: (4, N).
    """
    rows, columns = layer.shape
    part = length(rows, form.parts, ROWS)
    sums = layer.y.new_empty((3 + form.smooth, rows), dtype=form.dtype)
    chosen = layer.y.where(layer.y != form.ignore, 0)[:, None]
    logits = _Logits(layer, form, part, columns)
    for at in slices(rows, part):
        x = logits(at)
        torch.amax(x, 1, out=sums[1, at])
        torch.log_softmax(x, 1, out=x)
        torch.amax(x, 1, out=sums[2, at])
        torch.gather(x, 1, chosen[at], out=sums[0, at, None])
        if form.smooth:
            torch.sum(x, [1], out=sums[3, at])
    return sums


def gradient_of_rows(layer: Layer, form: Form, g: Tensor, u: Tensor | None, sums: Tensor, back: Tensor) -> Tensor:
    """The gradient of h: (N, D).

    Args:
        layer, form: as for `row_sums`; sums: what that gives.
        g: (N, 1), gradients of the log-probabilities of the targets.
        u: (N, 1), gradients of all log-probabilities of a row, with label smoothing.
        back: (V, D), the weight as the backward reads it.
    """
    rows, columns = layer.shape
    part = length(rows, form.parts, ROWS)
    result = back.new_empty((rows, back.shape[1]))
    gradient = _Gradient(layer, form, g, u, sums, (part, columns))
    for at in slices(rows, part):
        torch.mm(gradient(at), back, out=result[at])
    return result


def gradients_of_weights(
    layer: Layer, form: Form, g: Tensor, u: Tensor | None, sums: Tensor, with_weight: bool, with_bias: bool
) -> tuple[Tensor, ...]:
    """The gradients of the weight, (V, D), and the bias, (1, V), if used; arguments as above."""
    rows, columns = layer.shape
    part, block = length(rows, form.parts, ROWS), length(columns, form.parts, COLUMNS)
    of_weight = layer.h.new_empty((columns, layer.h.shape[1])) if with_weight else None
    of_bias = sums.new_empty((1, columns), dtype=layer.dtype) if with_bias else None
    if form.by_columns:
        gradient = _Gradient(layer, form, g, u, sums, (rows, block), APART)
    else:
        result = sums.new_empty((rows, block), dtype=layer.dtype)
        gradient = _Gradient(layer, form, g, u, sums, (part, columns))
    for at in slices(columns, block, COLUMNS):
        # The gradient of the product, (N, block): of this block alone, or from whole rows, part by part.
        if form.by_columns:
            dx = gradient(slice(0, rows), at)
        else:
            dx = result[:, : at.stop - at.start]
            for at_rows in slices(rows, part):
                dx[at_rows].copy_(gradient(at_rows)[:, at])
        if of_weight is not None:
            torch.mm(dx.t(), layer.h, out=of_weight[at])
        if of_bias is not None:
            torch.sum(dx, [0], True, out=of_bias[:, at])
    return tuple(result for result in (of_weight, of_bias) if result is not None)


def _memory(
    layer: Layer, form: Form, *, saved: bool
) -> tuple[tuple[Pointwise, ...], list[torch.dtype | None], list[int]]:
    """Steps from product to logits, types of buffers, and the buffers of the product and of each step."""
    steps = form.forward or (((CAST, form.dtype),) if layer.z is not None else ())  # a kept product is copied first
    stays = {place for name, place in form.backward if name in OF_RESULT} if saved else set()
    types: list[torch.dtype | None] = [layer.dtype if layer.z is None else None]
    places, dtype = [0], layer.dtype
    for i, (name, operand) in enumerate(steps):
        before, dtype = dtype, (operand if name == CAST else dtype)
        if i in stays or types[-1] is None or dtype != before:
            types.append(dtype)
        places.append(len(types) - 1)
    return steps, types, places


class _Logits:
    """Computes logits of some rows and columns, in the softmax's type, each time into the same memory.

    Each step writes over what it reads, but for a kept product, and what the backward reads, if that is ``saved``.
    """

    def __init__(
        self, layer: Layer, form: Form, rows: int, columns: int, *, saved: bool = False, apart: int = 0
    ) -> None:
        self.layer = layer
        self.steps, types, self.place = _memory(layer, form, saved=saved)
        new, width = layer.y.new_empty, {len(types) - 1: columns + apart}
        self.memory = [
            None if kind is None else new((rows, width.get(i, columns)), dtype=kind) for i, kind in enumerate(types)
        ]
        assert self.memory[-1] is not None
        self.last = self.memory[-1]  # the logits, with the columns apart
        self.values: list[Tensor] = []  # the product and what each step made of it, or what is in its place now

    def __call__(self, at: slice, columns: slice | None = None) -> Tensor:
        layer, (_, wide) = self.layer, self.layer.shape
        columns = slice(0, wide) if columns is None else columns
        into = [None if buffer is None else buffer[:, : columns.stop - columns.start] for buffer in self.memory]
        if layer.z is not None:
            self.values = [layer.z[at, columns]]
        elif layer.b is None:
            self.values = [torch.mm(layer.h[at], layer.w[:, columns], out=into[0])]
        else:
            self.values = [torch.addmm(layer.b[columns], layer.h[at], layer.w[:, columns], out=into[0])]
        for (name, operand), place in zip(self.steps, self.place[1:], strict=True):
            self.values.append(POINTWISE[name](self.values[-1], operand, into[place]))  # type: ignore[arg-type]
        return self.values[-1]


class _Gradient:
    """Computes gradients of the product for some rows and columns, in place of their logits if types agree.

    ATen's kernel reads a gradient of all log-probabilities, which is zero but for the target's: that is kept, and
    written to at the targets only.
    """

    def __init__(
        self, layer: Layer, form: Form, g: Tensor, u: Tensor | None, sums: Tensor, size: tuple[int, int], apart: int = 0
    ) -> None:
        self.form, self.g, self.u, self.sums = form, g, u, sums
        self.logits = _Logits(layer, form, *size, saved=True, apart=apart)
        self.y = layer.y.where(layer.y != form.ignore, 0)[:, None]
        last = self.logits.last
        self.given = torch.zeros_like(last)
        types = {kind for name, kind in form.backward if name == CAST} - {form.dtype}
        self.memory = {dtype: torch.empty_like(last, dtype=dtype) for dtype in types} | {form.dtype: last}

    def __call__(self, at: slice, columns: slice | None = None) -> Tensor:
        # Columns behind the block stand for targets outside of it.
        self.logits(at, columns)
        q, y, g = self.logits.last, self.y[at], self.g[at]
        if columns is not None:
            wide = columns.stop - columns.start
            q[:, wide:].zero_()
            y = y - columns.start
            y = y.where((y >= 0) & (y < wide), wide)

        # Turn logits into log-probabilities.
        if self.form.dtype is EXACT:
            q.sub_(self.sums[1, at, None]).add_(self.sums[2, at, None])
        else:
            torch.log_softmax(q, 1, out=q)
        # Turn these into gradients, by ATen's kernel, and go back through the steps to the product.
        if self.u is not None:
            self.given.copy_(self.u[at] + 0.0)
            g = self.u[at] + g
        self.given.scatter_(1, y, g)
        aten._log_softmax_backward_data.out(self.given, q, 1, q.dtype, out=q)
        self.given.scatter_(1, y, 0.0)
        dx = q if columns is None else q[:, :wide]
        for name, operand in self.form.backward:
            out = dx if name != CAST else self.memory[operand][:, : dx.shape[1]]
            dx = POINTWISE[name](dx, self.logits.values[operand] if name in OF_RESULT else operand, out)
        return dx


_PASSES = {row_sums: 5, gradient_of_rows: 9, gradients_of_weights: 10}  # over all logits, reading or writing
_STEP = 2  # such passes of each step between the product and the softmax


class Estimate(NamedTuple):
    """The estimated cost of one of these functions; bytes are beside inputs and results."""

    flop: int
    launches: int  # of kernels
    moved_bytes: int
    workspace_bytes: int


def estimate(node: fx.Node) -> Estimate | None:
    """The cost of a node that calls one of these functions; None for any other node."""
    if node.target not in _PASSES:
        return None
    # Products: one for the logits, unless they are kept, again for each block of whole rows; and one for the gradient.
    args: Any = node.args
    form: Form = args[1]
    layer = Layer(*(None if leaf is None else leaf.meta["val"] for leaf in args[0]))
    (rows, columns), forward = layer.shape, node.target is row_sums
    of_weights = node.target is gradients_of_weights
    by_columns, block = of_weights and form.by_columns, length(columns, form.parts, COLUMNS)
    part = length(rows, form.parts, ROWS)
    inside = rows * (block + APART) if by_columns else part * columns
    again = -(-columns // block) if of_weights and not by_columns else 1
    products = (0 if layer.z is not None else again) + (not forward and (not of_weights or args[5]))
    depth = 0 if not products else layer.h.shape[1] if layer.h is not None else args[5].meta["val"].shape[1]
    # Passes over all logits, and the bytes that each takes beside the results.
    passes = _PASSES[node.target] + _STEP * (len(form.forward) + (0 if forward else len(form.backward)))
    _, types, _ = _memory(layer, form, saved=not forward)
    each_logit = sum(dtype.itemsize for dtype in types if dtype)
    if not forward:  # the kernel of the gradient has a buffer in float32 for half precision
        more = [form.dtype, *({kind for name, kind in form.backward if name == CAST} - {form.dtype})]
        each_logit += sum(dtype.itemsize for dtype in more) + (4 if form.dtype.itemsize == 2 else 0)
    whole, size = (columns, block) if of_weights else (rows, part)
    return Estimate(
        flop=2 * rows * columns * depth * products,
        launches=passes * -(-whole // size),
        moved_bytes=(_PASSES[node.target] + passes * (again - 1)) * rows * columns * form.dtype.itemsize,
        workspace_bytes=inside * each_logit
        + (rows * block * layer.dtype.itemsize if of_weights and not by_columns else 0),
    )
