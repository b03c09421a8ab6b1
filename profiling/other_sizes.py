"""The costs of a step at other sizes than those that it was measured at.

Each op takes the seconds that it was measured to take, times the ratio of its estimates at both sizes. Its bytes are
not estimated: a workspace grows in steps as often as in proportion. Where the kernel takes nothing but its results and
a few numbers, whatever the size, it takes these at all sizes, and may write over what it was tried to write over
(`_has_same_needs`). Each other distinct op runs once here, on made-up inputs, to count its bytes, and is tried again
over what it may write over: all of them together take less than the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx

from checkmate.capture.device import same_random_state
from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.inplace.aliasing import candidates
from checkmate.capture.inplace.rules import written_of
from checkmate.capture.joint import Joint
from checkmate.capture.patches.is_compiling import not_compiling
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Profile
from checkmate.profiling import cost_cache
from checkmate.profiling.cost_cache import OpCost, OpKey
from checkmate.profiling.measure import estimate, keys_of, measure_ops, recorded_bytes
from checkmate.profiling.one_op import device_of_op, runs_alone
from checkmate.torch_internals.running import OpOverload, outside_tracing

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
EXACT = (torch.float32, torch.float64)
ROWS = (
    *(aten._softmax.default, aten._softmax_backward_data.default),
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.nll_loss_backward.default),
)

_KEYS = WeakKeyDictionary[Joint, Any]()  # of steps that were measured, with estimates of ops by their keys


def profile_at(joint: Joint, reference: Joint, profile: Profile, *, cache: bool = True) -> Profile:
    """The profile of a step at other sizes, by its measured profile at the sizes of ``reference``.

    Both have the same ops and values, in the same order. ``cache``: take what was measured before.
    """
    if reference not in _KEYS:
        _KEYS[reference] = keys_of(reference), {}
    graph, keys, (then, estimates) = joint.graph, keys_of(joint), _KEYS[reference]
    other = {k: key for k, key in enumerate(keys) if key is not None and (then[k] is None or key[1] != then[k][1])}
    # The bytes of each distinct op that may need others here.
    needed = profile.workspace_bytes.copy()
    for way in profile.ways:
        needed[way.op] = max(needed[way.op], 0 if way.slower else way.workspace)
    alike = {(key, then[k], int(needed[k])): k for k, key in other.items()}
    unknown = {
        key: node
        for (key, _, need), k in alike.items()
        if (node := joint.nodes[k]) is not None and not _has_same_needs(node, reference.nodes[k], need)
    }
    counted = _counted(unknown, cost_cache.recall(unknown.keys()) if cache else {})
    seconds, workspace = profile.seconds.copy(), profile.workspace_bytes.copy()
    ratios: dict[OpKey, float] = {}
    for k, key in other.items():
        node, before, op = joint.nodes[k], reference.nodes[k], graph.ops[k]
        assert node is not None
        assert before is not None
        if key not in ratios:
            if then[k] not in estimates:
                estimates[then[k]] = estimate(before)
            was = estimates[then[k]]
            ratios[key] = estimate(node) / was if was else 1.0
        seconds[k] *= ratios[key]
        if key in counted:
            cost, output_bytes = counted[key], sum(graph.values[v].size_bytes for v in op.outputs)
            if cost is None:  # it does not run alone: all that it touches
                workspace[k] = output_bytes + sum(graph.values[v].size_bytes for v in op.inputs)
            else:
                workspace[k] = max(0, cost.allocated_bytes - output_bytes)
    # What an op may write over: where it was tried at these sizes, or is pointwise and was tried at others.
    held, ways = {(way.op, way.over): way for way in profile.ways}, []
    for k, makes, over, position, slower in candidates(joint):
        if k in other and other[k] in counted:
            cost = counted[other[k]]
            allocated = None if cost is None else cost.over.get(position)
            if allocated is not None:
                beside = sum(graph.values[v].size_bytes for v in graph.ops[k].outputs if v != makes)
                ways.append(InPlace(k, makes, over, max(0, allocated - beside), slower))
        elif (k, over) in held:
            ways.append(held[k, over])
    fields = {"seconds": seconds, "workspace_bytes": workspace, "resident_bytes": joint.resident_bytes}
    return replace(profile, **fields, ways=tuple(ways))


def _counted(nodes: Mapping[OpKey, fx.Node], counted: dict[OpKey, OpCost | None]) -> dict[OpKey, OpCost | None]:
    """The costs of ops, of which only the bytes count, with those known; None of one that does not run on its own."""
    todo = {key: node for key, node in nodes.items() if key not in counted}
    counted |= {key: None for key, node in todo.items() if not runs_alone(node)}
    todo = {key: node for key, node in todo.items() if key not in counted}
    on_cpu = {key: node for key, node in todo.items() if device_of_op(node).type == "cpu"}
    on_device = {key: node for key, node in todo.items() if key not in on_cpu}
    with outside_tracing(), not_compiling(), torch.no_grad(), same_random_state(*map(device_of_op, on_device.values())):
        return counted | dict(recorded_bytes(on_cpu)) | dict(measure_ops(on_device))


def _has_same_needs(node: fx.Node, before: fx.Node | None, needed: int) -> bool:
    """Tell whether an op needs the bytes here that it was measured to need at other sizes, beside its results.

    A pointwise kernel needs none, or numbers that it is given as tensors, or copies of operands in another type: these
    would be a byte an element at least. On the CPU, products of float32 and float64 read rows or columns where they are
    dense; and what goes row by row sums up a row before it writes it, and copies what is not contiguous.
    """
    assert before is not None
    if isinstance(node.target, Kernel):  # other code than before
        return False
    tensors_ = [n.meta["val"] for n in (before, *before.all_input_nodes)]
    if _is_pointwise(node):
        elements = [t.numel() for t in tensors_ if isinstance(t, torch.Tensor) and t.dim()]
        return needed == 0 or needed < min(elements, default=0)
    if needed or device_of_op(node).type != "cpu":
        return False
    is_product = node.target in PRODUCTS and node.meta["val"].dtype in EXACT and all(1 in t.stride() for t in tensors_)
    return (is_product or node.target in ROWS) and all(
        _layout(n.meta["val"]) == _layout(m.meta["val"])
        for n, m in zip(node.all_input_nodes, before.all_input_nodes, strict=True)
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The order of a tensor's dimensions in memory, and which of them are dense, or of one element."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))
    dense, kinds = 1, []
    for d in order:
        kinds.append((d, tensor.stride(d) == dense, tensor.stride(d) == 0, tensor.shape[d] == 1))
        dense = tensor.stride(d) * tensor.shape[d]
    return tuple(kinds)


def _is_pointwise(node: fx.Node) -> bool:
    written = written_of(node.target)
    is_tagged = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return is_tagged or (written is not None and written.pointwise)
