"""The dependencies of a node in Dynamo's graph: its inputs, and earlier writes to any of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
import torch.fx as fx

from checkmate.capture.nodes import storage, tensors
from checkmate.torch_internals.trees import tree_leaves

Reads = Callable[[fx.Node], Iterable[fx.Node]]  # the arguments that a node reads


def up_to(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes of the graph in order, up to this one."""
    for n in node.graph.nodes:
        yield n
        if n is node:
            return


def needed_by(node: fx.Node, reads: Reads = lambda n: n.all_input_nodes) -> set[fx.Node]:
    """The node, the nodes it is computed from, and earlier writes to any of them."""
    needed, memory = set[fx.Node](), set[int]()
    writers = [n for n in up_to(node) if is_write(n)]
    todo = [node]
    while todo:
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                memory.update(memory_of(n))
                todo += reads(n)
        todo = [n for n in writers if n not in needed and any(memory_of(a) & memory for a in written_by(n))]
    return needed


def is_write(node: fx.Node) -> bool:
    """Tell whether the name of a function or method says that it writes; `guards.evaluate` finds other writes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        node.target is operator.setitem
        or (getattr(operator, name, None) is node.target and name.startswith("i"))  # iadd
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("out") is not None
        or bool(node.kwargs.get("inplace"))
    )


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node may write to, if it `is_write`."""
    out = tree_leaves(node.kwargs.get("out"))
    return [a for a in (*node.args[:1], *out) if isinstance(a, fx.Node)]


def memory_of(node: fx.Node) -> set[int]:
    """The storages of a node's tensors, from Dynamo's fake tensors."""
    return {storage(t) for t in tensors(node.meta.get("example_value")) if t.layout is torch.strided}
