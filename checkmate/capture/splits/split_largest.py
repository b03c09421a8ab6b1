"""Split a step further: have the ops that need the most bytes run in parts, with what is large beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.nodes import is_view, tensors
from checkmate.capture.provenance import where
from checkmate.capture.rewrite import without_dead_code
from checkmate.capture.splits.find_region import MOST_OPS, Choice, StepToSplit, bytes_of, choices, region_at, write
from checkmate.capture.splits.parts import InParts, Region, Unwritten, apart, copy_of, in_parts
from checkmate.capture.ways.batch_norm import in_two_halves

log = logging.getLogger("checkmate.capture.splits")

LEVEL = 0.05  # what is so near the largest is split with it
ALIKE = 0.5  # and what is alike from here on
COUNTS = (2, 4, 8, 16, 32, 64)
FULL = 64  # parts at which regions are compared
TRIALS = 6  # of different regions for one op

Tried = Callable[[InParts], bool]


@dataclass(frozen=True)
class OpNeeds:
    """What an op needs while it runs."""

    name: str  # of its node
    bytes_at: int  # with all that is there
    own: int  # what it reads, makes and works in
    first: bool = False  # it is to be split before others: what it reads may then be gone


class StaysWhole(Exception):
    """An op that needs the most is not split; the name of its node."""


class _Splitter:
    """Splits a graph further."""

    def __init__(self, step: StepToSplit, tried: Tried) -> None:
        self.step, self.tried = step, tried
        self.nodes: dict[str, fx.Node] = {n.name: n for n in step.graph.nodes}
        self.new: set[str] = set()  # names of calls that were made or changed

    def split(self, needs: Sequence[OpNeeds], least_gain: int, before: Sequence[str]) -> None:
        """Split all that stands at the largest need; before that the ops of these names, if they can be."""
        most = max(need.bytes_at for need in needs)
        level = min((1 - LEVEL) * most, most - least_gain)
        needs = [*self._in_halves(needs, level, most)] if self.step.sums else needs
        rank = {name: k for k, name in enumerate(before)}
        high = [need for need in needs if need.bytes_at > level or need.name in rank]
        high.sort(key=lambda need: (rank.get(need.name, len(rank)), not need.first, -need.bytes_at))
        at = {need.name: need.bytes_at for need in needs}
        for need in high:
            node = self._here(need.name)
            if node is None:
                continue
            room = need.own - (need.bytes_at - (most - least_gain))  # what it may need for the step to gain
            done = self._more(node) if isinstance(node.target, InParts) else self._one(node, need, room, at, most)
            if not done and need.bytes_at > most - least_gain:
                log.info("%s of %s stays whole", need.name, where(node))
                raise StaysWhole(node.meta["first"] if isinstance(node.target, InParts) else need.name)
        if not self.new:
            raise StaysWhole(high[0].name)

    def _here(self, name: str) -> fx.Node | None:
        """The node of this name, if it is still there and as it was."""
        node = self.nodes.get(name)
        return None if node is None or name in self.new or node not in self.step.graph.nodes else node

    def _more(self, node: fx.Node) -> bool:
        """Have a region, and those alike, run in more parts."""
        old = node.target
        assert isinstance(old, InParts)
        more = old.in_more_parts()
        while more is not None and more.parts <= COUNTS[-1]:
            if more.inner_bytes < old.inner_bytes and self.tried(more):
                alike = [n for n in self.step.graph.nodes if isinstance(n.target, InParts)]
                for n in alike:
                    if n.target.text == old.text and n.target.length == old.length:
                        n.target = more
                        self.new.add(n.name)
                return True
            more = more.in_more_parts()
        return False

    def _one(self, node: fx.Node, need: OpNeeds, room: int, at: Mapping[str, int], most: int) -> bool:
        """Have an op run in parts, and those alike."""
        for choice, count in self._candidates(node, room):
            found = self._parts(node, choice, count)
            if found is None or not self.tried(found[1]) or not self._write(node, *found):
                continue
            for other in self._like(node, at, most):
                again = self._parts(other, choice, count) if other in self.step.graph.nodes else None
                if again is not None and again[1].text == found[1].text:
                    self._write(other, *again)
            return True
        return False

    def _in_halves(self, needs: Sequence[OpNeeds], level: float, most: int) -> Iterator[OpNeeds]:
        """The same needs, but halves in the place of batch norms' backwards that need much, and of those alike."""
        high = [self.nodes[need.name] for need in needs if need.bytes_at > level and need.name in self.nodes]
        much = [need for need in needs if need.bytes_at > ALIKE * most and need.name in self.nodes]
        near = {n.name for need in much if (n := self.nodes[need.name]) in high or any(_alike(n, m) for m in high)}
        for need in needs:
            halves = in_two_halves(self.step.graph, self.nodes[need.name]) if need.name in near else None
            if halves is None:
                yield need
                continue
            sums, of_input = halves
            self.nodes |= {n.name: n for n in halves}
            self.new.add(need.name)
            made = of_input.meta["val"].nbytes
            yield OpNeeds(of_input.name, need.bytes_at, need.own, first=True)
            yield OpNeeds(sums.name, need.bytes_at - made, need.own - made, first=True)
        self.step.__dict__.pop("forward", None)

    def _like(self, node: fx.Node, at: Mapping[str, int], most: int) -> list[fx.Node]:
        """Ops alike that need much, too."""
        return [n for n in self.step.graph.nodes if _alike(n, node) and at.get(n.name, 0) > ALIKE * most]

    def _candidates(self, node: fx.Node, room: int) -> Iterator[tuple[Choice, int]]:
        """Choices for an op, that with the fewest bytes first, each with the fewest parts that are enough."""
        found: dict[str, tuple[float, int, Choice, int]] = {}
        forms = set()  # of regions: many choices lead to the same

        def fits(region: Region, alone: Region, count: int) -> bool:
            parts = in_parts(alone, -(-region.units // count))
            return parts is not None and bytes_of(parts, region) < room

        for choice in choices(node, sums=self.step.sums):
            region = region_at(self.step, node, choice)
            if region is None or region.form in forms:
                continue
            forms.add(region.form)
            alone = apart(region)
            full = None if alone is None else in_parts(alone, -(-choice.units // FULL))
            if alone is None or full is None or full.text in found:
                continue
            least = bytes_of(full, region)
            if least < room:
                ops = sum(not is_view(n) for n in region.splits)
                fewer = (c for c in COUNTS if c < choice.units and fits(region, alone, c))
                count = next(fewer, min(FULL, choice.units))
                found[full.text] = (least * (1 + 0.2 * ops / MOST_OPS), ops, choice, count)
        for _, _, choice, count in sorted(found.values(), key=lambda one: one[:2])[:TRIALS]:
            yield choice, count

    def _parts(self, node: fx.Node, choice: Choice, count: int) -> tuple[Region, InParts] | None:
        """A region, and what runs it in so many parts; None: it cannot be."""
        region = region_at(self.step, node, choice)
        alone = None if region is None else apart(region)
        made = None if alone is None else in_parts(alone, -(-choice.units // count))
        return None if region is None or made is None else (region, made)

    def _write(self, node: fx.Node, region: Region, parts: InParts) -> bool:
        done = write(self.step, node, region, parts)
        self.new |= {f"{node.name}_in_parts"} if done else set()
        return done


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """The same op, of tensors of the same shapes."""
    if node is other or node.op != other.op or node.target != other.target or len(node.args) != len(other.args):
        return False
    shapes = [[t.shape for t in tensors(n.meta.get("val"))] for n in (node, other)]
    return shapes[0] == shapes[1]


def split_further(
    module: fx.GraphModule,
    joint: Joint,
    needs: Sequence[OpNeeds],
    *,
    tried: Tried,
    least_gain: int,
    sums: bool = False,
    before: Sequence[str] = (),
) -> fx.GraphModule:
    """A copy of a prepared joint graph in which the ops that need the most run in more parts.

    Args:
        module: the graph; joint: what was read of it.
        needs: of each op.
        tried: whether a region in parts has the bits of the whole, or is near enough.
        least_gain: bytes that the split is to save.
        sums: sums over parts are split too.
        before: names of ops that are split before these, in this order, if they can be.

    Raises:
        StaysWhole: if one that needs the most cannot be.
    """
    graph = copy_of(module)
    output: Any = graph.output_node().args[0]
    results = tuple(n for n in output[: len(joint.forward_outputs)] if isinstance(n, fx.Node))
    norms = "_native_batch_norm_legit_functional"  # what parts of them make does not depend on what they overwrite
    pinned = {op.name for op in joint.graph.ops if op.pinned and norms not in op.target}
    _Splitter(StepToSplit(graph, results, pinned, sums), tried).split(needs, least_gain, before)
    return without_dead_code(module, graph, Unwritten)


def regions_of(module: fx.GraphModule) -> dict[str, tuple[fx.Node, InParts, int]]:
    """What runs in parts in a graph: of regions that are alike the first call, and how many there are."""
    found: dict[str, tuple[fx.Node, InParts, int]] = {}
    for node in module.graph.nodes:
        if isinstance(node.target, InParts):
            key = f"{node.target.text} {node.target.length}"
            first, parts, count = found.get(key, (node, node.target, 0))
            found[key] = first, parts, count + 1
    return found
