"""Warnings about `torch.utils.checkpoint`, which capture removes, where plain PyTorch differs.

Plain PyTorch runs a checkpoint again in the backward, and so it makes the writes of its beginning twice: batch norm's
to its running statistics, and those of whatever else counts or averages. With ``use_reentrant=True`` it trains nothing
in a checkpoint that is given no tensor with a gradient.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.capture.nodes import leaf_nodes
from checkmate.capture.provenance import where
from checkmate.torch_internals.aot import _has_tag_is_backward, _is_primal

log = logging.getLogger("checkmate.capture.higher_order.checkpoints")
_CHECKPOINT = "ac_graph_id"  # in the meta of a node within a checkpoint: which one
_RUN_AGAIN = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
_NAMED = 3  # places, before the others are counted
_said: set[str] = set()  # places that the user was told of


def warn_of_gradients(graph: fx.Graph) -> None:
    """Warn, once for each, of checkpoints in Dynamo's graph that plain PyTorch does not train."""
    untrained = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        given = [one.meta.get("example_value") for one in node.all_input_nodes]
        tensors = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        if node.kwargs.get("use_reentrant") and tensors and all(isinstance(one, nn.Parameter) for one in tensors):
            untrained.append(node)
    _warn(
        untrained,
        "torch.utils.checkpoint with use_reentrant=True is given no tensor that needs a gradient. Plain PyTorch gives "
        "the parameters within no gradients then; the compiled step does, as without the checkpoint.",
    )


def warn_of_second_writes(graph: fx.Graph) -> None:
    """Warn, once for each, of modules in a joint graph of AOTAutograd's that write twice in plain PyTorch."""
    # Plain PyTorch runs each checkpoint again up to the last op that saves a tensor. Nodes of an op and of its backward
    # have one ``seq_nr``, and so do ops without a backward that follow it.
    at = {node: position for position, node in enumerate(graph.nodes)}
    ops: dict[Any, fx.Node] = {}
    ends: dict[Any, int] = {}
    for node in at:
        op = ops.setdefault(node.meta.get("seq_nr"), node)
        reads_saved = _has_tag_is_backward(node) and not all(map(_has_tag_is_backward, node.all_input_nodes))
        if reads_saved and _CHECKPOINT in op.meta:
            ends[op.meta[_CHECKPOINT]] = max(at[op], ends.get(op.meta[_CHECKPOINT], 0))

    written = []
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, made = leaf_nodes(copy.args)
        while made.target is operator.getitem:
            (made,) = made.all_input_nodes
        again = made.meta.get("recompute") in _RUN_AGAIN and at[made] <= ends.get(made.meta.get(_CHECKPOINT), -1)
        if again and _is_primal(target):
            written.append(made)
    _warn(
        written,
        "within torch.utils.checkpoint buffers are updated once in a step, as without it. Plain PyTorch runs the "
        "checkpoint again in the backward, and updates them twice. Leave the checkpoint out, and both do the same: the "
        "plan decides what runs again.",
    )


def _warn(nodes: Iterable[fx.Node], what: str) -> None:
    if new := [place for place in dict.fromkeys(map(where, nodes)) if place not in _said]:
        _said.update(new)
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        log.warning("%s%s: %s", ", ".join(new[:_NAMED]), more, what)
