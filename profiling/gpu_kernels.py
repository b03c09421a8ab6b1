"""The seconds of kernels on a GPU: the roofline, with corrections from measured kernels.

    a product     sqrt(computing² + moving²)    as the loads of one tile hide behind another's products in part only
    all others    passes · bytes / bandwidth    of which those that the cache holds come from there

Each constant below has its reason; `benchmarks.estimates` compares with measured steps, and says which set some.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.capture import cudnn
from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.capture.nodes import tensors
from checkmate.capture.rounding_probes import packet_of
from checkmate.profiling.data_sheets import Device

aten = torch.ops.aten

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
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        computing = flop * (0.5 if given.get("is_causal", False) else 1) / (ATTENTION * rate)
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
