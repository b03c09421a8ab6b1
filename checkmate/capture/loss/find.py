"""Find each linear layer with its cross entropy in a traced step, in forward and backward.

    mm or addmm -> scales, a cap, casts, slices of rows -> _log_softmax -> nll_loss_forward, and the sum of each row
    nll_loss_backward -> _log_softmax_backward_data -> the same back -> mm (rows), mm (weight), sum (bias)

with views anywhere. Nothing else may read what is in between, but for logits: those that the step returns, or reads
elsewhere, stay whole, and what is made of them for the loss is there in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.loss.kernels import CAST, OF_RESULT, POINTWISE, Pointwise
from checkmate.capture.nodes import leaf_nodes, storage, viewed
from checkmate.torch_internals.capturing import is_sym_node

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: 2, aten.addmm.default: 3}  # with their numbers of arguments
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default}
SLICES = {aten.slice.Tensor: 1, aten.slice_backward.default: 2}  # with the argument that is the dimension
_KEPT_BY_CASTS = {"dtype", "layout", "device"}  # arguments that say nothing else than the type
Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True)
class Loss:
    """The nodes of one linear layer with its cross entropy; unused gradients are None."""

    product: fx.Node
    before: Nodes  # from there to the softmax, each reads the one before
    softmax: fx.Node
    after: Nodes  # from there to the loss
    forward: fx.Node
    row_sum: fx.Node | None  # of log-probabilities, with label smoothing
    backward: fx.Node
    smoothing: fx.Node | None  # the gradient of that sum, expanded to all columns
    given: Nodes  # from the gradient of the loss to that of the softmax
    gradient: fx.Node  # of what goes into the softmax
    through: Nodes  # from there to the gradient of the product
    of_rows: fx.Node | None
    of_weight: fx.Node | None
    of_bias: fx.Node | None

    @property
    def h(self) -> fx.Node:
        """The rows: (N, D)."""
        return self.product.args[-2]  # type: ignore[return-value]

    @property
    def w(self) -> fx.Node:
        """The weight: (D, V)."""
        return self.product.args[-1]  # type: ignore[return-value]

    @property
    def b(self) -> fx.Node | None:
        """The bias: (V,)."""
        return self.product.args[0] if len(self.product.args) == 3 else None  # type: ignore[return-value]

    @property
    def ignore_index(self) -> int:
        """The target that marks ignored rows."""
        return self.forward.args[4]  # type: ignore[return-value]

    @property
    def ends(self) -> Nodes:
        """The gradients that are used."""
        return tuple(end for end in (self.of_rows, self.of_weight, self.of_bias) if end is not None)

    @property
    def shown(self) -> bool:
        """Tell whether anything else reads the logits, anywhere up to the softmax."""
        own = {*self.before, self.softmax, *self.through}
        return any(user not in own for node in (self.product, *self.before) for user in node.users)

    @property
    def steps(self) -> tuple[tuple[Pointwise, ...], tuple[Pointwise, ...]]:
        """Pointwise ops from the product to the softmax, and those of the gradient on the way back."""
        before = [node for node in self.before if str(node.target) in POINTWISE]
        back = [node for node in self.through if str(node.target) in POINTWISE]
        return tuple(_step(node, before) for node in before), tuple(_step(node, before) for node in back)

    @property
    def given_nodes(self) -> set[fx.Node]:
        """The inputs of the loss: nodes outside of it."""
        weights = [self.w, *(self.of_rows.args[1:] if self.of_rows is not None else ())]
        inputs: Any = self.h, self.b, *map(viewed, weights), *self.forward.args[1:3], self.backward.args[0]  # type: ignore[arg-type]
        numbers = {n for node in (*self.before, *self.through) for n in node.all_input_nodes if is_sym_node(n)}
        return numbers.union(leaf_nodes(inputs), () if self.smoothing is None else self.smoothing.all_input_nodes)


def _step(node: fx.Node, forward: list[fx.Node]) -> Pointwise:
    name = str(node.target)
    operand: Any = node.kwargs["dtype"] if name == CAST else node.args[1] if len(node.args) > 1 else None
    return name, forward.index(operand) + 1 if name in OF_RESULT else operand


def losses(graph: fx.Graph) -> list[Loss]:
    """The losses of a prepared joint graph that can run in parts."""
    candidates = (_read(node) for node in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default))
    return [loss for loss in candidates if loss is not None]


def _read(forward: fx.Node) -> Loss | None:
    """Read the loss that ends in this node; None if it cannot run in parts."""
    # Follow the log-probabilities up to the softmax and the product.
    args: Any = forward.args
    if len(args) != 5 or forward.kwargs or not args[1].meta["val"].is_contiguous():
        return None
    q = args[0]
    softmax, after = _up(q, aten._log_softmax.default, pointwise=False)
    if softmax is None or not _along_rows(softmax) or softmax.args[2]:
        return None
    product, before = _up(softmax.args[0], *_PRODUCTS)
    if product is None or product.kwargs or len(product.args) != _PRODUCTS[product.target]:  # type: ignore[index]
        return None
    backwards = [n for n in q.users if n.target is aten.nll_loss_backward.default and n.args[1:6] == args]
    if len(backwards) != 1 or product.meta["val"].numel() == 0:
        return None
    # Follow the gradient of the loss to that of the softmax, with the term of label smoothing where there is one.
    (backward,) = backwards
    (user,) = backward.users if len(backward.users) == 1 else (backward,)
    is_sum = user.target is aten.add.Tensor and user.args[1] is backward and not user.kwargs
    smoothing: Any = user.args[0] if is_sum and _is_expanded(user.args[0]) else None
    path = [backward] if smoothing is None else [backward, user]
    path += _down(path[-1], ())
    (gradient,) = path[-1].users if len(path[-1].users) == 1 else (backward,)
    if gradient.target is not aten._log_softmax_backward_data.default or gradient.args[:2] != (path[-1], softmax):
        return None
    if any(str(node.target) in POINTWISE for node in path) or not _along_rows(gradient, 2):
        return None
    # Follow it on to the gradients of the layer, and find the sum of rows.
    through = tuple(_down(gradient, before))
    sums = [n for n in softmax.users if n.target is aten.sum.dim_IntList and not n.kwargs]
    row_sums = [n for n in sums if n.args[1:] in (([1],), ([-1],))]
    row_sum = row_sums[0] if len(row_sums) == 1 else None
    ends = _ends((gradient, *through)[-1], product)
    if ends is None or (row_sum is not None and (after or row_sum < forward)):
        return None
    of_forward = (product, before, softmax, after, forward, row_sum)
    loss = Loss(*of_forward, backward, smoothing, tuple(path[1:]), gradient, through, *ends)
    own = {*after, forward, backward, gradient, row_sum}
    weighted_smoothing = row_sum is not None and args[2] is not None
    return loss if all({*node.users} <= own for node in (softmax, *after)) and not weighted_smoothing else None


def _up(node: Any, *ends: Any, pointwise: bool = True) -> tuple[fx.Node | None, Nodes]:
    """Follow a node up to one of these ops; give it and the path, or None if another op stands between."""
    path: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target not in ends:
        if not (is_of_rows(node) or (pointwise and _is_pointwise(node, ()))):
            return None, ()
        path.append(node)
        node = node.args[0]
    return (node, tuple(reversed(path))) if isinstance(node, fx.Node) else (None, ())


def _down(node: fx.Node, forward: Nodes) -> Iterator[fx.Node]:
    """Follow a gradient from op to op until it has another reader."""
    while len(node.users) == 1:
        (user,) = node.users
        if not (is_of_rows(user) or _is_pointwise(user, forward)) or user.args[0] is not node:
            return
        yield (node := user)


def _is_expanded(node: Any) -> bool:
    """Tell whether this is one number per row, expanded to all columns."""
    if not isinstance(node, fx.Node) or node.target is not aten.expand.default or len(node.users) != 1:
        return False
    source: Any = node.args[0]
    return bool(source.meta["val"].shape == (node.meta["val"].shape[0], 1) and node.meta["val"].dim() == 2)


def is_of_rows(node: fx.Node) -> bool:
    """Tell whether the op only views, slices or zero-pads rows, each row whole."""
    args: Any = node.args
    source = node.all_input_nodes
    if len(source) != 1 or args[0] is not source[0]:
        return False
    before, val = source[0].meta["val"], node.meta["val"]
    if node.target not in _VIEWS | {*SLICES} or before.dim() < 2 or val.shape[-1:] != before.shape[-1:]:
        return False
    if node.target in SLICES:
        return bool(args[SLICES[node.target]] % val.dim() != val.dim() - 1)
    return bool(val.is_contiguous())


def _is_pointwise(node: fx.Node, forward: Iterable[fx.Node]) -> bool:
    """Tell whether an op works element by element; a backward may read the forward's result too."""
    args: Any = node.args
    if (name := str(node.target)) not in POINTWISE:
        return False
    if name == CAST:
        same = args[0].meta["val"].device == node.meta["val"].device
        return same and {"dtype"} <= {*node.kwargs} <= _KEPT_BY_CASTS
    if name in OF_RESULT:
        return args[1] in forward
    operands = [n for n in node.all_input_nodes if n is not args[0]]
    return isinstance(args[0], fx.Node) and all(map(is_sym_node, operands)) and not node.kwargs


