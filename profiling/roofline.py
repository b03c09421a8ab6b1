"""Estimate the costs of ops for a named device from their arithmetic and traffic; nothing runs.

    seconds = latency + max(FLOP / (efficiency · peak rate), bytes / (efficiency · bandwidth))

This is the roofline model (Williams, Waterman & Patterson, CACM 2009) with a constant for each launch. FLOP are those
of matrix products, convolutions and attention, from the formulas in `torch.utils.flop_counter`; all other ops are taken
to be bound by memory. Bytes are all tensors that an op reads and writes, once each: views and expanded dimensions cost
nothing, and lookups read only what they pick. An op of several kernels counts as one, but for those that run in parts.
On GPUs kernels are told apart further (`checkmate.profiling.gpu_kernels`), and the host launches one after another.
Collectives take what moves between ranks over the device's link (`checkmate.profiling.mesh`), their waits a launch.

Workspaces are estimated as zero for every op that PyTorch has, but for softmax's backward on GPUs: what cuDNN and
cuBLAS take for themselves depends on their version and on the algorithm they choose. Leave room for it with ``reserve``
when you compile. That an op which can write over an argument leaves the same bits is taken from the table of such ops
(`checkmate.capture.inplace.rules`): nothing is tried. An op that runs graphs takes what their ops take, as often as it
runs them; of several it counts the one that takes longest. A kernel of Triton's is taken to be bound by memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from checkmate.capture.device import as_allocated
from checkmate.capture.higher_order.bodies import bodies, bytes_of_graph, bytes_within, rows_of
from checkmate.capture.higher_order.fused_attention import dense_ops
from checkmate.capture.inplace.aliasing import candidates
from checkmate.capture.inplace.rules import block_bytes
from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.capture.joint import Joint
from checkmate.capture.loss.kernels import estimate
from checkmate.capture.nodes import PlannedOp, is_view, storage, tensors
from checkmate.capture.random_draws import save_device_state
from checkmate.capture.rounding_probes import packet_of
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Profile
from checkmate.profiling.data_sheets import DEVICES as DEVICES  # where users find them
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.gpu_kernels import kernel_seconds, queued, workspace_bytes
from checkmate.profiling.mesh import collective_of, is_wait, layout_of_node, link_of
from checkmate.torch_internals.dispatcher import HigherOrderOperator

aten = torch.ops.aten

# How far estimates for GPUs are off, as far as anyone measured: the number of steps, those of
# `benchmarks/results/estimates.jsonl` by which no constant was set, and shares of the measured seconds, rounded up.
STEPS, HALF_WITHIN, WORST = 24, 0.12, 0.19
STATED = f"within {HALF_WITHIN:.0%} of measured steps for half of {STEPS}, {WORST:.0%} for the worst"

_PICK = {  # read from their first argument at most as much as they read and write elsewhere
    aten.embedding,
    aten.index,
    aten.gather,
    aten.index_select,
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
}
_CONVOLVE = {
    *(aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_backward),
    convolution_backward_input,
}
_SAME_FLOP = {  # for the formulas that PyTorch has for the same op on CUDA only
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
_FLEX: dict[str, Callable[..., int]] = {  # by name: PyTorch 2.11 has no formulas for them
    "flex_attention": lambda q, k, v, *_: sdpa_flop_count(q.shape, k.shape, v.shape),
    "flex_attention_backward": lambda q, k, v, out, *_: sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape),
}


def roofline(joint: Joint, device: Device) -> Profile:
    """Estimate every op of a captured step.

    Products in float32 run as PyTorch runs them: convolutions in tf32 where the device has it, which is PyTorch's
    default, and matrix products in float32, also its default; ``torch.backends.cuda.matmul.fp32_precision`` and
    `torch.set_float32_matmul_precision` change the latter. For a GPU the source says how far estimates were off.

    Raises:
        Unsupported: if a product is of a type for which the device has no rate.
    """
    seconds, workspace = np.zeros(len(joint.nodes)), np.zeros(len(joint.nodes), dtype=np.int64)
    launched = np.zeros(len(joint.nodes), dtype=np.int64)
    for k, node in enumerate(joint.nodes):
        if node is not None:
            seconds[k], launched[k] = roofline_seconds(node, device), launches(node)
            workspace[k] = as_allocated(_bytes_inside(node, device), device.block_bytes)
    if device.host:
        seconds = queued(seconds, launched, device.host)
    ways = []
    for k, makes, over, _, slower in candidates(joint):
        block = 0 if (node := joint.nodes[k]) is None else block_bytes(node) or 0
        ways.append(InPlace(k, makes, over, as_allocated(block, device.block_bytes), slower))
    source = f"roofline estimate for {device.name}" + (f", {STATED}" if device.processors else "")
    ops = tuple(range(len(joint.nodes)))
    return Profile(seconds, workspace, joint.resident_bytes, source, estimated=ops, ways=tuple(ways))


def _bytes_inside(node: fx.Node, device: Device) -> int:
    if (of_parts := estimate(node)) is not None:
        return of_parts.workspace_bytes
    if isinstance(node.target, PlannedOp):
        return node.target.workspace()
    if _graphs_of(node):
        return bytes_within(node)
    if (dense := dense_ops(node)) is not None:
        return bytes_of_graph(dense)
    return workspace_bytes(node, device)


def roofline_seconds(node: fx.Node, device: Device) -> float:
    """Seconds of one op.

    Raises:
        Unsupported: if it is a product of a type for which the device has no rate.
    """
    if graphs := _graphs_of(node):
        return rows_of(node) * max(sum(roofline_seconds(n, device) for n in ops) for ops in graphs)
    if is_wait(node):
        return device.latency
    if (collective := collective_of(node)) is not None:
        layout = None if collective.ranks else layout_of_node(node)
        ranks = collective.ranks if layout is None else layout.ranks
        return link_of(device).seconds(collective.name, collective.whole_bytes, ranks)
    flop, moved, dtype = flop_of(node), moved_bytes_of(node), _rate_of(node, device)
    if device.processors and estimate(node) is None and not (flop and dtype not in device.flops):
        return kernel_seconds(node, device, flop, dtype, moved)
    return device.seconds(flop, dtype, moved) + (launches(node) - 1) * device.latency


def launches(node: fx.Node) -> int:
    """The number of kernels of an op; one for an op of PyTorch, though some have two or three."""
    if graphs := _graphs_of(node):
        return rows_of(node) * max(sum(map(launches, ops)) for ops in graphs)
    of_parts = estimate(node)
    return 1 if of_parts is None else of_parts.launches


def _graphs_of(node: fx.Node) -> list[list[fx.Node]]:
    """The ops of each graph that an op runs per row or chooses from; none if it is one kernel, such as attention."""
    if not isinstance(node.target, HigherOrderOperator) or str(node.target) in _FLEX:
        return []
    graphs = [body.graph.nodes for body in bodies(node) if isinstance(body, fx.GraphModule)]
    ops = [
        [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem and not is_view(n)]
        for nodes in graphs
    ]
    return ops if any(ops) else []


def flop_of(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention, two per multiply-add; else 0."""
    packet = packet_of(node.target)
    if (of_parts := estimate(node)) is not None:
        return of_parts.flop
    given: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = given
    of_convolution = flop_registry[aten.convolution]
    if packet is convolution_backward_input:  # as many as for the forward
        grad, weight, shape, _, *geometry = args
        return int(of_convolution(grad.new_empty(shape), weight, None, *geometry, out_val=grad))
    if packet is aten.convolution_backward:  # as many for each of two gradients; PyTorch's formula forgets the groups
        grad, x, weight, _, *geometry, wanted = args
        return sum(wanted[:2]) * int(of_convolution(x, weight, None, *geometry, out_val=grad))
    if (of_attention := _FLEX.get(str(node.target))) is not None:
        return int(of_attention(*args))
    formula = flop_registry.get(_SAME_FLOP.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))


