"""Where a step under autocast would round otherwise than plain PyTorch: weights that are used more than once.

Within a region of autocast plain PyTorch converts each weight once and keeps the copy. The gradients of its uses meet
in the copy and are added in half precision; the sum is converted. A captured step has a conversion for each use, and
adds in the precision of the weight. With ``cache_enabled=False`` plain PyTorch does the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch._functorch.partitioners import _is_primal

from checkmate.capture.provenance import where
from checkmate.errors import Unsupported

aten = torch.ops.aten
ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_DEVICES = "cpu", "cuda"
_BY_HAND = {"to", "bfloat16", "half", "type", "type_as"}  # conversions that the user wrote


def keeps_copies(module: fx.GraphModule) -> bool:
    """Whether autocast keeps converted weights, around a captured function or within it."""
    if any(map(torch.is_autocast_enabled, _DEVICES)) and torch.is_autocast_cache_enabled():
        return True
    entered = [n.args for n in module.graph.nodes if n.target is ENTER]
    return any(enabled and kept is not False for _, _, enabled, kept in entered)


@contextmanager
def autocast_as_found() -> Iterator[None]:
    """Autocast as it was, whatever was entered and not left within.

    In a region that nobody leaves plain PyTorch would compute on with the weights that it once converted.
    """
    kept, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    found = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    try:
        yield
    finally:
        left = torch.autocast_decrement_nesting()
        while left >= depth:
            left = torch.autocast_decrement_nesting()
        if left == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(kept)
        for device, enabled, dtype in found:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def refuse_shared_copies(graph: fx.Graph, num_fwd_outputs: int) -> None:
    """Refuse a joint graph in which a weight that gets a gradient is converted more than once.

    Raises:
        Unsupported: naming the lines of two of its uses.
    """
    outputs: Any = graph.output_node().args[0]
    primals = filter(_is_primal, graph.find_nodes(op="placeholder"))
    trained = {n for n, grad in zip(primals, outputs[num_fwd_outputs:], strict=False) if isinstance(grad, fx.Node)}
    copies: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if node.args[0] in trained:
            by = (node.meta.get("source_fn_stack") or [("", "")])[-1][1]
            if (by if isinstance(by, str) else getattr(by, "__name__", "")) not in _BY_HAND:
                copies[node.args[0]].append(node)
    for uses in copies.values():
        if len(uses) > 1:
            raise Unsupported(
                f"{where(uses[1])}: a weight that {where(uses[0])} uses too, under autocast. Plain PyTorch converts it "
                "once and adds its gradients in half precision; a captured step converts it at each use. Pass "
                "cache_enabled=False to torch.autocast, and both do that."
            )
