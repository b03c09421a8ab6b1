"""Where a traced step has a linear layer and its cross entropy, and how it is made to run in parts.

    mm or addmm -> views, a cast -> _log_softmax -> nll_loss_forward
    nll_loss_backward -> _log_softmax_backward_data -> a cast, views -> mm (rows), mm (weight), sum (bias)

Nothing else may read what is in between: logits that the step returns, or reads elsewhere, have to be there.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import storage
from checkmate.capture.rewrite import without_dead_code
from checkmate.capture.splits.loss import gradient_of_rows, gradients_of_weights, one_class, row_sums

aten = torch.ops.aten
_SAME = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}  # of what is contiguous: the same numbers
_PRODUCTS = {aten.mm.default: 2, aten.addmm.default: 3}  # with their numbers of arguments
_CAST = aten._to_copy.default
_KEPT_BY_CASTS = {"dtype", "layout", "device"}  # arguments that say nothing else than the type


@dataclass(frozen=True)
class Loss:
    """The nodes of one such place; gradients that nobody asks for are None."""

    product: fx.Node
    h: fx.Node  # (N, D)
    w: fx.Node  # (D, V)
    b: fx.Node | None  # (V,)
    softmax: fx.Node
    forward: fx.Node
    backward: fx.Node
    of_rows: fx.Node | None
    of_weight: fx.Node | None
    of_bias: fx.Node | None

    @property
    def ignore_index(self) -> int:
        """The target of rows that do not count."""
        return self.forward.args[4]  # type: ignore[return-value]


def losses(graph: fx.Graph) -> list[Loss]:
    """All places of a prepared joint graph."""
    found = (_read(node) for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default))
    return [loss for loss in found if loss is not None]


def _read(forward: fx.Node) -> Loss | None:
    if len(forward.args) != 5 or forward.kwargs:
        return None
    softmax, y, weight, _, _ = forward.args
    if weight is not None or not isinstance(softmax, fx.Node) or softmax.target is not aten._log_softmax.default:
        return None
    logits, dim, half_to_float = softmax.args
    val, product = softmax.meta["val"], _source(logits)  # type: ignore[arg-type]
    if val.dim() != 2 or dim not in (1, -1) or half_to_float or product is None or not y.meta["val"].is_contiguous():  # type: ignore[union-attr]
        return None
    *bias, h, w = product.args
    if product.meta["val"].shape != val.shape or (bias and bias[0].meta["val"].dim() != 1):  # type: ignore[union-attr]
        return None
    if {*softmax.users} - {forward} != {*(pair := _backward(softmax, forward))}:
        return None
    backward, through = pair
    ends = _ends(through)
    if ends is None or not _agree(product, h, w, ends):  # type: ignore[arg-type]
        return None
    return Loss(product, h, w, bias[0] if bias else None, softmax, forward, backward, *ends)  # type: ignore[arg-type]


def _source(node: fx.Node) -> fx.Node | None:
    """The product that logits come from, unchanged but for their type, and that nothing else reads."""
    cast = False
    while len(node.users) == 1 and node.meta["val"].is_contiguous():
        if node.target in _PRODUCTS:
            return node if len(node.args) == _PRODUCTS[node.target] and not node.kwargs else None
        if not _is_passed_on(node) or (cast and node.target is _CAST):
            return None
        cast |= node.target is _CAST
        node = node.args[0]  # type: ignore[assignment]
    return None


def _is_passed_on(node: fx.Node) -> bool:
    """The same numbers in the same order, maybe in another type."""
    if node.target is _CAST:
        args: Any = node.all_input_nodes
        same = args[0].meta["val"].device == node.meta["val"].device
        return same and {*node.kwargs} <= _KEPT_BY_CASTS
    return node.target in _SAME and bool(node.all_input_nodes[0].meta["val"].is_contiguous())


def _backward(softmax: fx.Node, forward: fx.Node) -> tuple[fx.Node, ...]:
    """The two nodes of the backward that read the log-probabilities, if they belong to this loss."""
    for node in softmax.users:
        if node.target is aten._log_softmax_backward_data.default and isinstance(node.args[0], fx.Node):
            given = node.args[0]
            mine = given.target is aten.nll_loss_backward.default and given.args[1:6] == forward.args
            if mine and list(given.users) == [node] and node.args[1] is softmax:
                return given, node
    return ()


def _ends(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None] | None:
    """What the gradient of the logits goes into: gradients of rows, weight and bias; None if into anything else."""
    while len(node.users) == 1 and _is_passed_on(user := next(iter(node.users))):
        node = user
    found: dict[str, fx.Node] = {}
    for user in node.users:
        turned = user.target is aten.t.default and len(user.users) == 1
        reader = next(iter(user.users)) if turned else user
        given = user if turned else node
        if reader.target is aten.mm.default and reader.args[0] is given and reader.args[1] is not given:
            kind = "weight" if turned else "rows"
        elif user.target is aten.sum.dim_IntList and user.args == (node, [0], True) and not user.kwargs:
            kind = "bias"
        else:
            return None
        if kind in found:
            return None
        found[kind] = reader
    return found.get("rows"), found.get("weight"), found.get("bias")


def _agree(product: fx.Node, h: fx.Node, w: fx.Node, ends: tuple[fx.Node | None, ...]) -> bool:
    """The backward reads the rows and the weight of the forward, and makes what the parts would."""
    rows, weight, _ = ends
    wide, val = w.meta["val"], h.meta["val"]
    if rows is not None:
        back: Any = rows.args[1]
        back = back.meta["val"]
        if storage(back) != storage(wide) or back.stride() != wide.stride()[::-1] or not val.is_contiguous():
            return False
    if weight is not None and weight.args[1] is not h:
        return False
    return any(end is not None for end in ends) and product.meta["val"].numel() > 0


def in_parts(module: fx.GraphModule, parts: int) -> fx.GraphModule:
    """A copy of a prepared joint graph in which each such loss runs in so many parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from within PyTorch, of what it copies beside the nodes
        graph = copy.deepcopy(module.graph)  # of its nodes; their fake tensors are the same
    for loss in losses(graph):
        _write(graph, loss, parts)
    return without_dead_code(module, graph)


