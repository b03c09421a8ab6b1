"""Find the groups of ops of a phase, each to become one kernel.

Groups are convex: none needs its own results by way of other ops, nor do two wait for one another. Ops are taken in
turn, and an op joins the groups of what it reads where that stays so. Then a group is cut where a kernel of it all
would have to be run again as a whole for one result of several (`_behind_large`), or would hold many more bytes at once
than any op does without groups (`_within`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator

import networkx as nx
import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.higher_order.triton_kernels import Launch
from checkmate.capture.inplace.rules import written_of
from checkmate.capture.nodes import LINK, has_effect, is_view, tensors, viewed
from checkmate.capture.rewrite import scale_mask
from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten

_REDUCTIONS = {
    getattr(getattr(aten, op), overload)
    for op, overload in (
        *(("sum", "dim_IntList"), ("sum", "default"), ("mean", "dim"), ("mean", "default"), ("amax", "default")),
        *(("var_mean", "correction"), ("native_layer_norm", "default"), ("native_layer_norm_backward", "default")),
        *(("_softmax", "default"), ("_softmax_backward_data", "default"), ("native_group_norm", "default")),
        *(("native_group_norm_backward", "default"), ("_native_batch_norm_legit_functional", "default")),
        *(("native_batch_norm_backward", "default"), ("_fused_rms_norm", "default")),
        ("_fused_rms_norm_backward", "default"),
    )
    if hasattr(aten, op)
}
_MOVES = {  # make an element of one at another place in their argument
    *(aten.cat.default, aten.stack.default, aten.repeat.default, aten.roll.default, aten.flip.default),
    *(aten.slice_backward.default, aten.select_backward.default, aten.constant_pad_nd.default),
}
_POINTWISE = {  # beside all that PyTorch tags so
    *(aten._to_copy.default, aten.clone.default, aten.full_like.default, aten.zeros_like.default, scale_mask),
    aten.ones_like.default,
    *(getattr(aten, f"{name}_backward").default for name in ("gelu", "silu", "tanh", "sigmoid", "threshold")),
    *(aten.hardtanh_backward.default, aten.gelu.default, aten.silu.default),
}
_CONSTANTS = {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}
_OF_LOSSES = {  # left alone with the casts beside them: a loss may run in parts
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    *(aten.nll_loss_forward.default, aten.nll_loss_backward.default),
}
LARGE = 4  # a result is large with a quarter of the bytes of the largest


def is_reduction(node: fx.Node) -> bool:
    """Tell whether it is a reduction that a kernel may take in."""
    return node.target in _REDUCTIONS


def is_elementwise(node: fx.Node) -> bool:
    """Tell whether a member makes each element of the same element of its arguments."""
    return node.target not in _REDUCTIONS | _MOVES


def is_member(node: fx.Node, *, reductions: bool) -> bool:
    """Tell whether a group may take an op in: pointwise ops, casts, copies, and reductions if these are wanted.

    An op stays alone if it has an effect or draws, reads numbers that are inputs, is of a loss, or is written over its
    input block by block, which brings it through where a whole kernel would not fit.
    """
    target = node.target
    if node.op != "call_function" or isinstance(target, Launch) or LINK in node.meta or target in _OF_LOSSES:
        return False
    of_aten = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    pointwise = target in _POINTWISE | _MOVES or (of_aten and torch.Tag.pointwise in target.tags)  # type: ignore[union-attr]
    if not (pointwise or (reductions and is_reduction(node))) or (target is not scale_mask and has_effect(node)):
        return False
    near = [node, *node.all_input_nodes]
    if not all(tensors(n.meta.get("val")) for n in near):
        return False
    all_tensors = tensors([n.meta["val"] for n in near])
    if len({t.device for t in all_tensors}) > 1 or any(
        t.dtype.is_complex or t.layout != torch.strided for t in all_tensors
    ):
        return False
    written = written_of(target)
    if written is not None and written.block is not None and all_tensors[0].device.type == "cpu":
        return False
    return (
        target is not aten._to_copy.default or not {n.target for n in (*readers(node), *map(maker, near))} & _OF_LOSSES
    )


def is_constant(node: fx.Node) -> bool:
    """Tell whether it makes a tensor of one number, which each kernel makes for itself."""
    return node.target in _CONSTANTS and not node.all_input_nodes


def is_part(node: fx.Node) -> bool:
    """Tell whether it is a view, or names one of several results."""
    return node.op == "call_function" and (node.target is operator.getitem or is_view(node))


def maker(node: fx.Node) -> fx.Node:
    """The op, or input, whose memory it shows."""
    node = viewed(node)
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the ops that read it, also through views and by the names of its results; and the graph's output."""
    stack, seen = [*node.users], set[fx.Node]()
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if is_part(user):
            stack += user.users
        else:
            yield user


def results(node: fx.Node) -> list[fx.Node]:
    """The nodes that name its tensors."""
    if isinstance(node.meta["val"], Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def read_from(members: Iterable[fx.Node]) -> list[fx.Node]:
    """The results of members that others read."""
    inside = set(members)
    return [result for member in members for result in results(member) if not {*readers(result)} <= inside]


def in_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes of a graph in its order."""
    return sorted(nodes)


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's tensors."""
    return sum(t.numel() * t.element_size() for t in tensors(node.meta.get("val")))


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
