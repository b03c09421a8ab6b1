"""Traits of each kind of device: the CPU, CUDA, and any other that `torch.accelerator` supports.

Streams, events and the counts of an allocator are asked of `torch.accelerator`, CUDA's too, and generators of the
device's module; here is what neither tells. ROCm comes as CUDA; others are XPU, and what is built on PrivateUse1.
Whatever is not the CPU has run on simulated devices only, and on no hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import platform
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch

from checkmate.errors import HostError
from checkmate.torch_internals.running import outside_tracing
from checkmate.units import exact_bytes, format_bytes

log = logging.getLogger("checkmate.host")

REQUESTED = "requested_bytes.all"  # among the counts of an allocator: bytes as they were asked for
EXACT = ("none", "ieee")  # float32 as it is
KERNELS = (  # variables of the environment by which libraries choose kernels
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
)


class Kind:
    """The traits of an accelerator; the CPU and CUDA override some."""

    block_bytes = 512  # unit of its allocator's sizes (kMinBlockSize on CUDA and XPU)
    like = "a100"  # the device whose estimates are scaled, of `checkmate.profiling.roofline`
    may_waver = True  # kernels may add in no fixed order: plain PyTorch need not repeat its own numbers

    def name(self, device: torch.device) -> str:
        """The device's name; measurements hold for all devices of this name."""
        module = torch.get_device_module(device)
        return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else ""

    def settings(self) -> dict[str, bool]:
        """The settings that change which kernels run, in words, each with whether to mention it."""
        backends: Any = torch.backends
        products, convolutions = backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
        return {
            f"convolutions in {convolutions}": convolutions not in EXACT,
            "without mkldnn": not backends.mkldnn.enabled,
            **{f"{name}={os.environ.get(name)}": name in os.environ for name in KERNELS},
            f"products in {products}": products not in EXACT,
        }

    def cache_bytes(self, device: torch.device) -> int:
        """Bytes of its last-level cache; a large number if unknown."""
        properties = getattr(torch.get_device_module(device), "get_device_properties", lambda device: None)(device)
        return int(getattr(properties, "L2_cache_size", 64 << 20))

    def free_bytes(self, device: torch.device) -> tuple[int, int]:
        """Free bytes of its memory, the bytes that this process may have, and the total."""
        free, total = torch.accelerator.get_memory_info(device)
        return free, total

    def pin(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device reads and writes by itself, (nbytes,) uint8, for as long as its storage lives.

        No copy to or from it may be under way when that ends.

        Raises:
            HostError: if the host does not give so much, or it cannot be pinned.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise HostError(
                f"{exact_bytes(nbytes)} of the host's memory cannot be pinned: {error}. Give a smaller host_budget."
            ) from error


class _Cpu(Kind):
    block_bytes = 1
    like = "laptop"
    may_waver = False

    def name(self, device: torch.device) -> str:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        name = facts.get("model name") or platform.processor() or platform.machine()
        traits = [facts.get(key, "") for key in ("cpu family", "model", "stepping", "flags")]
        kind = hashlib.sha256("\n".join(traits).encode()).hexdigest()[:8]  # one name may stand for several
        return f"{name} {kind} {torch.backends.cpu.get_cpu_capability()}"  # AVX2, AVX512, ...


class _Cuda(Kind):
    def settings(self) -> dict[str, bool]:
        backends: Any = torch.backends
        products, convolutions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        return {
            f"cudnn {backends.cudnn.version()}": True,
            f"convolutions in {convolutions}": convolutions != "tf32",
            "without cudnn": not backends.cudnn.enabled,
            "cudnn benchmark": backends.cudnn.benchmark,
            "cudnn deterministic": backends.cudnn.deterministic,
            f"products in {products}": products not in EXACT,
        }

    def free_bytes(self, device: torch.device) -> tuple[int, int]:
        """Free bytes within the fraction of `torch.cuda.set_per_process_memory_fraction`."""
        free, total = torch.cuda.mem_get_info(device)
        most = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free, most - torch.cuda.memory_reserved(device)), total

    def pin(self, nbytes: int) -> torch.Tensor:
        """Pin to the byte: PyTorch's own pool of pinned memory rounds up to powers of two."""
        try:
            array = (ctypes.c_char * nbytes).from_buffer(mmap.mmap(-1, nbytes))
        except OSError as error:
            raise HostError(
                f"The host does not give {exact_bytes(nbytes)}: {error.strerror}. Give a smaller host_budget."
            ) from error
        log.info("Pinning %s of the host's memory, once.", format_bytes(nbytes))
        cudart, address = torch.cuda.cudart(), ctypes.addressof(array)
        status = cudart.cudaHostRegister(address, nbytes, 0)
        if int(status) != 0:
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel: here for this one
                torch.zeros(1, device="cuda")
            raise HostError(
                f"{exact_bytes(nbytes)} of the host's memory cannot be pinned: CUDA error {int(status)}. Give a "
                "smaller host_budget, or raise the limit of locked memory (ulimit -l)."
            )
        weakref.finalize(array, cudart.cudaHostUnregister, address).atexit = False  # the tensor holds the array
        return torch.frombuffer(array, dtype=torch.uint8)


CUDA = _Cuda()
_KINDS = {"cpu": _Cpu(), "cuda": CUDA}
_OTHER = Kind()


def is_known(device: torch.device) -> bool:
    """Tell whether steps can be planned for this kind of device: its allocator must count the bytes requested."""
    return device.type in _KINDS or _counts_requests(device.type)


@cache
def _counts_requests(kind: str) -> bool:
    """Tell whether `torch.accelerator` supports a kind of device whose allocator counts requested bytes."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        return False
    try:
        with outside_tracing():
            tensor = torch.empty(1, device=accelerator)
        return requested(tensor.device) >= tensor.nbytes
    except RuntimeError:  # there is none here, or its allocator keeps no statistics, as that of MPS
        return False


def kind_of(device: torch.device) -> Kind:
    """The traits of a device, whether or not steps can be planned for it.

    >>> kind_of(torch.device("cpu")).block_bytes, kind_of(torch.device("cuda")).block_bytes
    (1, 512)
    """
    return _KINDS.get(device.type, _OTHER)


def kinds() -> list[str]:
    """PyTorch's names of the kinds of device: the CPU, CUDA, and this machine's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return [*dict.fromkeys([*_KINDS, *([] if accelerator is None else [accelerator.type])])]


def is_here(device: torch.device) -> bool:
    """Tell whether this process can make tensors on a device; on the meta device it can."""
    return device.type == "meta" or bool(torch.get_device_module(device).is_available())


def requested(device: torch.device) -> int:
    """Bytes that were requested from an accelerator and are in use."""
    return int(torch.accelerator.memory_stats(device).get(f"{REQUESTED}.current", 0))  # empty before the first
