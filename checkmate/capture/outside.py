"""What stands around a joint graph: gradients that come in, and what the forward's caller does with its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, TangentAOTInput
from torch._functorch.partitioners import (
    _is_backward_state,
    _is_bwd_seed_offset,
    _is_tangent,
    _must_be_in_backward,
)

from checkmate.capture.nodes import is_mutating, is_random
from checkmate.capture.numbers import hands_out_number

aten = torch.ops.aten


def after_tangent(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on an incoming gradient, or were put into the backward by hand."""
    found: set[fx.Node] = set()
    for n in nodes:
        handed_in = n.op == "placeholder" and (_is_tangent(n) or _is_bwd_seed_offset(n) or _is_backward_state(n))
        if handed_in or _must_be_in_backward(n) or any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def read_at_return(outputs: Sequence[Any], descs: Sequence[Any]) -> list[fx.Node]:
    """Results of the forward that its caller reads as soon as it has them, and holds no longer.

    AOTAutograd copies some of them into inputs that it cannot overwrite within the graph, such as a parameter whose
    ``.data`` is clamped. Dynamo reads numbers from others.

    Args:
        outputs: nodes, or constants; descs: AOTAutograd's description of each.
    """
    pairs = [(n, desc) for n, desc in zip(outputs, descs, strict=True) if isinstance(n, fx.Node)]
    return [n for n, desc in pairs if isinstance(desc, InputMutationAOTOutput) or hands_out_number(n)]


def let_go_of_unread(module: fx.GraphModule) -> None:
    """Hold no constant that was traced and is read by nothing any more: its bytes would be in no plan."""
    read = {node.target for node in module.graph.find_nodes(op="get_attr")}
    for name, _ in [*module.named_buffers(recurse=False)]:
        if name not in read:
            delattr(module, name)


def drop_gradients_of_writes(joint: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Take the gradients that autograd never hands in out of a joint graph, and what depends on nothing else.

    They belong to new values of leaves, such as a parameter whose ``.data`` is clamped: AOTAutograd traces the step as
    if the new value had a gradient of its own, and writes it back where autograd does not see it.

    Args:
        joint: a joint graph of AOTAutograd.
        inputs: what the step is called with, in the order of what was traced.
    """
    missing = [n for n in joint.graph.find_nodes(op="placeholder") if _belongs_to_leaf(n.meta.get("desc"), inputs)]
    if missing:
        names = {n.name for n in missing}
        joint.graph = without(joint, names).graph
        for n in joint.graph.find_nodes(op="placeholder"):
            n.meta |= {"val": None} if n.name in names else {}


def _belongs_to_leaf(desc: Any, inputs: Sequence[Any]) -> bool:
    if not isinstance(desc, TangentAOTInput) or not isinstance(desc.output, InputMutationAOTOutput):
        return False
    written = desc.output.mutated_input
    return isinstance(written, PlainAOTInput) and inputs[written.idx].is_leaf and inputs[written.idx].requires_grad


def without(module: fx.GraphModule, missing: Iterable[str]) -> fx.GraphModule:
    """A backward as autograd runs it where the gradients in these placeholders are not defined.

    What depends on none but undefined ones is undefined; a sum with one is its other term; any other op that reads both
    kinds reads zeros, as autograd's own do.
    """
    names = set(missing)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}  # of the nodes that are defined
    depends: set[fx.Node] = set()  # on a gradient that is handed in
    for node in module.graph.nodes:
        given = [n for n in node.all_input_nodes if n in depends]
        if given or _is_tangent(node):
            depends.add(node)
        if node.op == "placeholder":
            copy = graph.node_copy(node)
            if node.name not in names:
                copies[node] = copy
        elif node.op == "output":
            graph.output(tuple(copies.get(n) if isinstance(n, fx.Node) else n for n in node.args[0])).meta = node.meta
        elif given and not any(n in copies for n in given):
            continue
        elif (term := _only_term(node, copies)) is not None:
            copies[node] = copies[term]
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n] if n in copies else _zeros(graph, n))
    graph.eliminate_dead_code(lambda n: n.is_impure() or is_random(n) or is_mutating(n))
    graph.lint()
    return fx.GraphModule(module, graph)


def _only_term(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """What is left of a sum of two gradients, one of which is undefined."""
    terms = node.all_input_nodes
    defined = [n for n in terms if n in copies]
    if node.target is not aten.add.Tensor or node.kwargs or (len(terms), len(defined)) != (2, 1):
        return None
    term, total = defined[0].meta["val"], node.meta["val"]
    return defined[0] if (term.shape, term.dtype) == (total.shape, total.dtype) else None


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    val = like.meta["val"]
    kind = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
    return graph.call_function(aten.full.default, (list(val.shape), 0), kind)
