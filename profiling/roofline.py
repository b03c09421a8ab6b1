"""Costs of ops estimated for a named device, from what they compute and what they move: nothing runs.

    seconds = latency + max(FLOP / (efficiency · peak rate), bytes / (efficiency · bandwidth))

This is the roofline model (Williams, Waterman & Patterson, CACM 2009) with a constant for each launch. FLOP are those
of matrix products, convolutions and attention, from the formulas in `torch.utils.flop_counter`; all other ops are taken
to be bound by memory. Bytes are all tensors that an op reads and writes, once each: views and expanded dimensions cost
nothing, and lookups read only what they pick. An op of several kernels counts as one, but for those that run in parts.

Workspaces are estimated as zero for every op that PyTorch has: what cuDNN and cuBLAS take for themselves depends on
their version and on the algorithm they choose. Leave room for it with ``reserve`` when you compile. That an op which
can write over an argument leaves the same bits is taken from the table of such ops (`checkmate.capture.ways.table`):
nothing is tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from checkmate.capture.device import as_allocated
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import is_view, storage, tensors
from checkmate.capture.splits.loss import estimate
from checkmate.capture.splits.parts import InParts
from checkmate.capture.ways.legal import Candidate, candidates
from checkmate.capture.ways.rounding_probes import packet_of
from checkmate.capture.ways.shape_only import convolution_backward_input
from checkmate.capture.ways.table import block_bytes, written_of
from checkmate.core.problem import Profile
from checkmate.core.ways import Way
from checkmate.devices import CUDA
from checkmate.errors import Unsupported
from checkmate.torch_internals.dispatcher import HigherOrderOperator

aten = torch.ops.aten


@dataclass(frozen=True)
class Device:
    """What a device can do at most, by its data sheet, and which share of that a good kernel gets.

    Raises:
        ValueError: if a figure is not positive, or there is no rate for float32.

    >>> from checkmate.profiling.roofline import DEVICES, Device
    >>> DEVICES["mine"] = Device("my card", flops={"float32": 10e12, "float16": 40e12}, bandwidth=5e11, latency=4e-6)
    >>> _ = DEVICES.pop("mine")
    """

    name: str
    flops: Mapping[str, float]  # FLOP per second of dense products, by type: "float32", "bfloat16", ..., and "tf32"
    bandwidth: float  # bytes per second, to and from the device's memory
    latency: float  # seconds that each op takes at least
    block_bytes: int = 1  # sizes are rounded up to a multiple of these
    capability: tuple[int, int] | None = None  # compute capability of a GPU of NVIDIA; else it runs as a CPU does
    compute_efficiency: float = 0.7  # of the peak rate: what large matrix products and convolutions reach
    memory_efficiency: float = 0.8  # of the bandwidth: what copies and pointwise kernels reach

    def __post_init__(self) -> None:
        figures = (self.bandwidth, self.block_bytes, self.compute_efficiency, self.memory_efficiency)
        if not all(figure > 0 for figure in (*figures, *self.flops.values())) or self.latency < 0:
            raise ValueError(f"The rates, sizes and shares of {self.name!r} must be positive, and its latency not < 0.")
        if "float32" not in self.flops:
            raise ValueError(f"{self.name!r} has no rate for float32.")

    def seconds(self, flop: float, dtype: str, moved_bytes: float) -> float:
        """Seconds of one op.

        Raises:
            Unsupported: if the device has no rate for this type.

        >>> device = Device("", {"float32": 1e12}, 1e11, 1e-6, compute_efficiency=0.5, memory_efficiency=0.5)
        >>> device.seconds(flop=1e9, dtype="float32", moved_bytes=1e6)
        0.002001
        """
        seconds = moved_bytes / (self.memory_efficiency * self.bandwidth)
        if flop:
            if dtype not in self.flops:
                raise Unsupported(f"{self.name} has no rate for {dtype}, only for {', '.join(self.flops)}.")
            seconds = max(seconds, flop / (self.compute_efficiency * self.flops[dtype]))
        return self.latency + seconds


def _gpu(
    name: str, sm: tuple[int, int], float64: float, float32: float, tf32: float, half: float, bandwidth: float
) -> Device:
    """A card of NVIDIA: rates in TFLOP/s without sparsity, products in half precision summed in float32, GB/s."""
    teras = {"float64": float64, "float32": float32, "tf32": tf32, "bfloat16": half, "float16": half}
    flops = {dtype: rate * 1e12 for dtype, rate in teras.items()}
    return Device(name, flops, bandwidth * 1e9, latency=4e-6, block_bytes=CUDA.block_bytes, capability=sm)


DEVICES: dict[str, Device] = {
    # NVIDIA H100 Tensor Core GPU data sheet (2023), SXM; half of the figures that it gives with sparsity.
    "h100": _gpu("NVIDIA H100 SXM", (9, 0), 67, 67, 494.7, 989.4, 3350),
    # NVIDIA H200 Tensor Core GPU data sheet (2024), SXM: the H100's processor with faster memory.
    "h200": _gpu("NVIDIA H200 SXM", (9, 0), 67, 67, 494.7, 989.4, 4800),
    # NVIDIA A100 Tensor Core GPU data sheet (2021), 80 GB SXM.
    "a100": _gpu("NVIDIA A100 SXM 80GB", (8, 0), 19.5, 19.5, 156, 312, 2039),
    # NVIDIA L4 data sheet (2023); half of the figures that it gives with sparsity; float64 is 1/64 of float32.
    "l4": _gpu("NVIDIA L4", (8, 9), 0.473, 30.3, 60, 121, 300),
    # NVIDIA Ada GPU architecture whitepaper (2022), appendix A; float64 is 1/64 of float32.
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 1.29, 82.6, 82.6, 165.2, 1008),
    # Specifications of the 12 GB card; tf32 and half are 1 and 2 times float32 as for its siblings in the NVIDIA Ampere
    # GA102 GPU architecture whitepaper (2021); float64 is 1/64.
    "rtx3060": _gpu("NVIDIA GeForce RTX 3060", (8, 6), 0.199, 12.7, 12.7, 25.5, 360),
    # No one product: 8 cores at 3 GHz with two 8-wide fused multiply-adds each cycle, two channels of DDR5-4800. It has
    # no units for half precision: such a product takes as long as in float32.
    "laptop": Device(
        "laptop CPU",
        {"float64": 0.384e12, "float32": 0.768e12, "bfloat16": 0.768e12, "float16": 0.768e12},
        bandwidth=76.8e9,
        latency=2e-6,
    ),
}

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


def roofline(joint: Joint, device: Device) -> Profile:
    """Estimate every op of a captured step.

    Products in float32 run as PyTorch runs them: convolutions in tf32 where the device has it, which is PyTorch's
    default, and matrix products in float32, also its default; ``torch.backends.cuda.matmul.fp32_precision`` and
    `torch.set_float32_matmul_precision` change the latter.

    Raises:
        Unsupported: if a product is of a type for which the device has no rate.
    """
    seconds, workspace = np.zeros(len(joint.nodes)), np.zeros(len(joint.nodes), dtype=np.int64)
    for k, node in enumerate(joint.nodes):
        if node is not None:
            seconds[k] = roofline_seconds(node, device)
            if (of_parts := estimate(node)) is not None:
                workspace[k] = as_allocated(of_parts.workspace_bytes, device.block_bytes)
            elif isinstance(node.target, InParts):
                workspace[k] = as_allocated(node.target.inner_bytes, device.block_bytes)
    source = f"roofline estimate for {device.name}"
    ops = tuple(range(len(joint.nodes)))
    ways = tuple(_way(joint, c, device) for c in candidates(joint))
    return Profile(seconds, workspace, joint.resident_bytes, source, estimated=ops, ways=ways)


def _way(joint: Joint, candidate: Candidate, device: Device) -> Way:
    """Its workspace is a block or a part, where it runs block by block or in parts, and else nothing."""
    node = joint.nodes[candidate.op]
    assert node is not None
    written, inside = written_of(node.target), block_bytes(node) or 0
    assert written is not None
    if isinstance(node.target, InParts):
        inside = node.target.inner_bytes
    workspace = as_allocated(inside, device.block_bytes)
    return Way(candidate.op, candidate.makes, candidate.over, workspace, written.slower)


def roofline_seconds(node: fx.Node, device: Device) -> float:
    """Seconds of one op.

    Raises:
        Unsupported: if it is a product of a type for which the device has no rate.
    """
    if isinstance(node.target, InParts):
        ops = [n for n in node.target.part.nodes if n.op == "call_function" and not is_view(n)]
        return node.target.parts * sum(roofline_seconds(n, device) for n in ops)
    of_parts = estimate(node)
    launches = 0.0 if of_parts is None else (of_parts.launches - 1) * device.latency
    return device.seconds(flop_of(node), _rate_of(node, device), moved_bytes_of(node)) + launches


def flop_of(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, a convolution or attention, two for each product; else 0."""
    packet = packet_of(node.target)
    if (of_parts := estimate(node)) is not None:
        return of_parts.flop
    if isinstance(packet, HigherOrderOperator):
        return 0  # what its subgraph computes is not known here
    given: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = given
    of_convolution = flop_registry[aten.convolution]
    if packet is convolution_backward_input:  # as many as for the forward
        grad, weight, shape, _, *geometry = args
        return int(of_convolution(grad.new_empty(shape), weight, None, *geometry, out_val=grad))
    if packet is aten.convolution_backward:  # as many for each of two gradients; PyTorch's formula forgets the groups
        grad, x, weight, _, *geometry, wanted = args
        return sum(wanted[:2]) * int(of_convolution(x, weight, None, *geometry, out_val=grad))
    formula = flop_registry.get(_SAME_FLOP.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))


