"""Whether a loss in parts has the bits of the whole: tried on made-up inputs of its shapes, types and layouts.

Which order a kernel sums in depends on the shapes that it is given, the machine, and the number of threads, not on the
numbers. So what held for some inputs holds for others, if these can tell: an order that differs shows in the gradients,
which are sums in the type of the layer, and of half precision in its products alone, on numbers that cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.splits.find_loss import Loss, losses
from checkmate.capture.splits.loss import COLUMNS, ROWS, length, slices
from checkmate.capture.splits.write_loss import Split, in_parts
from checkmate.capture.ways.made_up import cancel, made_up
from checkmate.torch_internals.dispatcher import _disable_current_modes
from checkmate.torch_internals.trees import tree_leaves

INPUTS, MOST_INPUTS = 2, 32  # on which all bits must be equal
ENOUGH = 2**20  # logits on which an order that differs shows
PRODUCT_INPUTS = 4  # on which each product of the layer keeps its bits, two of which cancel
SCALES = (1.0, 8.0)  # of their logits: flat distributions, and some that are nearly certain
_tried: dict[tuple[Any, ...], bool] = {}


def same_bits_in_parts(loss: Loss, split: Split) -> bool:
    """Whether the loss and its gradients in so many parts have the bits of the whole, with as many threads as now."""
    module = alone(loss)
    about = tuple(_about(node) for node in module.graph.nodes)
    key = about, split, torch.get_num_threads()
    if key not in _tried:
        parts = in_parts(module, split)
        with _disable_current_modes(), torch.no_grad():
            _tried[key] = all(_equal(module, parts, seed) for seed in range(inputs_of(loss))) and all(
                _products_keep(loss, split, seed) for seed in range(PRODUCT_INPUTS)
            )
    return _tried[key]


def inputs_of(loss: Loss) -> int:
    """How many inputs a loss is tried on: more if it is small."""
    return min(MOST_INPUTS, max(INPUTS, ENOUGH // loss.product.meta["val"].numel()))


def alone(loss: Loss) -> fx.GraphModule:
    """A loss and its backward, of what they read, in the order of the whole; logits that the step shows are read."""
    nodes = sorted({*loss.nodes()})
    graph = fx.Graph()
    given = sorted({one for node in nodes for one in node.all_input_nodes} - {*nodes})
    copies = {node: graph.create_node("placeholder", f"given{i}") for i, node in enumerate(given)}
    for node, copied in copies.items():
        copied.meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [*(user for user in loss.forward.users if user.args[1] == 0), loss.row_sum, *loss.ends]
    graph.output(tuple(copies[node] for node in results if node is not None))
    return fx.GraphModule({}, graph)


def _about(node: fx.Node) -> tuple[Any, ...]:
    vals = tree_leaves(node.meta.get("val"))
    shapes = tuple((v.dtype, tuple(v.shape), tuple(v.stride()), v.device.type) for v in vals if isinstance(v, Tensor))
    return str(node.target), str(node.args), str(node.kwargs), shapes


def _equal(whole: fx.GraphModule, parts: fx.GraphModule, seed: int) -> bool:
    (loss,) = losses(whole.graph)
    inputs = _made_up(whole.graph, loss, torch.Generator().manual_seed(seed), SCALES[seed % len(SCALES)])
    pairs = zip(*(tree_leaves(run(*inputs)) for run in (parts, whole)), strict=True)
    return all(bool((_bytes(one) == _bytes(other)).all()) for one, other in pairs)


def _products_keep(loss: Loss, split: Split, seed: int) -> bool:
    """Whether the layer's product and those of its gradients have the bits of the whole, by rows and by columns."""
    rows, columns = loss.product.meta["val"].shape
    by_rows = [*slices(rows, length(rows, split.parts, ROWS))]
    by_columns = [*slices(columns, length(columns, split.parts, COLUMNS), COLUMNS)]
    cases = [(loss.product, by_rows), (loss.of_rows, by_rows), (loss.of_weight, by_columns)]
    return all(_product_keeps(node, some, seed) for node, some in cases if node is not None)


def _product_keeps(node: fx.Node, some: Sequence[slice], seed: int) -> bool:
    """Whether slices of the first factor make the same slices of the product."""
    draw = torch.Generator().manual_seed(seed)
    args = tuple(made_up(n.meta["val"], draw, 0) for n in node.all_input_nodes)
    if seed % 2:
        cancel(node.target, args, draw)
    target: Any = node.target
    *bias, a, b = args
    whole = target(*args)
    for at in some:
        part = a[at] if a.is_contiguous() else a[at].t().contiguous().t()  # as it lies in a part's own memory
        if not bool((_bytes(target(*bias, part, b)) == _bytes(whole[at])).all()):
            return False
    return True


def _made_up(graph: fx.Graph, loss: Loss, draw: torch.Generator, scale: float) -> list[Tensor]:
    """Inputs: normal numbers, positive class weights, and targets of which some do not count."""
    depth, columns = loss.w.meta["val"].shape
    weights = {loss.w, *loss.w.all_input_nodes}
    made = []
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if node is loss.forward.args[1]:
            like = torch.randint(columns, val.shape, generator=draw)
            like[:: 2 + len(like) // 8] = loss.ignore_index
        elif node is loss.forward.args[2]:
            like = torch.rand(val.shape, generator=draw)
        else:
            like = torch.empty(val.shape).normal_(generator=draw) * (scale * depth**-0.5 if node in weights else 1.0)
        made.append(_as(like, val))
    return made


def _as(numbers: Tensor, val: Tensor) -> Tensor:
    """Numbers in another type and layout, once where a dimension is expanded."""
    once = [1 if stride == 0 else size for size, stride in zip(val.shape, val.stride(), strict=True)]
    made = torch.empty_strided(once, val.stride(), dtype=val.dtype, device=val.device)
    return made.copy_(numbers[tuple(slice(size) for size in once)]).expand(val.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
