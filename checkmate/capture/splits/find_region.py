"""Find the ops around a large one that can run in parts together with it, and make them one call.

It begins with an op that needs many bytes, and a dimension of what it makes. What it reads is made within the region
too, if it is large and is made independently along that dimension: an op of the forward is then computed once more, in
parts, for the backward. What reads it joins likewise, if it is of the same phase. The results are what others read.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
import torch.fx as fx

from checkmate.capture.nodes import ancestors, call, getitems, has_effect, is_mutating, is_view, tensors, viewed
from checkmate.capture.phases import after_tangent
from checkmate.capture.random_draws import draw_mask, save_state
from checkmate.capture.splits.letters import values_of
from checkmate.capture.splits.parts import InParts, Region
from checkmate.capture.splits.table import OpSplit, divides, normalized_split, split_of, sums_of
from checkmate.capture.ways.batch_norm import FORWARD
from checkmate.capture.ways.table import is_alike, is_whole

aten = torch.ops.aten
SHARES = (1.5, 4, 16)  # a value is large if it has this share of the largest that the first op reads or makes
MOST_OPS = 24  # of a region
_OF_SHAPE = {draw_mask, save_state}  # they read the shape and layout of their argument only


@dataclass(frozen=True, eq=False)
class StepToSplit:
    """A graph in which regions are looked for."""

    graph: fx.Graph
    forward_outputs: tuple[fx.Node, ...]
    pinned: Collection[str]  # ops that have to run exactly once
    sums: bool = False  # sums over parts may be taken in, which round otherwise

    @cached_property
    def forward(self) -> set[fx.Node]:
        """All that the forward needs."""
        nodes = list(self.graph.nodes)
        later = after_tangent(nodes)
        once = [n for n in nodes if n not in later and n.op == "call_function" and has_effect(n)]
        return ancestors([*self.forward_outputs, *once])

    @cached_property
    def output(self) -> fx.Node:
        """The node of the results."""
        return self.graph.output_node()


@dataclass(frozen=True)
class Choice:
    """How a region is found from its first op."""

    result: int  # of the op
    dim: int  # of that result; of a sum which of those that the op can be
    units: int
    share: float  # what is large: see `SHARES`
    down: bool  # whether readers join
    summed: bool = False  # the op sums over parts

    def split(self, node: fx.Node) -> OpSplit | None:
        """How the first op runs in parts; None: it does not."""
        if self.summed:
            split = next(islice(sums_of(node), self.dim, None))
            return split if divides(split, self.units) else None
        return split_of(node, self.result, self.dim, self.units)


def choices(node: fx.Node, *, sums: bool = False) -> Iterator[Choice]:
    """All ways to begin with a node, with those that sum over parts if asked for; none with one that makes nothing."""
    vals = values_of(node)
    sizes = [val.nbytes if isinstance(val, torch.Tensor) else 0 for val in vals]
    result = sizes.index(max(sizes))
    if not sizes[result]:
        return
    ways = [(dim, dim, size, False) for dim, size in enumerate(vals[result].shape)]
    for k, split in enumerate(sums_of(node) if sums else ()):
        at, size = min((at, n.meta["val"].shape[at]) for n, at in split.reads.items() if at is not None)
        ways.append((k, at, size, True))
    for dim, at, size, summed in ways:
        for units in _units(node, at, size):
            for down in (True, False):
                for share in SHARES:
                    yield Choice(result, dim, units, share, down, summed)


def _units(node: fx.Node, dim: int, size: int) -> Iterator[int]:
    """In how many units a dimension may be split: each element, or what a view next to it has for its first part."""
    if size > 1:
        yield size
    near = {n for n in (*node.all_input_nodes, *node.users) if n.op == "call_function" and is_view(n)}
    near |= {m for n in near for m in (*n.all_input_nodes, *n.users) if m.op == "call_function" and is_view(m)}
    found = {s for n in near for t in tensors(n.meta.get("val")) for s in t.shape[: dim + 1] if 1 < s < size}
    yield from sorted((s for s in found if size % s == 0), reverse=True)[:2]


def region_at(step: StepToSplit, node: fx.Node, choice: Choice) -> Region | None:
    """The region that a choice gives at a node; None: there is none."""
    grown = _Grown(step, node, choice)
    if not grown.begin():
        return None
    made = grown.made()
    region = Region({n: grown.splits[n] for n in step.graph.nodes if n in grown.splits}, choice.units, tuple(made))
    if not made or any(region.dim(n) is None for n in made):
        return None
    before = ancestors(n for n, _ in region.inputs())
    return _with_what_is_written_over_first(region) if before.isdisjoint(made) else None


def _with_what_is_written_over_first(region: Region) -> Region:
    """The region, its first result one that may be written over an input, if there is any."""

    def rest(made: fx.Node) -> bool:
        return not any(at == region.dim(made) and _may_go(n, made, region) for n, at in region.inputs())

    return replace(region, made=tuple(sorted(region.made, key=rest)))


def _may_go(argument: fx.Node, made: fx.Node, region: Region) -> bool:
    """Whether what a region makes may lie where an input lay: in its form, and nothing else reads that afterwards."""
    source, call = viewed(argument), max(n for n, _ in region.inputs())
    if source.op != "call_function" or not is_alike(argument, made.meta["val"]) or not is_whole(argument):
        return False
    todo, faces = [source], {source}
    while todo:
        for user in todo.pop().users:
            if user not in region.splits and (user.op == "output" or user > call):
                return False
            if is_view(user) and user not in faces:
                faces.add(user)
                todo.append(user)
    return sum(n in faces for n, _ in region.inputs()) == 1


class _Grown:
    """A region as it grows."""

    def __init__(self, step: StepToSplit, first: fx.Node, choice: Choice) -> None:
        self.step, self.first, self.choice = step, first, choice
        self.phase = first in step.forward
        self.splits: dict[fx.Node, OpSplit] = {}
        self.ops = 0
        self.own: list[fx.Node] = []  # of the ops, those whose results are the region's: others are copies
        largest = max(_bytes(n) for n in (first, *first.all_input_nodes))
        self.least = max(1, int(largest / choice.share))

    def begin(self) -> bool:
        choice = self.choice
        split = choice.split(self.first)
        if split is None or not self._may_be_own(self.first) or not self._add(self.first, split):
            return False
        self.own.append(self.first)
        todo = [self.first]
        while choice.down and todo:
            joined = [user for user in self._readers(todo.pop()) if self._join(user)]
            self.own += joined
            todo += joined
        return True

    def _may_join(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.name in self.step.pinned:
            return False
        return not has_effect(node) and (not self.phase or node in self.step.forward)

    def _may_be_own(self, node: fx.Node) -> bool:
        """Whether an op's results may be the region's: not new running statistics, which parts do not make."""
        counts = node.target is FORWARD and any(face.args[1] > 2 and face.users for face in getitems(node))  # type: ignore[operator]
        return not counts and self._may_join(node)

    def _add(self, node: fx.Node, split: OpSplit) -> bool:
        """Take an op in, and what it reads that is large. False: parts of an argument are another's whole."""
        self.splits[node] = split
        self.ops += not is_view(node)
        if self.ops > MOST_OPS:
            return False
        for face in (face for face in _faces(node) if face is not node):
            if (at := split.results[face.args[1]]) is not None:  # type: ignore[index]
                self.splits[face] = OpSplit((at,), {node: None})
        return all(self._take(argument, at) for argument, at in split.reads.items())

    def _take(self, node: fx.Node, at: int | None) -> bool:
        """Have an argument made within the region, if that is worth it and can be. False: it is split another way."""
        if node in self.splits:
            return self._is_split(node, at)
        if at is None or at < 0 or node.op != "call_function" or _bytes(node) < self.least:
            return True
        source, index = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        assert isinstance(source, fx.Node)
        if not self._may_join(source) or (source.target is FORWARD and index):
            return True
        if (split := normalized_split(node, at)) is not None:
            return self._tried(node, split)
        split = split_of(source, index, at, self.choice.units)  # type: ignore[arg-type]
        return True if split is None else self._tried(source, split)

    def _tried(self, node: fx.Node, split: OpSplit) -> bool:
        """Take an op in, or leave all as it was."""
        before = dict(self.splits), self.ops
        if not self._add(node, split):
            self.splits, self.ops = before
        return True

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        for face in _faces(node):
            if _bytes(face) >= self.least:
                yield from face.users

    def _join(self, node: fx.Node) -> bool:
        """Take in an op that reads what the region makes, if it can be."""
        same = (node in self.step.forward) == self.phase
        if node in self.splits or not same or not self._may_be_own(node) or node.target is operator.getitem:
            return False
        for split in self._splits_of(node):
            if self._agrees(split):
                self._tried(node, split)
                if node in self.splits:
                    return True
        return False

    def _splits_of(self, node: fx.Node) -> Iterator[OpSplit]:
        """All ways in which an op may run in parts."""
        for index, val in enumerate(values_of(node)):
            for dim in range(val.dim() if isinstance(val, torch.Tensor) else 0):
                if (split := split_of(node, index, dim, self.choice.units)) is not None:
                    yield split
        if self.step.sums:
            yield from (split for split in sums_of(node) if divides(split, self.choice.units))

    def _agrees(self, split: OpSplit) -> bool:
        return all(n not in self.splits or self._is_split(n, at) for n, at in split.reads.items())

    def _is_split(self, node: fx.Node, at: int | None) -> bool:
        """Whether what the region makes is split as a reader needs it; one that needs but its shape takes a part."""
        return self.splits[node].results == (at if at is None else max(at, ~at),)

    def made(self) -> list[fx.Node]:
        """What is read of the region outside of it; not views, which are made of what is."""
        found: dict[fx.Node, None] = {}
        for node in self.own:
            faces = _faces(node)
            several = len(faces) > 1 and any(map(self._is_read, faces))
            found |= {
                viewed(n): None
                for n in faces
                if self._is_read(n) or (several and any(u not in self.splits for u in n.users))
            }
        return [n for n in found if n in self.splits]

    def _is_read(self, node: fx.Node) -> bool:
        """Whether an op outside of the region, of its phase, or the caller reads a value."""
        for user in node.users:
            if user in self.splits:
                continue
            if user is self.step.output:
                return True
            if user.target in _OF_SHAPE and stand_in(self.step.graph, node) is not None:
                continue
            if self._is_read(user) if is_view(user) else (user in self.step.forward) == self.phase:
                return True
        return False