def moved_bytes_of(node: fx.Node) -> int:
    """Bytes of all tensors that an op reads and writes, once each."""
    if (of_parts := estimate(node)) is not None:
        return of_parts.moved_bytes
    read = {n: sum(map(_bytes, tensors(n.meta.get("val")))) for n in node.all_input_nodes}
    inputs = {storage(t) for n in read for t in tensors(n.meta.get("val"))}
    written = sum(_bytes(t) for t in tensors(node.meta.get("val")) if storage(t) not in inputs)
    if packet_of(node.target) in _PICK:
        source: Any = node.args[0]
        others = sum(count for n, count in read.items() if n is not source)
        return written + others + min(read[source], written + others)
    return written + sum(read.values()) + getattr(node.target, "moved_bytes", 0)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes behind the elements of a tensor; those of an expanded dimension lie on each other."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def _rate_of(node: fx.Node, device: Device) -> str:
    """The type whose rate an op runs at."""
    dtypes = [t.dtype for n in node.all_input_nodes for t in tensors(n.meta.get("val")) if t.dtype.is_floating_point]
    if not dtypes:
        return "float32"
    name = str(dtypes[0]).removeprefix("torch.")
    allowed = (
        packet_of(node.target) in (*_CONVOLVE, convolution_backward_input)
        or torch.backends.cuda.matmul.fp32_precision == "tf32"
    )
    return "tf32" if name == "float32" and allowed and "tf32" in device.flops else name
