"""Whether a region in parts has the bits of the whole: op by op, by the argument that each has for it.

An op of a region reads in a part what it reads of the whole: the same elements, and in the same bits, if the ops before
it keep theirs. So it is enough that each op keeps its own (`checkmate.capture.splits.table`).

Of a loss in parts (`checkmate.capture.splits.loss`) the whole is tried, and its three products by themselves: an order
that differs shows in the gradients, which are sums in the type of the layer, and of half precision in its products
alone, on numbers that cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.device import in_autograds_thread, main_device
from checkmate.capture.nodes import ancestors, is_view, target_name, tensors
from checkmate.capture.splits.find_loss import Loss, losses
from checkmate.capture.splits.lanes import same_lanes
from checkmate.capture.splits.loss import COLUMNS, ROWS, length, slices
from checkmate.capture.splits.parts import InParts, about_of, part_of
from checkmate.capture.splits.table import SUMMED, Argument, OpSplit, argument_of
from checkmate.capture.splits.write_loss import LossSplit, in_parts
from checkmate.capture.ways.batch_norm import gradient_of_input, normalized
from checkmate.capture.ways.rounding_probes import DRAWN, cancel, made_up, repeat, same_bytes
from checkmate.memory import CPU
from checkmate.memory.room import ran_out_of_memory, within_memory
from checkmate.torch_internals.dispatcher import outside_tracing
from checkmate.torch_internals.trees import tree_leaves

INPUTS, MOST_INPUTS = 2, 32  # on which a region is tried as a whole
ENOUGH, SUMMED_UP = 2**20, 2**22  # numbers made, and read, on which a wrong sum shows; logits, another order
COMPARED = 2**10  # numbers, at least
OP_INPUTS, OP_COMPARED = 4, 2**16  # on which an op is tried, half of which cancel, and numbers that it makes of these
SCALES = (1.0, 8.0)  # of the logits of a loss: flat distributions, and some that are nearly certain
_EPS = 1e-5  # of a batch norm
_tried: dict[tuple[Any, ...], float] = {}
aten = torch.ops.aten
Compared = tuple[Tensor, Tensor, bool | None]  # of the whole, of parts; summed over these; None: wherever it lies


def off_in_parts(parts: InParts) -> float:
    """The most that sums over parts are off by, with as many threads as now: a share of their largest element.

    0.0: all bits are those of the whole. Infinite: something that is no such sum may have other bits, or half of the
    digits of a sum's type are others, which rounding does not explain. Where there is no memory for the whole, its ops
    answer for it, each for its own bits, unless it sums over the parts.

    max |in parts - whole|  /  max |whole|
    """
    key = _key_of(parts)
    if key in _tried:
        return _tried[key]
    off = sum(map(off_of, parts.whole.nodes)) if all(_keeps(op) for op in _ops(parts)) else inf
    if off == inf:
        return inf
    trial = partial(_of_region, parts, fx.GraphModule({}, parts.whole).forward)
    names = dict.fromkeys(target_name(node) for node in parts.region.splits if not is_view(node))
    about = f"{', '.join(names)} at once", "each is tried alone"
    found = _once(key, lambda: off + _most_off(trial, range(inputs_of(parts))), *about)
    return found if any(parts.summed) or is_tried(parts) else off


def is_tried(parts: InParts) -> bool:
    """Whether a region was tried as a whole, for which there may have been no memory."""
    return _key_of(parts) in _tried


def _key_of(parts: InParts) -> tuple[Any, ...]:
    return parts.text, parts.length, torch.get_num_threads()


def _once(
    key: tuple[Any, ...], trial: Callable[[], float], what: str, instead: str = "it does not run in parts"
) -> float:
    """The result of a trial, which is made once in a process; infinite, and not kept, if there is no memory for it.

    ``what`` is tried, and what happens ``instead``, is for the log.
    """
    if key not in _tried:
        with outside_tracing(), torch.no_grad():
            found = within_memory(trial, what, instead)
        if not found:
            return inf
        _tried[key] = found[0]
    return _tried[key]


def _most_off(trial: Callable[[int], Iterable[Compared]], seeds: Iterable[int]) -> float:
    """The most that parts are off by on inputs of these seeds; infinite if they may not be, or an op refuses them."""
    most = 0.0
    try:
        for whole, found, summed in chain.from_iterable(map(trial, seeds)):
            if (most := max(most, _distance(whole, found, summed=summed))) == inf:
                break
            del whole, found  # before those of the next inputs are made
    except torch.AcceleratorError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out_of_memory(error):
            raise
        return inf
    return most


def _arguments(node: fx.Node, seed: int) -> tuple[dict[fx.Node, Tensor], tuple[Any, ...], dict[str, Any]]:
    """Made-up tensors for what an op reads, and the op's arguments with these; the terms of its sums cancel in half."""
    draw = torch.Generator().manual_seed(seed)
    values = {n: made_up(n.meta["val"], draw, seed // 2) for n in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if not seed % 2:
        cancel(node.target, args, draw)
    return values, args, kwargs


def is_argued(parts: InParts) -> bool:
    """Whether all that needs no trial speaks for equal bits of what is not summed over the parts."""
    return all(_by_rule(op) is not None for op in _ops(parts))


def said_of(parts: InParts) -> str:
    """By which arguments bits are equal, in words."""
    found = {argument for op in _ops(parts) if (argument := _by_rule(op)) not in (None, Argument.COPIES)}
    return ", ".join(argument.value for argument in Argument if argument in found) or Argument.COPIES.value


class _Op:
    """An op of a region, at once and in parts."""

    def __init__(self, parts: InParts, whole: fx.Node, part: fx.Node) -> None:
        self.parts, self.whole, self.part = parts, whole, part
        self.split: OpSplit = parts.region.splits[whole]

    @property
    def key(self) -> tuple[Any, ...]:
        """What it computes of what, in which parts: the same for ops that are alike."""
        about = [[(t.dtype, t.shape, t.stride(), t.device) for t in self._tensors(n)] for n in (self.whole, self.part)]
        reads = [self.split.reads.get(n) for n in self.whole.all_input_nodes]
        others = fx.node.map_arg((self.whole.args, self.whole.kwargs, self.part.args), lambda n: None)
        how = str(reads), self.split.results, self.parts.region.units, self.parts.length
        return self.whole.target, str(others), str(about), how, torch.get_num_threads()

    @staticmethod
    def _tensors(node: fx.Node) -> list[Tensor]:
        """What it makes, and reads."""
        return [*tensors(node.meta["val"]), *(t for n in node.all_input_nodes for t in tensors(n.meta["val"]))]

    def has_same_lanes(self) -> bool:
        """Whether each element of a part is computed by the same code."""
        if self.part.meta["val"].device.type != "cpu":
            return True
        return same_lanes(self._tensors(self.whole), self._tensors(self.part), torch.get_num_threads())

    def inputs(self) -> int:
        """How many it is tried on: more if it makes little."""
        made = sum(t.numel() for t in tensors(self.whole.meta["val"]))
        return min(MOST_INPUTS, max(OP_INPUTS, -(-OP_COMPARED // max(1, made))))

    def compared(self, seed: int) -> Iterator[Compared]:
        """Each part, as it is of the whole and by itself."""
        values, args, kwargs = _arguments(self.whole, seed)
        target: Any = self.whole.target
        made = _results(target(*args, **kwargs))
        given = dict(zip((n.name for n in self.whole.all_input_nodes), self.whole.all_input_nodes, strict=True))
        units, length = self.parts.region.units, self.parts.length
        for begin in range(0, units, length):
            at = min(begin, units - length), units, length
            some = {n: self._given(n, given.get(n.name), values, at) for n in self.part.all_input_nodes}
            part_args, part_kwargs = fx.node.map_arg((self.part.args, self.part.kwargs), some.__getitem__)
            found = _results(self.part.target(*part_args, **part_kwargs))  # type: ignore[operator]
            for dim, one, other in zip(self.split.results, made, found, strict=False):
                if dim not in (None, SUMMED) and one is not None:  # a gradient that is asked for
                    yield part_of(one, dim, *at), other, None

    def _given(self, node: fx.Node, whole: fx.Node | None, values: dict[fx.Node, Tensor], at: Sequence[int]) -> Any:
        """What a part reads: a view of what the whole reads if that is an input of the region, else of its own."""
        dim = None if whole is None else self.split.reads[whole]
        if whole is None or (dim is not None and dim < 0):  # memory for the shape
            return node.target(*node.args, **node.kwargs)  # type: ignore[operator]
        found = part_of(values[whole], dim, *at)
        if whole.op == "placeholder":
            return found
        like: Tensor = node.meta["val"]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(found)


def _ops(parts: InParts) -> Iterator[_Op]:
    """The ops of a region that its parts run."""
    here = {n.name: n for n in parts.part.nodes}
    for node in parts.region.splits:
        if node.name in here:
            yield _Op(parts, node, here[node.name])


def _by_rule(op: _Op) -> Argument | None:
    """An op's argument, if what it says of shapes and layouts holds."""
    found = argument_of(op.whole, op.split)
    return found if found is not Argument.LANES or op.has_same_lanes() else None


def _keeps(op: _Op) -> bool:
    """Whether an op keeps its bits in parts, those aside that are summed over the parts."""
    argument = _by_rule(op)
    if argument not in (Argument.ROWS, Argument.ORDER):
        return argument is not None
    if all(dim in (None, SUMMED) for dim in op.split.results):
        return True
    return _once(op.key, lambda: _most_off(op.compared, range(op.inputs())), target_name(op.whole)) == 0


def _results(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def off_of(node: fx.Node) -> float:
    """The same of a batch norm without its sums: what its whole is off by from PyTorch's op. 0.0 of all other ops."""
    if node.target not in (normalized, gradient_of_input):
        return 0.0
    x, weight = node.args[:2] if node.target is normalized else node.args[1:3]
    like: Tensor = x.meta["val"]  # type: ignore[union-attr]
    kind = None if weight is None else weight.meta["val"].dtype  # type: ignore[union-attr]
    key = node.target, like.shape, like.stride(), like.dtype, like.device, kind, torch.get_num_threads()
    # a rounding more or less shows in one of four elements
    seeds = range(min(MOST_INPUTS, max(INPUTS, -(-OP_COMPARED // max(1, like.numel())))))
    return _once(key, lambda: _most_off(partial(_of_batch_norm, node.target, like, kind), seeds), target_name(node))


def _of_batch_norm(target: Any, like: Tensor, kind: torch.dtype | None, seed: int) -> Iterator[Compared]:
    """A batch norm's result, or the gradient of its input, and the same made of its sums."""
    draw = torch.Generator().manual_seed(seed)
    x, *others = (made_up(like, draw, seed), *(torch.rand(like.shape[1], generator=draw) for _ in range(2)))
    weight, bias = (None if kind is None else one.to(like.device, kind) for one in others)
    made, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, _EPS)
    if target is normalized:
        yield made, normalized(x, weight, bias, mean, invstd), False
        return
    grad = made_up(like, torch.Generator().manual_seed(seed + MOST_INPUTS), seed)
    about = weight, None, None, mean, invstd, True, _EPS, [True, True, True]
    made, of_weight, of_bias = aten.native_batch_norm_backward(grad, x, *about)
    found = gradient_of_input(grad, x, weight, mean, invstd, of_weight, of_bias, x.numel() // x.shape[1])
    yield made, found, True


def same_bits(parts: InParts) -> bool:
    """Whether a region in parts has the bits of the whole, with as many threads as now."""
    return off_in_parts(parts) == 0


def most_off(parts: InParts) -> float:
    """The most that sums over parts may be off by to be offered: a share of their largest element."""
    types = [made.dtype for made, summed in zip(parts.made, parts.summed, strict=True) if summed]
    return max(map(_half_of_the_digits, types), default=0.0)


def inputs_of(parts: InParts) -> int:
    """How many inputs a region is tried on: more if it sums, and makes little of little."""
    made = sum(n.meta["val"].numel() for n in parts.region.made)
    read = sum(n.meta["val"].numel() for n in parts.whole.find_nodes(op="placeholder"))
    shows = max(min(ENOUGH // max(1, made), SUMMED_UP // max(1, read)), COMPARED // max(1, made))
    return min(MOST_INPUTS, max(INPUTS, shows)) if any(parts.summed) else INPUTS


def _of_region(parts: InParts, whole: Callable[..., Any], seed: int) -> Iterator[Compared]:
    """The results of a region; on a device also in autograd's thread, for which libraries choose kernels anew."""
    draw = torch.Generator().manual_seed(seed)
    inputs = [made_up(n.meta["val"], draw, seed) for n in parts.whole.find_nodes(op="placeholder")]

    def made() -> Iterator[Compared]:
        return zip(whole(*inputs), parts(*inputs), parts.summed, strict=True)

    yield from made()
    if (device := main_device(inputs)) != CPU:
        yield from in_autograds_thread(device, made)


def _distance(whole: Tensor, found: Tensor, *, summed: bool | None) -> float:
    """By how much a result is off; infinite if it may not be."""
    if summed is not None and whole.stride() != found.stride():
        return inf
    if same_bytes(whole, found):
        return 0.0
    if not summed or not whole.dtype.is_floating_point:
        return inf
    wide, other = (t.float() if t.element_size() < 4 else t for t in (whole, found))
    off = float((other - wide).abs().max() / wide.abs().max())
    return off if off <= _half_of_the_digits(whole.dtype) else inf  # not a number: no


def _half_of_the_digits(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps ** 0.5)


def loss_keeps_bits(loss: Loss, split: LossSplit) -> bool:
    """Whether the loss and its gradients in so many parts have the bits of the whole, with as many threads as now."""
    module = alone(loss)
    about = tuple(
        (str(n.target), str(n.args), str(n.kwargs), *map(about_of, tensors(n.meta.get("val"))))
        for n in module.graph.nodes
    )
    whole, products = partial(_of_loss, module, in_parts(module, split)), partial(_of_products, loss, split)

    def trial() -> float:
        return _most_off(whole, range(inputs_of_loss(loss))) or _most_off(products, range(OP_INPUTS))

    return _once((about, split, torch.get_num_threads()), trial, str(split)) == 0


def inputs_of_loss(loss: Loss) -> int:
    """How many inputs a loss is tried on: more if it is small."""
    return min(MOST_INPUTS, max(INPUTS, ENOUGH // loss.product.meta["val"].numel()))


def alone(loss: Loss) -> fx.GraphModule:
    """A loss and its backward, of what they read, in the order of the whole; logits that the step shows are read."""
    results = [*(user for user in loss.forward.users if user.args[1] == 0), loss.row_sum, *loss.ends]
    nodes = sorted(ancestors([node for node in results if node is not None], until=loss.given_nodes))
    graph = fx.Graph()
    given = sorted({one for node in nodes for one in node.all_input_nodes} - {*nodes})
    copies = {node: graph.create_node("placeholder", f"given{i}") for i, node in enumerate(given)}
    for node, copied in copies.items():
        copied.meta = {"val": node.meta["val"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results if node is not None))
    return fx.GraphModule({}, graph)


def _of_loss(whole: fx.GraphModule, parts: fx.GraphModule, seed: int) -> Iterator[Compared]:
    """A loss and its gradients."""
    (loss,) = losses(whole.graph)
    inputs = _made_up(whole.graph, loss, torch.Generator().manual_seed(seed), SCALES[seed % len(SCALES)])
    for one, other in zip(*(tree_leaves(run(*inputs)) for run in (whole, parts)), strict=True):
        yield one, other, None


def _of_products(loss: Loss, split: LossSplit, seed: int) -> Iterator[Compared]:
    """The layer's product and those of its gradients, by rows and by columns."""
    rows, columns = loss.product.meta["val"].shape
    by_rows = [*slices(rows, length(rows, split.parts, ROWS))]
    by_columns = [*slices(columns, length(columns, split.parts, COLUMNS), COLUMNS)]
    for node, some in (loss.product, by_rows), (loss.of_rows, by_rows), (loss.of_weight, by_columns):
        if node is not None:
            _, (*bias, a, b), _ = _arguments(node, seed)
            target: Any = node.target
            whole = target(*bias, a, b)
            for at in some:
                part = a[at] if a.is_contiguous() else a[at].t().contiguous().t()  # as it lies in a part's own memory
                yield whole[at], target(*bias, part, b), None


def _made_up(graph: fx.Graph, loss: Loss, draw: torch.Generator, scale: float) -> list[Tensor]:
    """Inputs: normal numbers, positive class weights, and targets of which some do not count."""
    depth, columns = loss.w.meta["val"].shape
    weights = {loss.w, *loss.w.all_input_nodes}
    made = []
    for node in graph.find_nodes(op="placeholder"):
        one = made_up(node.meta["val"], draw, 1 if node is loss.forward.args[2] else 0)
        if node is loss.forward.args[1]:
            repeat(one, torch.randint(columns, (min(DRAWN, len(one)),), generator=draw))
            one[:: 2 + len(one) // 8] = loss.ignore_index
        made.append(one.mul_(scale * depth**-0.5) if node in weights else one)
    return made
