"""`InParts`: some ops of a step as one call that runs them part by part, with few of their inner values at a time."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.device import WAVERS
from checkmate.capture.nodes import storage, target_name, tensors
from checkmate.capture.splits.table import SUMMED, OpSplit
from checkmate.capture.ways.rounding_probes import packet_of
from checkmate.capture.ways.shape_only import convolution_backward_input, max_pool2d_backward
from checkmate.capture.ways.table import Written

log = logging.getLogger("checkmate.capture.splits")
aten = torch.ops.aten
_SHAPED = {aten.view, aten._unsafe_view, aten.reshape, aten.expand}  # their second argument is the result's shape
_LIKE_INPUT = {aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward}  # and here the third


@dataclass(frozen=True)
class Region:
    """Ops that run in parts together, and what is split of each."""

    splits: Mapping[fx.Node, OpSplit]  # of each op and view, in the order of the graph
    units: int  # that the split dimension has
    made: tuple[fx.Node, ...]  # what others read of it

    def dim(self, node: fx.Node) -> int | None:
        """The dimension along which a tensor of the region is split, or that it is summed."""
        return self.splits[node].results[0]

    @property
    def form(self) -> tuple[Any, ...]:
        """Which ops are split how: the same for regions that are the same."""
        return self.units, tuple((n, split.results) for n, split in self.splits.items()), self.made

    def inputs(self) -> dict[tuple[fx.Node, int | None], None]:
        """What the region reads, with the dimension along which that is split."""
        return dict.fromkeys(
            (argument, at)
            for split in self.splits.values()
            for argument, at in split.reads.items()
            if argument not in self.splits and (at is None or at >= 0)
        )


def graph_of(region: Region, length: int) -> tuple[fx.Graph, Region]:
    """A region as a graph of its own for parts of so many units, with fake results; whole for all units.

    Raises:
        Exception: of any kind, where an op does not run on parts.
    """
    graph = fx.Graph()
    given: dict[tuple[fx.Node, int | None], fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    splits: dict[fx.Node, OpSplit] = {}
    for i, (node, at) in enumerate(region.inputs()):
        made = given[node, at] = graph.placeholder(f"in_{i}")
        made.meta["val"] = part_of(node.meta["val"], at, 0, region.units, length)
    for i, (node, split) in enumerate(region.splits.items()):
        here: dict[fx.Node, Any] = {
            n: copies[n] if n in copies else given.get((n, at)) for n, at in split.reads.items()
        }
        for n in [n for n, found in here.items() if found is None]:
            here[n] = _shaped(graph, n, ~split.reads[n], region.units, length)  # type: ignore[operator]
        target, args = (node.target, node.args) if length == region.units else _adapted(node, split, region, length)
        if split.call is not None:
            target, args = split.call
        args, kwargs = fx.node.map_arg((args, node.kwargs), here.__getitem__)
        copy = copies[node] = graph.create_node("call_function", target, args, kwargs, f"op_{i}")
        copy.meta = {"val": _result(copy, node.meta["val"]), WAVERS: node.meta.get(WAVERS)}
        splits[copy] = OpSplit(split.results, {here[n]: at for n, at in split.reads.items()})
    results = tuple(copies[node] for node in region.made)
    for node, copy in zip(region.made, results, strict=True):
        if copy.meta["val"].shape != _scaled(node.meta["val"].shape, region.dim(node), region.units, length):
            raise ValueError(f"{node.name} has no parts of {length} of {region.units} units")
    graph.output(results)
    if length < region.units:
        graph.eliminate_dead_code()  # shapes that are not asked for
    return graph, Region(splits, region.units, results)


def _shaped(graph: fx.Graph, node: fx.Node, at: int, units: int, length: int) -> fx.Node:
    """Memory for an op that reads nothing of an argument but its shape and layout."""
    val = node.meta["val"]
    shape = _scaled(val.shape, at, units, length)
    kind = {"dtype": val.dtype, "device": val.device}
    args: Any = list(shape), list(_dense(shape, val.stride()))
    made = graph.call_function(aten.empty_strided.default, args, kind)
    with val.fake_mode:
        made.meta["val"] = torch.empty_strided(*args, **kind)
    return made


def _result(node: fx.Node, whole: Any) -> Any:
    """The fake result of a node, which stands for another one, whose fake result is given."""
    if node.target in (convolution_backward_input, max_pool2d_backward):  # they read real memory
        shape: Any = node.args[2]
        with whole.fake_mode:
            return whole.new_empty_strided(shape, _dense(shape, whole.stride()))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fakes = [t for t in tensors((args, kwargs)) if hasattr(t, "fake_mode")]
    if not fakes:
        raise ValueError(f"{node.name} reads no tensor")
    with fakes[0].fake_mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _scaled(shape: Sequence[int], at: int | None, units: int, length: int) -> torch.Size:
    return torch.Size(size // units * length if d == at else size for d, size in enumerate(shape))


def part_of(tensor: Tensor, at: int | None, begin: int, units: int, length: int) -> Tensor:
    """A tensor's part of so many units along a dimension; all of it where that is None."""
    if at is None:
        return tensor
    unit = tensor.shape[at] // units
    return tensor.narrow(at, begin * unit, length * unit)


