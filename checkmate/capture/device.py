"""The device of a step, the CPU or one accelerator, and its role in sizes, budget and repeatability."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.fx as fx

from checkmate.capture.nodes import called, tensors
from checkmate.capture.provenance import where
from checkmate.capture.random_draws import save_device_state
from checkmate.devices import is_known, kind_of
from checkmate.errors import Unsupported
from checkmate.memory import CPU
from checkmate.torch_internals.running import OpOverload, outside_tracing

T = TypeVar("T")
WAVERS = "wavers"  # in the meta of a node: it was tried, and left other bits when it ran again

UNORDERED = {  # on CUDA their kernels add by atomic operations, says `torch.use_deterministic_algorithms`
    *("cumsum", "index_add", "scatter_add", "scatter_reduce", "index_reduce", "put", "histc", "bincount", "median"),
    *("max_unpool2d", "max_unpool3d", "nll_loss2d_forward", "convolution_backward", "embedding_dense_backward"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward", "_ctc_loss_backward", "avg_pool3d_backward"),
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
    *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_pool3d_with_indices_backward"),
    *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
    *(f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    *("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *(f"{by}_attention_backward" for by in ("_flash", "_efficient", "_cudnn")),
    *(f"_scaled_dot_product_{by}_backward" for by in ("flash_attention", "efficient_attention", "cudnn_attention")),
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "flex_lib::zeros_and_scatter",  # of gradients of what the scores of `flex_attention` read
}


def as_allocated(size_bytes: int, block_bytes: int) -> int:
    """Bytes that the allocator takes for a tensor: whole blocks."""
    return -(-size_bytes // block_bytes) * block_bytes


def main_device(things: Iterable[Any]) -> torch.device:
    """The device of the first of these tensors that is not on the CPU; else the CPU."""
    return next((t.device for t in things if isinstance(t, torch.Tensor) and t.device != CPU), CPU)


def device_of(graph: fx.Graph) -> torch.device:
    """The one device of a captured step.

    A tensor of no dimension may be on the CPU all the same: PyTorch takes it for a number, and attention on CUDA hands
    the seed of its dropout on as one. A tensor without elements, as caches begin with, may be anywhere.

    Raises:
        Unsupported: if there are several devices, or one that is neither the CPU nor CUDA nor an accelerator whose
            memory PyTorch counts.
    """
    # The node that first names each device, without tensors that may be on the CPU in any step.
    first: dict[torch.device, str] = {}
    numbers: set[torch.device] = set()
    for node in graph.nodes:
        for tensor in tensors(node.meta.get("val")):
            nothing = tensor.ndim == 0 or 0 in [size for size in tensor.shape if type(size) is int]
            if tensor.device == CPU and (nothing or node.target is save_device_state):
                numbers.add(CPU)
            else:
                first.setdefault(tensor.device, f"{node.name} ({where(node)})")
    # Refuse several, and one whose memory is not counted.
    if len(first) > 1:
        devices = "; ".join(f"{device}, first at {name}" for device, name in first.items())
        raise Unsupported(
            f"The step has tensors on several devices: {devices}. One plan is for one device: move everything to it "
            "before the step, or compile the part that runs there."
        )
    device = next(iter(first or numbers), CPU)
    if not is_known(device):
        raise Unsupported(
            f"The step runs on {device}; steps are planned for the CPU and for CUDA devices, and for others if "
            "torch.accelerator.memory_stats counts the bytes that are asked for there."
        )
    return device


def allocated_on(device: torch.device) -> int | None:
    """Bytes of the allocated blocks on an accelerator when a step begins there; None on the CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        have_libraries_take_workspaces(device)
    gc.collect()  # garbage in cycles is not in use
    return torch.accelerator.memory_allocated(device)


def have_libraries_take_workspaces(device: torch.device) -> None:
    """Make cuBLAS and cuBLASLt allocate their workspaces now, for this thread and autograd's.

    On CUDA each takes one at its first product on a thread and stream, and keeps it. A step whose ops were all measured
    before, by another process, would meet these bytes only once it runs.
    """

    def products() -> None:
        with torch.autocast(device.type, enabled=False):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(16, 16, dtype=dtype, device=device)
                torch.addmm(x[0], x, x)
                torch.mm(x, x)

    with outside_tracing(), torch.no_grad():
        products()
        in_autograds_thread(device, products)


def in_autograds_thread(device: torch.device, call: Callable[[], T]) -> T:
    """Call a function in the thread that runs backwards on a device, or on the CPU in the caller's; return its result.

    Libraries keep handles, workspaces and choices of kernels for each thread. AOTAutograd traces with multithreading
    off, so that a backward stays in the caller's thread: here it does not.
    """
    results: list[T] = []
    in_its_thread = torch.autograd.set_multithreading_enabled(True)
    with outside_tracing(), in_its_thread, torch.enable_grad():
        x = torch.empty(0, device=device, requires_grad=True)  # its thread lets go of a gradient later: one of no bytes
        y = x * 1
        y.register_hook(lambda grad: results.append(call()))
        torch.autograd.grad(y, x, x)
    return results[0]


@contextmanager
def same_random_state(*devices: torch.device) -> Iterator[None]:
    """Restore the global random states of the CPU and these devices at the end of the block."""
    states = random_states(*devices)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for device, state in zip(_with_generators(devices), states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


def random_states(*devices: torch.device) -> list[torch.Tensor]:
    """The global random states of the CPU and of those of these devices that have one."""
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in _with_generators(devices))]


def _with_generators(devices: Iterable[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type not in ("cpu", "meta")]


def may_waver(device: torch.device) -> bool:
    """Tell whether plain PyTorch may differ from run to run on this device."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return kind_of(device).may_waver and not strict


def is_unordered(node: fx.Node) -> bool:
    """Tell whether an op may add in another order from run to run, or wavered when tried."""
    if node.meta.get(WAVERS):
        return True
    op = called(node)
    if not isinstance(op, OpOverload) or op._schema.name.removeprefix("aten::") not in UNORDERED:
        return False
    results = [t for t in tensors(node.meta.get("val")) if t.is_floating_point() or t.is_complex()]
    return any(may_waver(t.device) for t in results)
