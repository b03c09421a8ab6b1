"""Inline the regions of `torch.compiler.nested_compile_region`."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from checkmate.capture.higher_order.bodies import body_of


def put_regions_in_place(module: fx.GraphModule) -> None:
    """Inline all regions of a graph of Dynamo's, so that each of their ops is planned."""
    region = torch.ops.higher_order.invoke_subgraph
    while calls := module.graph.find_nodes(op="call_function", target=region):
        for node in calls:
            _put_in_place(module, node)
        module.recompile()


def _put_in_place(module: fx.GraphModule, node: fx.Node) -> None:
    """Copy the ops of a region before its call, whose readers then read their results."""
    held, _, *operands = node.args
    assert isinstance(held, fx.Node)
    body: Any = body_of(held)
    made: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    for n in body.graph.nodes:
        if n.op in ("placeholder", "output"):
            continue
        with module.graph.inserting_before(node):
            made[n] = copy = module.graph.node_copy(n, made.__getitem__)
        if "nn_module_stack" in node.meta:  # the region was traced for the first of its calls
            copy.meta["nn_module_stack"] = node.meta["nn_module_stack"]
        if n.op == "get_attr":
            copy.target = f"{held.target}_{n.target}".replace(".", "_")
            _hold(module, copy.target, operator.attrgetter(str(n.target))(body))
    results = fx.node.map_arg(body.graph.output_node().args[0], made.__getitem__)
    for user in list(node.users):
        if (result := results[user.args[1]]) is not None:
            user.replace_all_uses_with(result)
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not held.users:
        module.graph.erase_node(held)


def _hold(module: nn.Module, name: str, what: Any) -> None:
    if isinstance(what, torch.Tensor) and not isinstance(what, nn.Parameter):
        module.register_buffer(name, what)
    else:
        setattr(module, name, what)
