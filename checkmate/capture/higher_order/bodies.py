"""The graphs inside higher-order ops: as modules, as text, their bytes, or inlined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from checkmate.capture.nodes import storage, storages, target_name, tensors


def bodies(node: fx.Node) -> list[Any]:
    """The graphs given to a higher-order op, as modules."""
    return [body for a in node.all_input_nodes if (body := body_of(a)) is not None]


def body_of(node: fx.Node) -> nn.Module | None:
    """The module that a node stands for, or None."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    held: Any = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return held if isinstance(held, nn.Module) else None


def text_of(body: nn.Module, describe: Callable[[Any], Any]) -> str:
    """Write a graph as text that is equal in every process; ``describe`` formats arguments that are no nodes."""
    if not isinstance(body, fx.GraphModule):
        return str(body)
    numbers = {node: i for i, node in enumerate(body.graph.nodes)}

    def write(arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return describe(arg)
        inner = body_of(arg)
        return f"%{numbers[arg]}" if inner is None else text_of(inner, describe)

    calls = (node for node in body.graph.nodes if node.op not in ("placeholder", "get_attr"))
    return "; ".join(
        f"%{numbers[n]} {target_name(n) if n.op == 'call_function' else n.op} "
        f"{fx.node.map_aggregate((n.args, n.kwargs), write)!r}"
        for n in calls
    )


def rows_of(node: fx.Node) -> int:
    """The number of runs of an op's graphs: one per row, or one."""
    inputs: Any = node.args[_ROWS_IN[node.target.name()]] if node.target.name() in _ROWS_IN else ()  # type: ignore[union-attr]
    return max([n.meta["val"].shape[0] for n in inputs], default=1)


_ROWS_IN = {"map_impl": 1, "scan": 2}  # position of the tensors whose rows they are


def bytes_within(node: fx.Node) -> int:
    """Peak bytes within an op's graphs, without their results; for `map` with the rows before they are stacked."""
    result_bytes = sum(t.untyped_storage().nbytes() for t in tensors(node.meta.get("val")))
    stacked = result_bytes if node.target.name() == "map_impl" else 0  # type: ignore[union-attr]
    return stacked + max(bytes_of_graph(body) for body in bodies(node) if isinstance(body, fx.GraphModule))


def bytes_of_graph(body: fx.GraphModule) -> int:
    """Peak bytes of a graph's intermediates, without its results."""
    nodes = list(body.graph.nodes)
    inputs = {*storages(*body.graph.find_nodes(op="placeholder"))}
    sizes: dict[int, int] = {}  # per storage made in the graph
    first: dict[int, int] = {}
    last: dict[int, int] = {}  # where it is read last: the results by the node at the end
    for i, n in enumerate(nodes):
        for t in (t for a in (n, *n.all_input_nodes) for t in tensors(a.meta.get("val"))):
            if (key := storage(t)) not in inputs:
                sizes[key], last[key] = t.untyped_storage().nbytes(), i
                first.setdefault(key, i)
    change = [0] * (len(nodes) + 1)
    for key, size in sizes.items():
        change[first[key]] += size
        change[last[key] + 1] -= size
    alive = [*accumulate(change)]
    return max(alive) - alive[-2]


def put_regions_in_place(module: fx.GraphModule) -> None:
    """Inline each `torch.compiler.nested_compile_region` of Dynamo's graph, so that its ops are planned."""
    while calls := module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        for node in calls:
            # Copy the ops of the region before its call, whose readers then read their results.
            held, _, *operands = node.args
            assert isinstance(held, fx.Node)
            body: Any = body_of(held)
            copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
            for n in body.graph.nodes:
                if n.op in ("placeholder", "output"):
                    continue
                with module.graph.inserting_before(node):
                    copies[n] = copy = module.graph.node_copy(n, copies.__getitem__)
                if "nn_module_stack" in node.meta:  # the region was traced for the first of its calls
                    copy.meta["nn_module_stack"] = node.meta["nn_module_stack"]
                if n.op == "get_attr":
                    copy.target = f"{held.target}_{n.target}".replace(".", "_")
                    value = operator.attrgetter(str(n.target))(body)
                    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                        module.register_buffer(copy.target, value)
                    else:
                        setattr(module, copy.target, value)
            # Then the call goes, and the graph of a region that has no other.
            results = fx.node.map_arg(body.graph.output_node().args[0], copies.__getitem__)
            for user in list(node.users):
                if (result := results[user.args[1]]) is not None:
                    user.replace_all_uses_with(result)
                module.graph.erase_node(user)
            module.graph.erase_node(node)
            if not held.users:
                module.graph.erase_node(held)
        module.recompile()
