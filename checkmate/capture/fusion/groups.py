"""Find the groups of ops of a phase, each to become one kernel.

Groups are convex: none needs its own results by way of other ops, nor do two wait for one another. Ops are taken in
turn, and an op joins the groups of what it reads where that stays so. Then a group is cut where a kernel of it all
would have to be run again as a whole for one result of several (`_behind_large`), or would hold many more bytes at once
than any op does without groups (`_within`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import networkx as nx
import torch.fx as fx

from checkmate.capture.fusion.members import in_order, maker, nbytes, read_from
from checkmate.capture.nodes import viewed

LARGE = 4  # a result is large with a quarter of the bytes of the largest


def convex(ops: Iterable[fx.Node], is_member: Callable[[fx.Node], bool]) -> list[list[fx.Node]]:
    """The groups of a phase's ops, given in the order of the graph; ``is_member`` tells which ops these may take in."""
    return [members for members in _partition(ops, is_member) if is_member(members[0])]


def cut(groups: Iterable[list[fx.Node]], most: int, *, behind_large: bool) -> list[list[fx.Node]]:
    """Groups cut so that none holds more bytes at once than it may, each of two members at least.

    ``behind_large``: also behind each large result, as is worth it in a forward.
    """
    groups = [part for members in groups for part in (_behind_large(members) if behind_large else [members])]
    pieces = [piece for members in groups for piece in _within(members, most)]
    groups = [in_order(part) for piece in pieces for part in nx.weakly_connected_components(_reads(piece))]
    return [members for members in groups if len(members) > 1]


def limit(ops: Iterable[fx.Node]) -> int:
    """The bytes that a group may hold at once: a third more than any op, since a group may write over an argument."""
    return max((_held([op]) for op in ops), default=0) * 4 // 3


def _partition(ops: Iterable[fx.Node], is_member: Callable[[fx.Node], bool]) -> list[list[fx.Node]]:
    """A partition of ops, in which no part needs itself by way of another."""
    home = dict[fx.Node, int]()
    parts, reads = dict[int, list[fx.Node]](), dict[int, set[int]]()
    needs = dict[int, int]()  # of a part, directly or not, as bits
    for i, op in enumerate(ops):
        reads[i] = {home[p] for p in map(maker, op.all_input_nodes) if p in home}
        parts[i], home[op], needs[i] = [op], i, 0
        for part in reads[i]:
            needs[i] |= needs[part] | 1 << part
        if not is_member(op):
            continue
        for part in sorted(reads[i], reverse=True):
            if not is_member(parts[part][0]) or any(needs[p] >> part & 1 for p in reads[i] - {part}):
                continue
            # Join it: what needs the part needs all of this one from now on.
            for node in parts[part]:
                home[node] = i
            parts[i] = parts.pop(part) + parts[i]
            reads[i] = (reads[i] | reads.pop(part)) - {part}
            needs[i] = (needs[i] | needs.pop(part)) & ~(1 << part)
            for other, mask in needs.items():
                if mask >> part & 1:
                    needs[other] = mask & ~(1 << part) | 1 << i | needs[i]
                    reads[other] = {i if p == part else p for p in reads[other]}
    return [in_order(part) for part in parts.values()]


def _behind_large(members: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Cut a group behind each large result that it reads itself, unless other values across the cut are large, too."""
    faces = read_from(members)
    least = max(map(nbytes, faces), default=0)
    for face in [face for face in faces if nbytes(face) * LARGE >= least][:-1]:
        before = {maker(face), *nx.ancestors(_reads(members), maker(face))}
        behind = [node for node in members if node not in before]
        crossing = {viewed(a) for node in behind for a in node.all_input_nodes if maker(a) in before}
        if face in crossing and all(a in faces or nbytes(a) * 2 * LARGE <= nbytes(face) for a in crossing):
            yield [node for node in members if node in before]
            yield from _behind_large(behind)
            return
    yield members


def _within(members: list[fx.Node], most: int) -> Iterator[list[fx.Node]]:
    """Cut a group that holds more bytes at once than it may, where that makes it less."""
    whole = _held(members)
    if len(members) < 2 or whole <= most:
        yield members
        return
    at = min(
        range(1, len(members)),
        key=lambda i: (max(most, first := _held(members[:i]), last := _held(members[i:])), first + last),
    )
    if max(_held(members[:at]), _held(members[at:])) >= whole:
        yield members
        return
    yield from _within(members[:at], most)
    yield from _within(members[at:], most)


def _held(members: list[fx.Node]) -> int:
    """Count the bytes at hand while a group runs: arguments that the step makes, and results."""
    inside = set(members)
    read = {viewed(a) for node in members for a in node.all_input_nodes if maker(a) not in inside}
    return sum(nbytes(a) for a in read if a.op == "call_function") + sum(map(nbytes, read_from(members)))


def _reads(members: Iterable[fx.Node]) -> nx.DiGraph[fx.Node]:
    """The graph of what members read of one another."""
    graph: nx.DiGraph[fx.Node] = nx.DiGraph()
    graph.add_nodes_from(members)
    graph.add_edges_from((p, node) for node in members for a in node.all_input_nodes if (p := maker(a)) in graph)
    return graph
