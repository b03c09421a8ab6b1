"""Weights under autocast: a captured step converts each once within a region, as plain PyTorch does.

Autocast keeps the copy of a weight until its outermost region is left (`cached_cast` in ATen/autocast_mode.cpp): of
leaves in float32 that need a gradient. The gradients of all uses meet in the copy and are added in half precision, and
the sum is converted. AOTAutograd traces without these copies, and hands over weights that are no leaves. Here they are
leaves while a step is traced, and ATen keeps its copies: the same code as in eager decides what is converted when.

`checkmate.codegen.refused_backwards` is about the regions in which a captured step is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch.fx.experimental import proxy_tensor

from checkmate.capture.nodes import input_position
from checkmate.capture.provenance import where
from checkmate.devices import kinds
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import InputMutationAOTOutput, _is_primal
from checkmate.torch_internals.running import _enter_autocast, _exit_autocast

aten = torch.ops.aten
ENTER, EXIT = _enter_autocast, _exit_autocast
_HALF = torch.bfloat16, torch.float16
_WITH_PRODUCTS = torch.nn.functional.affine_grid, torch.affine_grid_generator, torch.bilinear, torch.linalg.pinv
_BY_HAND = {"to", "bfloat16", "half", "type", "type_as"}  # conversions that the user wrote


def within_region() -> bool:
    """Tell whether an autocast region is active, enabled or not: it keeps copies until its end."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def is_kept(tensor: Any) -> bool:
    """Tell whether autocast keeps the copy of a tensor once it has converted it."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        return False
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


@contextmanager
def autocast_as_found() -> Iterator[None]:
    """Restore autocast at the end of the block, even if a region was entered within and not left.

    In a region that nobody leaves plain PyTorch would compute on with the weights that it once converted.
    """
    cache_enabled, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()
    states = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in kinds()]
    try:
        yield
    finally:
        nesting = torch.autocast_decrement_nesting()
        while nesting >= depth:
            nesting = torch.autocast_decrement_nesting()
        if nesting == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cache_enabled)
        for device, enabled, dtype in states:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


class Copies:
    """The weights of a captured step whose converted copies autocast keeps.

    Args:
        module: the graph as Dynamo captured it. Its weights are leaves from now on when its gradients are traced.
        inputs, names: what it is called with, and the names of these.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], names: Sequence[str]) -> None:
        entered = [n.args for n in module.graph.nodes if n.target is ENTER]
        around = any(map(torch.is_autocast_enabled, kinds())) and torch.is_autocast_cache_enabled()
        keeps = around or any(enabled and caches is not False for _, _, enabled, caches in entered)
        self.names = names
        self.kept = [keeps and is_kept(tensor) for tensor in inputs]
        self.within = within_region() if entered else None  # None: it makes no difference
        self.converted: dict[int, torch.dtype] = {}  # to what each weight is converted, by position
        if any(self.kept):
            placeholders = module.graph.find_nodes(op="placeholder")
            with module.graph.inserting_after(placeholders[-1]):
                weights = [n for n, kept in zip(placeholders, self.kept, strict=True) if kept]
                module.graph.call_function(_as_leaves, tuple(weights))
            module.recompile()

    def find(self, graph: fx.Graph) -> None:
        """Find the weights that a joint graph converts; refuse one that is converted twice and overwritten."""
        # Versions of each input: itself, and what writes of the step make of it, one after the other.
        primals = [n for n in graph.find_nodes(op="placeholder") if _is_primal(n)]
        versions = {input_position(n): [n] for n in primals}
        output = graph.output_node()
        for result, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
            is_write = isinstance(desc, InputMutationAOTOutput)
            written = versions.get(getattr(desc.mutated_input, "idx", None)) if is_write else None
            while written is not None and isinstance(result, fx.Node) and result.op == "call_function":
                written.append(result)
                result = result.args[0] if result.args else None

        # The conversions of all versions of a weight that is kept.
        for position, of_input in versions.items():
            if position is None or position >= len(self.kept) or not self.kept[position]:
                continue
            copies = [n for version in of_input for n in version.users if is_converted(n)]
            if len(of_input) > 1 and len(copies) > 1:
                raise Unsupported(
                    f"{where(copies[1])}: {self.names[position]} is used more than once under autocast, and the step "
                    "overwrites it. Plain PyTorch goes on with the converted copy of what it was. Overwrite it outside "
                    "of the step, or under torch.no_grad() and not through .data."
                )
            if copies:
                self.converted[position] = copies[0].meta["val"].dtype


def is_converted(node: fx.Node) -> bool:
    """Tell whether autocast has converted something here."""
    by = (node.meta.get("source_fn_stack") or [("", "")])[-1][1]
    by_hand = (by if isinstance(by, str) else getattr(by, "__name__", "")) in _BY_HAND
    return node.target is aten._to_copy.default and node.meta["val"].dtype in _HALF and not by_hand


def _as_leaves(*weights: torch.Tensor) -> None:
    """Make the stand-ins of weights leaves while a captured graph is differentiated.

    Clones that AOTAutograd hands over, because the step writes these weights, stay as they are.
    """
    for weight in weights if proxy_tensor.get_proxy_mode() is not None else ():
        if weight.grad_fn is not None and not weight.grad_fn.next_functions:
            weight.detach_().requires_grad_()


def refuse_products_within(module: fx.GraphModule) -> None:
    """Refuse ops whose kernels call matrix products, under autocast: plain PyTorch converts these.

    Captured by Dynamo as one op, they would be computed in float32.
    """
    around = any(map(torch.is_autocast_enabled, kinds()))
    for part in module.modules():
        graph = part.graph if isinstance(part, fx.GraphModule) else fx.Graph()
        enabled = [around]  # by the regions that are entered
        for node in graph.nodes:
            if node.target is ENTER:
                enabled.append(bool(node.args[2]))
            elif node.target is EXIT:
                enabled.pop()
            elif node.target in _WITH_PRODUCTS and enabled[-1]:
                raise Unsupported(
                    f"{where(node)}: {node.name} under autocast multiplies matrices in half precision within it. "
                    "Compute it outside of the block, or in one of torch.autocast(..., enabled=False)."
                )
        around = around or any(n.target is ENTER and n.args[2] for n in graph.nodes)  # for what is checkpointed


def keeping_copies() -> AbstractContextManager[Any]:
    """Within the block, autocast keeps copies during tracing as it does otherwise."""
    return patch.object(proxy_tensor, "disable_autocast_cache", nullcontext)
