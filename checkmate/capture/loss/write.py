"""Rewrite a linear layer and its cross entropy in a copy of the joint graph, so that they run in parts."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from checkmate.capture.loss.find import SLICES, Loss, Nodes, is_of_rows, losses
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
from checkmate.capture.rewrite import without_dead_code

aten = torch.ops.aten


class LossSplit(NamedTuple):
    """The parts of a loss; with kept logits there is one buffer of their size, and nothing runs twice."""

    parts: int
    kept: bool = False

    def __str__(self) -> str:
        return f"loss in {self.parts} parts" + (" beside its logits" if self.kept else "")


LOSS_SPLITS = (
    *(LossSplit(parts, kept=True) for parts in (4, 16)),
    *(LossSplit(2**i) for i in range(1, 7)),
)  # from cheap to small


def loss_splits_of(step_losses: Iterable[Loss]) -> tuple[LossSplit, ...]:
    """Splits for these losses; if the step shows all logits, only splits that keep them."""
    shown = [loss.shown for loss in step_losses]
    return tuple(split for split in LOSS_SPLITS if shown and (split.kept or not all(shown)))


def in_parts(module: fx.GraphModule, split: LossSplit) -> fx.GraphModule:
    """Copy a prepared joint graph with each loss in parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from within PyTorch, of what it copies beside the nodes
        graph = deepcopy(module.graph)  # the fake tensors are the same
    for loss in losses(graph):
        _write(graph, loss, split)
    return without_dead_code(module, graph)


def _write(graph: fx.Graph, loss: Loss, split: LossSplit) -> None:
    """Write the calls of a loss in parts; the ops that they replace lose their readers."""
    softmax, forward, backward = loss.softmax, loss.forward, loss.backward
    smooth = loss.row_sum is not None or loss.smoothing is not None
    form = Form(loss.ignore_index, softmax.meta["val"].dtype, *loss.steps, smooth, split.parts)
    to_loss, back = (*loss.before, *loss.after), (*loss.given, *loss.through)
    y, weight, reduction = forward.args[1:4]
    target, weights, u = y, None, None

    def chosen(sums: fx.Node, i: int) -> fx.Node:
        """A column of one of the results of `row_sums`, for the rows that reach the loss."""
        return _rows(to_loss, call(softmax, aten.unsqueeze.default, (call(softmax, aten.select.int, (sums, 0, i)), 1)))

    with graph.inserting_before(forward):
        # Rows that are sliced away before the loss get the target ``ignore_index``.
        if any(node.target in SLICES for node in back):
            over = call(softmax, aten.sub.Tensor, (y, loss.ignore_index))
            column = _rows(back, call(softmax, aten.unsqueeze.default, (over, 1)))
            over = call(softmax, aten.select.int, (column, 1, 0))
            target = call(softmax, aten.add.Tensor, (over, loss.ignore_index))
        layer = Layer(loss.h, loss.w, loss.b, target)
        if split.kept or loss.shown:
            layer = Layer(None, None, None, target, loss.product)

        # The loss is that of one column of log-probabilities, the chosen ones.
        fake = softmax.meta["val"].new_empty((3 + form.smooth, loss.product.meta["val"].shape[0]))
        sums = call(softmax, row_sums, (layer, form), val=fake)
        column = chosen(sums, 0)
        targets = call(forward, one_class, (y, form.ignore))
        if weight is not None:
            weights = call(forward, class_weights, (weight, y, form.ignore))
            forward.target = weighted_loss
        forward.args = (column, targets, weights, reduction, form.ignore)
        if loss.row_sum is not None:
            total = chosen(sums, 3)
            loss.row_sum.replace_all_uses_with(call(loss.row_sum, aten.select.int, (total, 1, 0)))

    with graph.inserting_before(min(loss.ends)):
        # Gradients of the chosen log-probabilities, and of all of a row with label smoothing, back at the layer's rows.
        of_loss, _, _, _, *options = backward.args
        val = torch.empty_like(column.meta["val"])
        g = call(backward, aten.nll_loss_backward.default, (of_loss, column, targets, None, *options), val=val)
        if weights is not None:
            g = call(backward, aten.mul.Tensor, (g, weights))
        g = _rows(back, g)
        if loss.smoothing is not None:
            u = _rows(back, loss.smoothing.args[0])  # type: ignore[arg-type]

    if loss.of_rows is not None:  # in its own place: there its weight has been transposed
        with graph.inserting_before(loss.of_rows):
            read = layer, form, g, u, sums, loss.of_rows.args[1]
            of_rows = call(loss.of_rows, gradient_of_rows, read, val=loss.of_rows.meta["val"])
        loss.of_rows.replace_all_uses_with(of_rows)
    wanted = [end for end in (loss.of_weight, loss.of_bias) if end is not None]
    if wanted:
        with graph.inserting_before(min(wanted)):
            flags = loss.of_weight is not None, loss.of_bias is not None
            vals = tuple(end.meta["val"] for end in wanted)
            args = (layer._replace(h=loss.h), form, g, u, sums, *flags)
            both = call(wanted[0], gradients_of_weights, args, val=vals)
            gradients = [call(end, operator.getitem, (both, i), val=vals[i]) for i, end in enumerate(wanted)]
        for end, gradient in zip(wanted, gradients, strict=True):
            end.replace_all_uses_with(gradient)


def _rows(path: Nodes, x: fx.Node) -> fx.Node:
    """Slice and zero-pad a column like the rows on a path."""
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