def _adapted(node: fx.Node, split: OpSplit, region: Region, length: int) -> tuple[Any, tuple[Any, ...]]:
    """What a node calls for a part: sizes among its arguments are those of the part."""
    target: Any = node.target
    packet = packet_of(target)
    args: list[Any] = list(node.args)
    vals = node.meta["val"]
    units = region.units
    if packet in _SHAPED:
        args[1] = list(_scaled(vals.shape, split.results[0], units, length))
        return (target if packet is aten.expand else aten.reshape.default), tuple(args)
    if packet in (aten.full, aten.zeros, aten.ones):
        args[0] = list(_scaled(vals.shape, split.results[0], units, length))
    elif packet in _LIKE_INPUT:
        args[2] = list(_scaled(args[2], split.results[0], units, length))
    elif packet is aten.native_group_norm:
        args[3] = args[3] // units * length
    elif packet is aten.native_group_norm_backward:
        args[5] = args[5] // units * length
    elif packet is aten._native_batch_norm_legit_functional:
        return aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:])
    elif packet in (convolution_backward_input, max_pool2d_backward):
        shape = _scaled(args[2], split.results[0], units, length)
        args[2:4] = tuple(shape), _dense(shape, args[3])
    if packet in (aten.convolution, aten.convolution_backward, convolution_backward_input):
        groups = -2 if packet is aten.convolution_backward else -1
        by_channels = 1 in split.results[:1] or 0 in split.results[1:]
        if by_channels and args[groups] > 1:
            args[groups] = args[groups] // units * length
        if packet is aten.convolution_backward and args[3] is not None:
            args[3] = list(_scaled(args[3], (*split.results, None)[2], units, length))
    return target, tuple(args)


