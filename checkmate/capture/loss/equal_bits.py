"""Try on made-up inputs, with the present number of threads, whether a loss in parts has the bits of the whole.

The whole is tried, and its three products by themselves: an order that differs shows in the gradients, which are sums
in the type of the layer, and of half precision in its products alone, on numbers that cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.loss.find import Loss, losses
from checkmate.capture.loss.kernels import COLUMNS, ROWS, length, slices
from checkmate.capture.loss.rounding_probes import DRAWN, cancel, made_up, repeat, same_bytes
from checkmate.capture.loss.write import LossSplit, in_parts
from checkmate.capture.nodes import ancestors, tensors
from checkmate.capture.patches.kernels import value_of
from checkmate.memory.available import ran_out_of_memory, within_memory
from checkmate.torch_internals.capturing import is_sym_node
from checkmate.torch_internals.running import outside_tracing, tree_leaves

INPUTS, MOST_INPUTS = 2, 32  # on which a loss is tried
ENOUGH = 2**20  # logits made, on which another order of a sum shows
PRODUCT_INPUTS = 4  # on which each product is tried, half of which cancel
SCALES = (1.0, 8.0)  # of the logits: flat distributions, and some that are nearly certain
_tried: dict[tuple[Any, ...], int] = {}  # by loss, split and threads: inputs on which bits were equal, or 0
_equal = set[tuple[Any, ...]]()  # those with equal bits, at some sizes
Compared = tuple[Tensor, Tensor]  # of the whole, of parts


def equal_inputs(loss: Loss, split: LossSplit) -> int:
    """The number of inputs on which a loss in parts has the bits of the whole, with the present threads; 0: it differs.

    The gradients are compared, too. The trial is made once in a process, and where the same loss kept its bits at other
    sizes, on half the inputs and a quarter of those of products. Where there is no memory for it, the answer is 0, and
    is not kept.
    """
    # The key of the trial: all nodes of the loss, the split and the threads.
    module = alone(loss)
    of_this_size, of_any_size = list[Any](), list[Any]()
    for n in module.graph.nodes:
        results = [(t.dtype, t.device.type, tuple(t.shape), tuple(t.stride())) for t in tensors(n.meta.get("val"))]
        of_this_size.append((str(n.target), str(n.args), str(n.kwargs), *results))
        of_any_size.append((str(n.target), len(n.args), *(layout[:2] for layout in results)))
    key, alike = ((tuple(facts), split, torch.get_num_threads()) for facts in (of_this_size, of_any_size))
    whole, products = partial(_of_loss, module, in_parts(module, split)), partial(_of_products, loss, split)
    few = alike in _equal
    count = max(1, inputs_of_loss(loss) // 2) if few else inputs_of_loss(loss)

    def trial() -> int:
        are_equal = _are_equal(whole, range(count)) and _are_equal(products, range(1 if few else PRODUCT_INPUTS))
        return count * are_equal

    if key not in _tried:
        with outside_tracing(), torch.no_grad():
            answer = within_memory(trial, str(split), "it does not run in parts")
        if not answer:
            return 0
        _tried[key] = answer[0]
        if answer[0]:
            _equal.add(alike)
    return _tried[key]


def _are_equal(trial: Callable[[int], Iterable[Compared]], seeds: Iterable[int]) -> bool:
    """Tell whether parts have the bits of the whole on inputs of these seeds; False if an op refuses them."""
    try:
        for whole, parts in chain.from_iterable(map(trial, seeds)):
            if not same_bytes(whole, parts):
                return False
            del whole, parts  # before those of the next inputs are made
    except torch.AcceleratorError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out_of_memory(error):
            raise
        return False
    return True


def inputs_of_loss(loss: Loss) -> int:
    """The number of inputs to try a loss on: more for a small one."""
    return min(MOST_INPUTS, max(INPUTS, ENOUGH // loss.product.meta["val"].numel()))


def alone(loss: Loss) -> fx.GraphModule:
    """A module of a loss and its backward alone, in the step's order; logits that the step shows are an input."""
    results = [*(user for user in loss.forward.users if user.args[1] == 0), loss.row_sum, *loss.ends]
    nodes = sorted(ancestors([node for node in results if node is not None], until=loss.given_nodes))
    graph = fx.Graph()
    inputs = sorted({source for node in nodes for source in node.all_input_nodes} - {*nodes})
    copies = {node: graph.create_node("placeholder", f"given{i}") for i, node in enumerate(inputs)}
    for node, copied in copies.items():
        copied.meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results if node is not None))
    return fx.GraphModule({}, graph)


def _of_loss(whole: fx.GraphModule, parts: fx.GraphModule, seed: int) -> Iterator[Compared]:
    """Compute a loss and its gradients on normal numbers, positive class weights and targets, some ignored."""
    (loss,) = losses(whole.graph)
    draw, scale = torch.Generator().manual_seed(seed), SCALES[seed % len(SCALES)]
    depth, columns = loss.w.meta["val"].shape
    weights = {loss.w, *loss.w.all_input_nodes}
    inputs = []
    for node in whole.graph.find_nodes(op="placeholder"):
        if is_sym_node(node):
            inputs.append(value_of(node.meta["val"]))
            continue
        numbers = made_up(node.meta["val"], draw, 1 if node is loss.forward.args[2] else 0)
        if node is loss.forward.args[1]:
            repeat(numbers, torch.randint(columns, (min(DRAWN, len(numbers)),), generator=draw))
            numbers[:: 2 + len(numbers) // 8] = loss.ignore_index
        inputs.append(numbers.mul_(scale * depth**-0.5) if node in weights else numbers)
    yield from zip(*(tree_leaves(run(*inputs)) for run in (whole, parts)), strict=True)


def _of_products(loss: Loss, split: LossSplit, seed: int) -> Iterator[Compared]:
    """Compute the products of the layer and its gradients by rows and by columns; half of the inputs cancel."""
    rows, columns = loss.product.meta["val"].shape
    by_rows = [*slices(rows, length(rows, split.parts, ROWS))]
    by_columns = [*slices(columns, length(columns, split.parts, COLUMNS), COLUMNS)]
    for node, parts in (loss.product, by_rows), (loss.of_rows, by_rows), (loss.of_weight, by_columns):
        if node is not None:
            target: Any = node.target
            draw = torch.Generator().manual_seed(seed)
            args = [made_up(n.meta["val"], draw, seed // 2) for n in node.args]  # type: ignore[union-attr]
            if not seed % 2:
                cancel(target, tuple(args), draw)
            *_, a, b = args
            whole = target(*args)
            for at in parts:
                part = a[at] if a.is_contiguous() else a[at].t().contiguous().t()  # as it lies in a part's own memory
                yield whole[at], target(*args[:-2], part, b)
