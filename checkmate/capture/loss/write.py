"""Rewrite a linear layer and its cross entropy in a copy of the joint graph, so that they run in parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from checkmate.capture.loss.find import SLICES, Loss, is_of_rows, losses
from checkmate.capture.loss.kernels import (
    Form,
    Layer,
    class_weights,
    gradient_of_rows,
    gradients_of_weights,
    one_class,
    row_sums,
    weighted_loss,
)
from checkmate.capture.nodes import call
from checkmate.capture.rewrite import Unwritten, copy_of, without_dead_code

aten = torch.ops.aten


class LossSplit(NamedTuple):
    """The parts of a loss; with its logits kept there is one buffer of their size, and nothing runs twice."""

    parts: int
    kept: bool = False

    def __str__(self) -> str:
        return f"loss in {self.parts} parts" + (" beside its logits" if self.kept else "")


LOSS_SPLITS = (
    *(LossSplit(parts, kept=True) for parts in (4, 16)),
    *(LossSplit(2**i) for i in range(1, 7)),
)  # from cheap to small


def loss_splits_of(found: Iterable[Loss]) -> tuple[LossSplit, ...]:
    """Splits for these losses; where the step shows all logits, only splits that keep them."""
    shown = [loss.shown for loss in found]
    return tuple(split for split in LOSS_SPLITS if shown and (split.kept or not all(shown)))


def in_parts(module: fx.GraphModule, split: LossSplit) -> fx.GraphModule:
    """Copy a prepared joint graph with each loss in parts."""
    graph = copy_of(module)
    for loss in losses(graph):
        _Writer(graph, loss, split).write()
    return without_dead_code(module, graph, Unwritten)


class _Writer:
    """Writes one loss."""

    def __init__(self, graph: fx.Graph, loss: Loss, split: LossSplit) -> None:
        self.graph, self.loss = graph, loss
        smooth = loss.row_sum is not None or loss.smoothing is not None
        dtype = loss.softmax.meta["val"].dtype
        self.form = Form(loss.ignore_index, dtype, *loss.steps, smooth, split.parts)
        self.kept = split.kept or loss.shown
        self.rows, _ = loss.product.meta["val"].shape

    def write(self) -> None:
        """Write the calls, and leave the ops that they replace without readers."""
        loss = self.loss
        with self.graph.inserting_before(loss.forward):
            layer = self._layer()
            sums = self._forward(layer)
        with self.graph.inserting_before(min(loss.ends)):
            self._backward(layer, sums)

    def _layer(self) -> Layer:
        """The layer with a target for each row: ``ignore_index`` for rows that are sliced away before the loss."""
        loss, y = self.loss, self.loss.forward.args[1]
        back = (*loss.given, *loss.through)
        if any(node.target in SLICES for node in back):
            over = call(loss.softmax, aten.sub.Tensor, (y, loss.ignore_index))
            column = self._rows(back, call(loss.softmax, aten.unsqueeze.default, (over, 1)))
            over = call(loss.softmax, aten.select.int, (column, 1, 0))
            y = call(loss.softmax, aten.add.Tensor, (over, loss.ignore_index))
        if self.kept:
            return Layer(None, None, None, y, loss.product)
        return Layer(loss.h, loss.w, loss.b, y)

    def _forward(self, layer: Layer) -> fx.Node:
        loss, form = self.loss, self.form
        y, weight, how = loss.forward.args[1:4]
        made = loss.softmax.meta["val"].new_empty((3 + form.smooth, self.rows))
        sums = call(loss.softmax, row_sums, (layer, form), val=made)
        self.column = self._chosen(sums, 0)
        self.targets = call(loss.forward, one_class, (y, form.ignore))
        loss.forward.args = (self.column, self.targets, None, how, form.ignore)
        self.weights = None
        if weight is not None:
            self.weights = call(loss.forward, class_weights, (weight, y, form.ignore))
            loss.forward.target = weighted_loss
            loss.forward.args = (self.column, self.targets, self.weights, how, form.ignore)
        if loss.row_sum is not None:
            column = self._chosen(sums, 3)
            loss.row_sum.replace_all_uses_with(call(loss.row_sum, aten.select.int, (column, 1, 0)))
        return sums

    def _backward(self, layer: Layer, sums: fx.Node) -> None:
        loss, form = self.loss, self.form
        given, _, _, _, *rest = loss.backward.args
        back = (*loss.given, *loss.through)
        args = (given, self.column, self.targets, None, *rest)
        column = torch.empty_like(self.column.meta["val"])
        g = call(loss.backward, aten.nll_loss_backward.default, args, val=column)
        if self.weights is not None:
            g = call(loss.backward, aten.mul.Tensor, (g, self.weights))
        g, u = self._rows(back, g), None
        if loss.smoothing is not None:
            u = self._rows(back, loss.smoothing.args[0])  # type: ignore[arg-type]
        if loss.of_rows is not None:  # in its own place: there its weight has been transposed
            with self.graph.inserting_before(loss.of_rows):
                read = layer, form, g, u, sums, loss.of_rows.args[1]
                of_rows = call(loss.of_rows, gradient_of_rows, read, val=loss.of_rows.meta["val"])
            loss.of_rows.replace_all_uses_with(of_rows)
        wanted = [end for end in (loss.of_weight, loss.of_bias) if end is not None]
        if wanted:
            with self.graph.inserting_before(min(wanted)):
                flags = loss.of_weight is not None, loss.of_bias is not None
                read = layer._replace(h=loss.h), form, g, u, sums, *flags  # type: ignore[assignment]
                vals = tuple(end.meta["val"] for end in wanted)
                both = call(wanted[0], gradients_of_weights, read, val=vals)
                made = [call(end, operator.getitem, (both, i), val=vals[i]) for i, end in enumerate(wanted)]
            for end, gradient in zip(wanted, made, strict=True):
                end.replace_all_uses_with(gradient)

    def _chosen(self, sums: fx.Node, i: int) -> fx.Node:
        """A column of one of the numbers that `row_sums` gives, of the rows that reach the loss."""
        origin = self.loss.softmax
        one = call(origin, aten.unsqueeze.default, (call(origin, aten.select.int, (sums, 0, i)), 1))
        return self._rows((*self.loss.before, *self.loss.after), one)

    @staticmethod
    def _rows(path: tuple[fx.Node, ...], x: fx.Node) -> fx.Node:
        """Slice and zero-pad a column as the rows are on a path."""
        if not any(node.target in SLICES for node in path):
            return x
        for node in filter(is_of_rows, path):
            if node.target in SLICES:
                args: list[Any] = [x, *node.args[1:]]
                if node.target is aten.slice_backward.default:
                    args[1] = [*args[1][:-1], 1]
                x = call(node, node.target, tuple(args))
            elif node.target is aten.clone.default:
                x = call(node, node.target, (x,), kwargs=node.kwargs)
            else:
                x = call(node, aten.view.default, (x, [*node.meta["val"].shape[:-1], 1]))
        return x