def _dense(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions lie in memory as in another."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


@dataclass(frozen=True)
class _Made:
    """A result: where parts are written."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    at: int  # the dimension along which it is split, or `SUMMED`

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class InParts:
    """A region that runs part by part.

    Parts have one length; the last overlaps the one before where they do not divide the whole, which they do if
    anything is summed over them.
    """

    region: Region  # of a graph of its own
    part: fx.Graph
    run: Callable[..., tuple[Tensor, ...]]  # the part's code
    given: tuple[int | None, ...]  # the dimension along which each input is split
    made: tuple[_Made, ...]
    length: int  # of a part, in units
    text: str  # what it computes of what: the same for regions that are alike
    __name__ = "in_parts"

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results."""
        return self._run(inputs, tuple(made.empty() for made in self.made))

    def over(self, *inputs: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """The same, the first result written over one of the inputs."""
        return self._run(inputs, (out, *(made.empty() for made in self.made[1:])))

    @property
    def written(self) -> Written | None:
        """How the first result is written over an input that is split as it is; None where parts overlap."""
        if self.region.units % self.length or self.made[0].at == SUMMED:
            return None
        alike = tuple(i for i, at in enumerate(self.given) if at == self.made[0].at)
        return Written(self.over, alike, pointwise=False, by_parts=True)

    def _run(self, inputs: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        units = self.region.units
        for begin in range(0, units, self.length):
            self._write(inputs, results, min(begin, units - self.length))
        return results

    def _write(self, inputs: tuple[Tensor, ...], results: tuple[Tensor, ...], begin: int) -> None:
        about = begin, self.region.units, self.length
        some = [part_of(x, at, *about) for x, at in zip(inputs, self.given, strict=True)]
        for made, result, part in zip(self.made, results, self.run(*some), strict=True):
            if made.at == SUMMED:
                result.add_(part) if begin else result.copy_(part)
            else:
                part_of(result, made.at, *about).copy_(part)

    @property
    def summed(self) -> tuple[bool, ...]:
        """Which of the results are summed over the parts."""
        return tuple(made.at == SUMMED for made in self.made)

    @property
    def whole(self) -> fx.Graph:
        """The same at once."""
        return self.region.made[0].graph

    @property
    def parts(self) -> int:
        """How many there are."""
        return -(-self.region.units // self.length)

    @property
    def inner_bytes(self) -> int:
        """Bytes of what is there while a part runs, beside the inputs and results of the whole."""
        return held_bytes(self.part)

    def __str__(self) -> str:
        return f"checkmate.in_{self.parts}_parts.{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"

    def in_more_parts(self) -> InParts | None:
        """The same in parts of half the length; None: these cannot be."""
        length = self.length
        while length > 1:
            length = -(-length // 2)
            if (found := in_parts(self.region, length)) is not None or not any(self.summed):
                return found
        return None


def in_parts(region: Region, length: int) -> InParts | None:
    """A region as a function that runs in parts of so many units; None: an op does not run on parts.

    Args:
        region: `apart` from its graph.
        length: of a part.
    """
    made = []
    for node in region.made:
        val, at = node.meta["val"], region.dim(node)
        if at is None or not aten.is_non_overlapping_and_dense(val):
            return None
        made.append(_Made(tuple(val.shape), tuple(val.stride()), val.dtype, val.device, at))
    if region.units % length and any(one.at == SUMMED for one in made):
        return None
    try:
        part = graph_of(region, length)[0]
    except Exception as error:  # noqa: BLE001  # whatever it is, the op has no parts
        log.debug("not in parts of %d: %s", length, error)
        return None
    given = tuple(at for _, at in region.inputs())
    run = fx.GraphModule({}, part).forward
    return InParts(region, part, run, given, tuple(made), length, _text(region, made))


def apart(region: Region) -> Region | None:
    """A region in a graph of its own, whose placeholders are its inputs; None: it cannot be."""
    try:
        return graph_of(region, region.units)[1]
    except Exception as error:  # noqa: BLE001
        log.debug("no region: %s", error)
        return None


def _text(region: Region, made: Sequence[_Made]) -> str:
    inputs = [(about_of(n.meta["val"]), at) for n, at in region.inputs()]
    ops = [f"{n.name}={target_name(n)}{n.args}{n.kwargs or ''}" for n in region.splits]
    return f"{inputs}; {ops}; {[(m.shape, m.stride, m.dtype, m.at) for m in made]} {region.made}"


def about_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors share that are alike."""
    return str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type


def copy_of(module: fx.GraphModule) -> fx.Graph:
    """A copy of a graph's nodes; their fake tensors are the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from within PyTorch, of what it copies beside the nodes
        return deepcopy(module.graph)


class Unwritten(fx.GraphModule):
    """A module whose code is not written: few of the splits that are looked at become a plan, and that is written."""

    def recompile(self) -> Any:
        """Nothing."""

    def forward(self, *args: Any) -> Any:
        """Run it node by node."""
        return fx.Interpreter(self).run(*args)


def held_bytes(graph: fx.Graph) -> int:
    """The most bytes that a graph holds beside its inputs, if each value goes after its last use."""
    inputs = {storage(t) for n in graph.find_nodes(op="placeholder") for t in tensors(n.meta["val"])}
    nodes = list(graph.nodes)
    last: dict[int, int] = {}
    for k, node in enumerate(nodes):
        for n in (node, *node.all_input_nodes):
            last.update((storage(t), k) for t in tensors(n.meta.get("val")))
    sizes: dict[int, int] = {}
    most = 0
    for k, node in enumerate(nodes):
        new = [t for t in tensors(node.meta.get("val")) if storage(t) not in inputs]
        sizes |= {storage(t): t.untyped_storage().nbytes() for t in new if last[storage(t)] >= k}
        most = max(most, sum(sizes.values()))
        sizes = {key: size for key, size in sizes.items() if last[key] > k}
    return most