def moved_bytes_of(node: fx.Node) -> int:
    """Bytes of all tensors that an op reads and writes, each once."""
    if (of_parts := estimate(node)) is not None:
        return of_parts.moved_bytes
    if node.target is save_device_state:
        return 0  # which is the device's alone
    read = {n: sum(map(_bytes, tensors(n.meta.get("val")))) for n in node.all_input_nodes}
    inputs = {storage(t) for n in read for t in tensors(n.meta.get("val"))}
    written = sum(_bytes(t) for t in tensors(node.meta.get("val")) if storage(t) not in inputs)
    if packet_of(node.target) in _PICK:
        source: Any = node.args[0]
        others = sum(count for n, count in read.items() if n is not source)
        return written + others + min(read[source], written + others)
    return written + sum(read.values()) + (node.target.moved if isinstance(node.target, PlannedOp) else 0)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes behind the elements of a tensor; elements of an expanded dimension share theirs."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def _rate_of(node: fx.Node, device: Device) -> str:
    dtypes = [t.dtype for n in node.all_input_nodes for t in tensors(n.meta.get("val")) if t.dtype.is_floating_point]
    if not dtypes:
        return "float32"
    name = str(dtypes[0]).removeprefix("torch.")
    allowed = packet_of(node.target) in _CONVOLVE or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if name == "float32" and allowed and "tf32" in device.flops else name