def _faces(node: fx.Node) -> list[fx.Node]:
    """The results of an op, each a node."""
    return getitems(node) if isinstance(node.meta["val"], (tuple, list)) else [node]


def stand_in(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """An input of the step that can be viewed in the shape of a value, for ops that read nothing but that."""
    val = node.meta["val"]
    if not val.is_contiguous():
        return None
    for n in graph.find_nodes(op="placeholder"):
        like = n.meta.get("val")
        plain = isinstance(like, torch.Tensor) and like.device == val.device and like.dtype == val.dtype
        if plain and like.numel() and like.requires_grad and not any(map(is_mutating, n.users)):
            return n
    return None


def _bytes(node: fx.Node) -> int:
    """Of the memory behind a node's largest tensor that the step makes."""
    if viewed(node).op == "placeholder":
        return 0
    return max((t.untyped_storage().nbytes() for t in tensors(node.meta.get("val"))), default=0)


def bytes_of(parts: InParts, region: Region) -> int:
    """An estimate of the bytes that a region needs in parts: what it reads and makes, and a part of what is between.

    What it writes over an input that goes with it counts once.
    """
    read = {n for argument, _ in region.inputs() if (n := viewed(argument)).op == "call_function"}
    made = sum(_bytes(n) for n in region.made)
    given = [n for n, _ in region.inputs()]
    over = () if parts.written is None else parts.written.positions
    once = max((_bytes(given[i]) for i in over if _may_go(given[i], region.made[0], region)), default=0)
    return sum(_bytes(n) for n in read) + made + parts.inner_bytes - once


def write(step: StepToSplit, first: fx.Node, region: Region, parts: InParts) -> bool:
    """Put the call of a region in the place of its ops; False: others would have to run in another order.

    Ops whose values others still read stay.
    """
    graph = step.graph
    order = {n: k for k, n in enumerate(graph.nodes)}
    inputs = [n for n, _ in region.inputs()]
    last = max(inputs, key=order.__getitem__)
    if any(has_effect(n) for n in _after(region.made, order[last], order)):
        return False
    for node in region.splits:
        for user in [u for u in node.users if u.target in _OF_SHAPE and node in u.args]:
            _let_go(graph, node, user)
    with graph.inserting_after(last):
        vals = tuple(n.meta["val"] for n in region.made)
        together = at = call(first, parts, tuple(inputs), f"{first.name}_in_parts", vals)
    together.meta["first"] = first.name
    made = []
    for i, node in enumerate(region.made):
        with graph.inserting_after(at):
            at = call(node, operator.getitem, (together, i), f"{node.name}_made", node.meta["val"])
        made.append(at)
        node.replace_all_uses_with(at)
    for node in reversed(list(region.splits)):
        if not node.users:
            graph.erase_node(node)
    order = {n: k for k, n in enumerate(graph.nodes)}
    for node in _after(made, order[last], order):
        at.append(node)
        at = node
    step.__dict__.pop("forward", None)  # of what is there now
    return True


def _after(made: Iterable[fx.Node], last: int, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Nodes up to a position that read some values, or what is made of them, in order."""
    found, todo = set(), [u for n in made for u in n.users if order[u] <= last]
    while todo:
        n = todo.pop()
        if n not in found:
            found.add(n)
            todo += [u for u in n.users if order[u] <= last]
    return sorted(found, key=order.__getitem__)


def _let_go(graph: fx.Graph, node: fx.Node, reader: fx.Node) -> None:
    """Have a draw take its shape from an input of the step in place of a value."""
    source = stand_in(graph, node)
    if source is None:
        return
    shape = list(node.meta["val"].shape)
    with graph.inserting_before(reader):
        view = call(node, aten.as_strided.default, (source, shape, [0] * len(shape)))
    reader.replace_input_with(node, view)
