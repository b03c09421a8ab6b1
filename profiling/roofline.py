"""Estimate the costs of ops for a named device from their arithmetic and traffic; nothing runs.

    seconds = latency + max(FLOP / (efficiency · peak rate), bytes / (efficiency · bandwidth))

This is the roofline model (Williams, Waterman & Patterson, CACM 2009) with a constant for each launch. FLOP are those
of matrix products, convolutions and attention, from the formulas in `torch.utils.flop_counter`; all other ops are taken
to be bound by memory. Bytes are all tensors that an op reads and writes, once each: views and expanded dimensions cost
nothing, and lookups read only what they pick. An op of several kernels counts as one, but for those that run in parts.
Collectives take what moves between ranks over the device's link (`checkmate.profiling.mesh`), their waits a launch.
On GPUs the host launches one after another, and kernels are told apart, with corrections from measured ones:

    a product     sqrt(computing² + moving²)    as the loads of one tile hide behind another's products in part only
    all others    passes · bytes / bandwidth    of which those that the cache holds come from there

Each constant has its reason; `benchmarks.estimates` compares with measured steps, and says which set some.

Workspaces are estimated as zero for every op that PyTorch has, but for softmax's backward on GPUs: what cuDNN and
cuBLAS take for themselves depends on their version and on the algorithm they choose. Leave room for it with ``reserve``
when you compile. That an op which can write over an argument leaves the same bits is taken from the table of such ops
(`checkmate.capture.inplace.rules`): nothing is tried. An op that runs graphs takes what their ops take, as often as it
runs them; of several it counts the one that takes longest. A kernel of Triton's is taken to be bound by memory, and so
is that of a group of ops (`checkmate.capture.fusion`).
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

from checkmate.capture import cudnn
from checkmate.capture.device import as_allocated
from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.higher_order.bodies import bodies, bytes_of_graph, bytes_within, rows_of
from checkmate.capture.higher_order.fused_attention import dense_ops
from checkmate.capture.inplace.aliasing import candidates
from checkmate.capture.inplace.rules import block_bytes
from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.capture.joint import Joint
from checkmate.capture.loss.kernels import estimate
from checkmate.capture.loss.rounding_probes import packet_of
from checkmate.capture.nodes import PlannedOp, is_view, storage, tensors
from checkmate.capture.random_draws import save_device_state
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Profile
from checkmate.profiling.data_sheets import DEVICES as DEVICES  # where users find them
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.mesh import collective_of, is_wait, layout_of_node, link_of
from checkmate.torch_internals.running import HigherOrderOperator

aten = torch.ops.aten

# How far estimates for GPUs are off, as far as anyone measured: the number of steps, those of
# `benchmarks/results/estimates.jsonl` by which no constant was set, and shares of the measured seconds, rounded up.
STEPS, HALF_WITHIN, WORST = 24, 0.12, 0.19
STATED = f"within {HALF_WITHIN:.0%} of measured steps for half of {STEPS}, {WORST:.0%} for the worst"

_PICK = {  # read from their first argument at most as much as they read and write elsewhere
    *(aten.embedding, aten.index, aten.gather, aten.index_select),
    *(aten.nll_loss_forward, aten.nll_loss2d_forward),
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
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = arguments
    of_convolution = flop_registry[aten.convolution]
    if packet is convolution_backward_input:  # as many as for the forward
        grad, weight, shape, _, *geometry = args
        return int(of_convolution(grad.new_empty(shape), weight, None, *geometry, out_val=grad))
    if packet is aten.convolution_backward:  # as many for each of two gradients; PyTorch's formula forgets the groups
        grad, x, weight, _, *geometry, output_mask = args
        return sum(output_mask[:2]) * int(of_convolution(x, weight, None, *geometry, out_val=grad))
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
        other_bytes = sum(count for n, count in read.items() if n is not source)
        return written + other_bytes + min(read[source], written + other_bytes)
    return written + sum(read.values()) + (node.target.moved if isinstance(node.target, (PlannedOp, Kernel)) else 0)


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


# A product is computed tile by tile, one for each processor at a time. Tiles of cuBLAS and the share of the rate that
# they reach: each number read from the cache serves fewer products in a smaller one (NVIDIA, "Matrix Multiplication
# Background User's Guide", on tile efficiency).
TILES = ((128, 128, 1.0), (64, 128, 0.85), (64, 64, 0.65))
IDLE = 0.25  # of a wave of tiles: the last is half full on average, and tiles do not end all at once
FILL = 64  # a tile takes as long as this many more terms of its sums, to load the first and to store the result
PART = 2048  # where there are fewer tiles than processors, sums of twice as many terms are split ("split K")

# Of the rate, by attention in one kernel: Dao, "FlashAttention-2" (2023), figures 4 to 6, forward and backward.
ATTENTION = 0.55

# By each processor, from the cache they share. A quarter of what it is able to, which is 64: pointwise kernels wait for
# each of their few loads. Additions of Llama-2-7B's activations in Vidur's tables reach 15 on both the A100 and the
# H100, while those that the cache does not hold have .8 of the memory's bandwidth.
CACHE_BYTES_PER_CYCLE = 16

# Kernels for tensor cores have channels last. What is not in that order is brought into it, and the result out of it:
# each byte is read and written once more (NVIDIA, "Convolutional Layers User's Guide", on tensor layouts).
CONVERSIONS = 2

# Tensor cores take 8 channels at a time (the same guide): with groups of fewer, the other cores compute.
CHANNELS = 8

# How often ops go over their bytes, where it is not once: their kernels as they are in ATen/native/cuda. A norm reads
# its input for the statistics and again to apply them; its backward reads both inputs for sums and again for the
# result, and layer norm's a third time, for sums over rows. Softmax's backward multiplies first, into its own memory.
PASSES: dict[Any, float] = {
    **dict.fromkeys((cudnn.batch_norm, aten.cudnn_batch_norm, aten.native_batch_norm), 3 / 2),
    **dict.fromkeys((aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional), 3 / 2),
    **dict.fromkeys((aten.native_group_norm, aten.native_layer_norm, aten._fused_rms_norm), 3 / 2),
    **dict.fromkeys((cudnn.batch_norm_backward, aten.cudnn_batch_norm_backward), 5 / 3),
    **dict.fromkeys((aten.native_batch_norm_backward, aten.native_group_norm_backward), 5 / 3),
    **dict.fromkeys((aten.native_layer_norm_backward, aten._fused_rms_norm_backward), 7 / 3),
    aten._softmax_backward_data: 2,
}
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where the first of the two is
_WEIGHT = {  # of a convolution: where it is
    **dict.fromkeys((aten.convolution, aten._convolution, aten.cudnn_convolution, convolution_backward_input), 1),
    aten.convolution_backward: 2,
}


def kernel_seconds(node: fx.Node, device: Device, flop: int, dtype: str, moved_bytes: int) -> float:
    """Seconds of one op on a GPU, from its ``flop``, the rate of ``dtype`` and the bytes that it moves."""
    packet = packet_of(node.target)
    if not flop:
        return device.latency + pointwise_seconds(device, moved_bytes, PASSES.get(packet, 1))
    moving = moved_bytes / (device.memory_efficiency * device.bandwidth)
    rate = device.flops[dtype]
    if packet in _WEIGHT:
        groups = next(arg for arg in reversed(node.args) if type(arg) is int)
        weight = _shape(node.args[_WEIGHT[packet]])
        if groups > 1 and min(weight[0] // groups, weight[1]) < CHANNELS:
            rate = min(rate, device.flops["float32"])
        elif rate > device.flops["float32"] and not _channels_last(node):
            moving_too = CONVERSIONS * pointwise_seconds(device, moved_bytes)
            return device.latency + math.hypot(flop / (device.compute_efficiency * rate), moving) + moving_too
    if packet in _MATRICES:
        first = _MATRICES[packet]
        (*batch, rows, terms), (*_, columns) = (_shape(arg) for arg in node.args[first : first + 2])
        computing = product_seconds(device, math.prod(batch), rows, columns, terms, rate)
    elif "attention" in str(packet):
        # Told that no position sees a later one, its kernels leave these products out.
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        computing = flop * (0.5 if arguments.get("is_causal", False) else 1) / (ATTENTION * rate)
    else:
        computing = flop / (device.compute_efficiency * rate)
    return device.latency + math.hypot(computing, moving)


def pointwise_seconds(device: Device, moved_bytes: float, passes: float = 1) -> float:
    """Seconds to read and write bytes a number of times; bytes that earlier ops left in the cache come from there.

    >>> from checkmate.profiling.data_sheets import DEVICES
    >>> [round(1e6 * pointwise_seconds(DEVICES["a100"], size)) for size in (4e6, 40e6, 400e6)]
    [2, 16, 237]
    """
    near = min(moved_bytes, device.cache_bytes)
    from_cache = near / (CACHE_BYTES_PER_CYCLE * device.processors * device.clock)
    return passes * (from_cache + (moved_bytes - near) / (device.memory_efficiency * device.bandwidth))


def product_seconds(device: Device, batch: int, rows: int, columns: int, terms: int, rate: float) -> float:
    """Seconds to compute a matrix product by the best tiles, without its reads and writes.

    >>> from checkmate.profiling.data_sheets import DEVICES
    >>> a100 = DEVICES["a100"]
    >>> times = [product_seconds(a100, 1, n, 4096, 4096, a100.flops["float16"]) for n in (64, 128, 4096)]
    >>> [round(1e6 * seconds) for seconds in times]
    [15, 25, 574]
    """
    seconds = []
    for height, width, share in TILES:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        parts = max(1, min(terms // PART, device.processors // tiles))
        waves = tiles * parts / device.processors + IDLE
        of_tile = 2 * height * width * (terms / parts + FILL) * device.processors / (share * rate)
        seconds.append(waves * of_tile / device.compute_efficiency)
    return min(seconds)


def workspace_bytes(node: fx.Node, device: Device) -> int:
    """The workspace of a kernel, if it is certain: the products that softmax's backward begins with."""
    if device.processors and packet_of(node.target) is aten._softmax_backward_data:
        (grad, *_) = node.all_input_nodes
        return sum(t.numel() * t.element_size() for t in tensors(grad.meta.get("val")))
    return 0


def queued(seconds: np.ndarray, launches: np.ndarray, host: float) -> np.ndarray:
    """The seconds between the ends of successive ops, while the host launches them one after another.

    The device does not begin before the host has launched: where kernels are short, it waits for the host, and where
    they are long, the host is ahead. So the sum is what the step takes, and a short op costs what it delays.

    Args:
        seconds: (T,) of each op on the device; launches: (T,) how many it takes; host: seconds of the host for each.

    >>> queued(np.array([1.0, 1.0, 9.0, 1.0]), np.array([1, 1, 1, 1]), 2.0).tolist()
    [3.0, 2.0, 10.0, 1.0]
    """
    ends = np.zeros(len(seconds) + 1)
    for k, launched in enumerate(host * np.cumsum(launches)):
        ends[k + 1] = max(ends[k], launched if launches[k] else 0.0) + seconds[k]
    return np.diff(ends)


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _channels_last(node: fx.Node) -> bool:
    """Tell whether the largest tensor of a convolution is laid out channels last."""
    touched = [t for n in (node, *node.all_input_nodes) for t in tensors(n.meta.get("val")) if t.dim() > 2]
    largest = max(touched, key=torch.Tensor.numel)
    return largest.stride(1) == 1 < largest.shape[1]