def _along_rows(node: fx.Node, position: int = 1) -> bool:
    dim: Any = node.args[position]
    return bool(dim % node.meta["val"].dim() == node.meta["val"].dim() - 1)


def _ends(node: fx.Node, product: fx.Node) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None] | None:
    """Gradients of rows, weight and bias, from the gradient of the product.

    None if anything else reads that, or if they are not made of the rows and the weight of the forward as in parts.
    """
    # Each reader is one of the three products or sums, each once.
    readers: dict[str, fx.Node] = {}
    for user in node.users:
        turned = user.target is aten.t.default and len(user.users) == 1
        reader = next(iter(user.users)) if turned else user
        gradient = user if turned else node
        if reader.target is aten.mm.default and reader.args[0] is gradient and reader.args[1] is not gradient:
            kind = "weight" if turned else "rows"
        elif user.target is aten.sum.dim_IntList and user.args == (node, [0], True) and not user.kwargs:
            kind = "bias"
        else:
            return None
        if kind in readers:
            return None
        readers[kind] = reader
    # They read the rows and the weight of the forward.
    rows, weight, bias = map(readers.get, ("rows", "weight", "bias"))
    *b, h, w = (arg.meta["val"] for arg in product.args)  # type: ignore[union-attr]
    if not readers or (b and b[0].dim() != 1):
        return None
    if rows is not None:
        back: Any = rows.args[1]
        back = back.meta["val"]
        if storage(back) != storage(w) or back.stride() != w.stride()[::-1] or not h.is_contiguous():
            return None
    if weight is not None and weight.args[1] is not product.args[-2]:
        return None
    return rows, weight, bias