def _write(graph: fx.Graph, loss: Loss, parts: int) -> None:
    about = loss.h, loss.w, loss.b, loss.forward.args[1]
    ignore, dtype = loss.ignore_index, loss.softmax.meta["val"].dtype
    rows = loss.h.meta["val"].shape[0]
    like = loss.softmax.meta["val"]
    with graph.inserting_before(loss.forward), like.fake_mode, torch.no_grad():
        fake = like.new_empty((3, rows))
        sums = _call(graph, loss.softmax, row_sums, (*about, ignore, dtype, parts), fake)
        first = _call(graph, loss.softmax, aten.select.int, (sums, 0, 0), fake.select(0, 0))
        column = _call(graph, loss.softmax, aten.unsqueeze.default, (first, 1), first.meta["val"].unsqueeze(1))
        y = torch.empty_like(about[3].meta["val"])  # type: ignore[union-attr]
        targets = _call(graph, loss.forward, one_class, (about[3], ignore), y)
    loss.forward.args = (column, targets, *loss.forward.args[2:])
    with graph.inserting_before(loss.backward), like.fake_mode:
        given, _, _, *rest = loss.backward.args
        g = _call(graph, loss.backward, aten.nll_loss_backward.default, (given, column, targets, *rest), y)
        g.meta["val"] = like.new_empty((rows, 1))
    if loss.of_rows is not None:
        with graph.inserting_before(loss.of_rows):
            args = *about, g, sums, loss.of_rows.args[1], ignore, parts
            made = _call(graph, loss.of_rows, gradient_of_rows, args, loss.of_rows.meta["val"])
        loss.of_rows.replace_all_uses_with(made)
    wanted = [end for end in (loss.of_weight, loss.of_bias) if end is not None]
    if wanted:
        with graph.inserting_before(min(wanted)):
            flags = loss.of_weight is not None, loss.of_bias is not None
            vals = tuple(end.meta["val"] for end in wanted)
            both = _call(graph, wanted[0], gradients_of_weights, (*about, g, sums, ignore, parts, *flags), vals)
            for i, end in enumerate(wanted):
                end.replace_all_uses_with(_call(graph, end, operator.getitem, (both, i), end.meta["val"]))


def _call(graph: fx.Graph, origin: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], val: Any) -> fx.Node:
    """A node with the provenance of another."""
    node = graph.create_node("call_function", target, args)
    node.meta = {key: what for key, what in origin.meta.items() if key != "tensor_meta"} | {"val": val}
    return node
