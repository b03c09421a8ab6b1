"""What stands around a joint graph: gradients that come in, and what the forward's caller does with its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import (
    _is_backward_state,
    _is_bwd_seed_offset,
    _is_tangent,
    _must_be_in_backward,
)

from checkmate.capture.numbers import hands_out_number


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
