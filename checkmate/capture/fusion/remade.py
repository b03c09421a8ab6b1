"""Let kernels of the backward make again what costs less to make than to keep and read.

What a forward group makes on its way, such as the SiLU of a gate, would have to be written to memory for the backward.
A kernel of the backward can make it again in registers, of what is in memory anyway. What to keep is a minimum cut
between the values that cannot be made pointwise and those that members of the backward read, as in Inductor's
partitioner (Chen et al., 2016, give the idea; `torch._functorch.partitioners` the cut).

What another op of the forward reads is in memory anyway, and is never made again: else a kernel could go on so through
all layers, along the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import networkx as nx
import torch.fx as fx

from checkmate.capture.fusion.groups import is_constant, is_part, is_reduction, maker, nbytes, readers
from checkmate.capture.nodes import call, viewed

Copies = dict[fx.Node, fx.Node]  # what they are copies of


def to_make_again(
    forward: Sequence[Sequence[fx.Node]], backward: Iterable[fx.Node], is_member: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """The forward ops that kernels of the backward, which read their results, make again where that saves bytes.

    Args:
        forward: the groups of the forward.
        backward: the ops of the backward.
        is_member: tells whether a group may take an op in.
    """
    home = {node: i for i, members in enumerate(forward) for node in members}
    backward = [*backward]
    members, after = {node for node in backward if is_member(node)}, set(backward)

    def stays_within(node: fx.Node) -> bool:  # no other op of the forward reads it
        group = home.get(maker(node), -1)
        return all(home.get(user, -2) == group or user in after for user in readers(node))

    def is_kept(node: fx.Node) -> bool:  # whatever kernels read
        return any(user.op == "output" or (user in after and user not in members) for user in readers(node))

    def can_be_made(node: fx.Node) -> bool:
        return node in home and not is_reduction(node) and stays_within(node) and not is_kept(node)

    cut: nx.DiGraph[object] = nx.DiGraph()
    wanted = {viewed(a) for node in members for a in node.all_input_nodes if maker(a) in home}
    stack, seen = [*wanted], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function" or is_constant(node):
            continue
        seen.add(node)
        # Kept for kernels alone, it is written and read.
        bytes_moved = 0 if is_kept(node) else nbytes(node) * (1 + stays_within(node))
        cut.add_edge((node, "in"), (node, "out"), capacity=bytes_moved + 1)
        if node in wanted:
            cut.add_edge((node, "out"), "backward")
        if can_be_made(node):
            sources = {viewed(a) for a in node.all_input_nodes}
            cut.add_edges_from(((source, "out"), (node, "in")) for source in sources)
            stack += sources
        else:
            cut.add_edge("forward", (node, "in"))
    if "forward" not in cut or "backward" not in cut:
        return set()
    _, (_, behind) = nx.minimum_cut(cut, "forward", "backward")
    return {node for node in seen if can_be_made(node) and (node, "in") in behind}


def make_again(backward: Iterable[fx.Node], is_member: Callable[[fx.Node], bool], remade: set[fx.Node]) -> Copies:
    """Insert copies of what is made again right before each member of the backward that reads it."""
    copies: Copies = {}
    for reader in [node for node in backward if is_member(node)]:
        copy_of = dict[fx.Node, fx.Node]()

        def copy(node: fx.Node, reader: fx.Node = reader, copy_of: dict[fx.Node, fx.Node] = copy_of) -> fx.Node:
            if node not in copy_of and viewed(node) in remade:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy)
                with reader.graph.inserting_before(reader):
                    copy_of[node] = call(node, node.target, args, kwargs=kwargs)  # type: ignore[arg-type]
                copy_of[node].meta["partitioner_tag"] = "is_backward"
                if not is_part(node):
                    copies[copy_of[node]] = node
            return copy_of.get(node, node)

        for arg in reader.all_input_nodes:
            if copy(arg) is not arg:
                reader.replace_input_with(arg, copy(arg))
    return copies


def drop(copies: Copies) -> None:
    """Replace copies that are still read by their originals."""
    for node, original in copies.items():
        node.replace_all_uses_with(original)
