"""Put calls of their kernels in place of groups of ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import networkx as nx
import torch.fx as fx

from checkmate.capture.fusion.groups import convex, cut, is_member, limit, read_from
from checkmate.capture.fusion.kernels import Kernel, kernel_of
from checkmate.capture.fusion.remade import drop, make_again, to_make_again
from checkmate.capture.nodes import storages
from checkmate.capture.op_order import TracedStep, split_forward_backward
from checkmate.capture.rewrite import eliminate_dead_code


def fuse(
    module: fx.GraphModule,
    step_of: Callable[[fx.GraphModule], TracedStep],
    is_good: Callable[[fx.Node], bool],
    *,
    ahead: Callable[[Sequence[Kernel]], None],
    reductions: bool,
    alone: Collection[int] = (),
    op_by_op: Collection[str] = (),
    decided: dict[str, Any] | None = None,
) -> None:
    """Make each group of a joint graph one op, its kernel.

    Args:
        module: the joint graph, at fixed sizes.
        step_of: reads it.
        is_good: tells whether a call of a kernel runs, and gives the bits that it is to give; else its ops stay.
        ahead: is told of the kernels of each round before they are tried.
        reductions: whether they are of groups, too.
        alone: storages of results whose ops stay, such as tagged ones.
        op_by_op: keys of kernels whose ops stay.
        decided: groups by the names of their ops, noted here for the same graph at other sizes.
    """
    graph, step = module.graph, step_of(module)

    def joins(node: fx.Node) -> bool:
        is_single = any(key in alone for key in storages(node))
        return not is_single and is_member(node, reductions=reductions) and step.pinned(node) is None

    decisions: dict[str, Any] = {} if decided is None else decided
    nodes = [node.name for node in graph.nodes]
    if decisions.setdefault("graph", nodes) != nodes:
        decisions = {}

    def once(stage: str, decide: Callable[[], list[list[fx.Node]]]) -> list[list[fx.Node]]:
        if stage not in decisions:
            decisions[stage] = [[node.name for node in members] for members in decide()]
        named = {node.name: node for node in graph.nodes}
        return [[named[name] for name in members] for members in decisions[stage]]

    # Find the groups.
    forward, backward = map(sorted, split_forward_backward(step))
    most = limit((*forward, *backward))
    of_forward = once("convex", lambda: convex(forward, joins))
    (remade,) = once("remade", lambda: [[*to_make_again(of_forward, backward, joins)]])
    copies = make_again(backward, joins, {*remade})
    _, backward = split_forward_backward(step_of(module))
    of_backward = once("backward", lambda: cut(convex(sorted(backward), joins), most, behind_large=False))
    of_forward = once("forward", lambda: cut(of_forward, most, behind_large=True))
    # Put their kernels in place; where one is not, the backward reads what the forward keeps.
    ahead([kernel_of(members)[0] for members in (*of_backward, *of_forward)])
    _replace(of_backward, is_good, ahead, op_by_op)
    drop(copies)
    _replace(of_forward, is_good, ahead, op_by_op)
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


def _replace(
    groups: list[list[fx.Node]],
    is_good: Callable[[fx.Node], bool],
    ahead: Callable[[Sequence[Kernel]], None],
    op_by_op: Collection[str],
) -> None:
    """Put a call of its kernel in place of each group; where that is not good, try the halves of the group.

    ``ahead`` is told of all halves before one of them is tried.
    """
    while groups := [members for members in groups if len(members) > 1 and read_from(members)]:
        ahead([kernel_of(members)[0] for members in groups])
        refused = [members for members in groups if not _put(members, is_good, op_by_op)]
        groups = [half for members in refused for half in (members[: len(members) // 2], members[len(members) // 2 :])]


def _put(members: list[fx.Node], is_good: Callable[[fx.Node], bool], op_by_op: Collection[str]) -> bool:
    """Put a call of a group's kernel behind its last member, unless it runs op by op; tell whether it is good."""
    kernel, inputs, nodes, results = kernel_of(members)
    graph, last = members[-1].graph, members[-1]
    with graph.inserting_after(last):
        call = graph.create_node("call_function", kernel, tuple(inputs), {}, kernel.name)
    call.meta = {key: value for key, value in last.meta.items() if key not in ("tensor_meta", "val")}
    call.meta["val"] = tuple(node.meta["val"] for node in results)
    is_kernel = bool(inputs) and is_good(call)  # one in the way has its trial, too: it may run at other sizes
    if not is_kernel or kernel.key in op_by_op:
        graph.erase_node(call)
        return is_kernel
    at = call
    for i, result in enumerate(results):
        with graph.inserting_after(at):
            at = graph.create_node("call_function", operator.getitem, (call, i), {}, f"{result.name}_")
        at.meta = {**result.meta}
        result.replace_all_uses_with(at)
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
    return True
