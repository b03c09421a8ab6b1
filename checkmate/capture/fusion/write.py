"""Put calls of their kernels in place of groups of ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

import networkx as nx
import torch.fx as fx

from checkmate.capture.fusion.groups import convex, cut, limit
from checkmate.capture.fusion.kernels import Kernel, kernel_of
from checkmate.capture.fusion.members import is_member, read_from
from checkmate.capture.fusion.remade import drop, make_again
from checkmate.capture.nodes import storages
from checkmate.capture.op_order import TracedStep, split_forward_backward
from checkmate.capture.rewrite import eliminate_dead_code


def fuse(
    module: fx.GraphModule,
    step_of: Callable[[fx.GraphModule], TracedStep],
    is_good: Callable[[fx.Node], bool],
    ahead: Callable[[Sequence[Kernel]], None],
    *,
    reductions: bool,
    alone: Collection[int] = (),
    single: Collection[str] = (),
) -> None:
    """Make each group of a joint graph one op, its kernel.

    Args:
        module: the joint graph, at fixed sizes.
        step_of: reads it.
        is_good: tells whether a call of a kernel runs, and gives the bits that it is to give; else its ops stay.
        ahead: is told of the kernels first.
        reductions: whether they are of groups, too.
        alone: storages of results whose ops stay, such as tagged ones.
        single: keys of kernels whose ops stay.
    """
    graph, step = module.graph, step_of(module)

    def joins(node: fx.Node) -> bool:
        is_single = any(key in alone for key in storages(node))
        return not is_single and is_member(node, reductions=reductions) and step.pinned(node) is None

    # Find the groups.
    forward, backward = map(sorted, split_forward_backward(step))
    most = limit((*forward, *backward))
    of_forward = convex(forward, joins)
    copies = make_again(of_forward, backward, joins)
    _, backward = split_forward_backward(step_of(module))
    of_backward = cut(convex(sorted(backward), joins), most, behind_large=False)
    groups = (*of_backward, *cut(of_forward, most, behind_large=True))
    ahead([kernel for members in groups if (kernel := kernel_of(members)[0]).key not in single])
    # Put their kernels in place; where one is not, the backward reads what the forward keeps.
    for members in of_backward:
        _replace(members, is_good, single)
    drop(copies)
    for members in cut(of_forward, most, behind_large=True):
        _replace(members, is_good, single)
    _sort(graph)
    eliminate_dead_code(graph)
    graph.lint()


def _sort(graph: fx.Graph) -> None:
    """Put what reads a kernel's results behind it, and leave all else in its order."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    reads = nx.DiGraph((node, user) for node in place for user in node.users)
    reads.add_nodes_from(place)
    last, *rest = nx.lexicographical_topological_sort(reads, key=place.__getitem__)
    next(iter(graph.nodes)).prepend(last)
    for node in rest:
        last.append(node)
        last = node


def _replace(members: list[fx.Node], is_good: Callable[[fx.Node], bool], single: Collection[str]) -> None:
    """Put a call of a group's kernel behind its last member; if it is not good, the same for each half of the group."""
    if len(members) < 2 or not read_from(members):
        return
    kernel, inputs, nodes, results = kernel_of(members)
    if kernel.key in single:
        return
    graph, last = members[-1].graph, members[-1]
    with graph.inserting_after(last):
        call = graph.create_node("call_function", kernel, tuple(inputs), {}, kernel.name)
    call.meta = {key: what for key, what in last.meta.items() if key not in ("tensor_meta", "val")}
    call.meta["val"] = tuple(node.meta["val"] for node in results)
    if not inputs or not is_good(call):
        graph.erase_node(call)
        for half in (members[: len(members) // 2], members[len(members) // 2 :]):
            _replace(half, is_good, single)
        return
    at = call
    for i, result in enumerate(results):
        with graph.inserting_after(at):
            at = graph.create_node("call_function", operator.getitem, (call, i), {}, f"{result.name}_")
        at.meta = {**result.meta}
        result.replace_all_uses_with(at)
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
