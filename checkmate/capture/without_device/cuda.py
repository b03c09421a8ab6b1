"""Trace a step for CUDA on a machine without CUDA: PyTorch's questions to a device are answered here.

Tracing runs nothing, but autograd asks which stream is current, ATen whether there is cuDNN, attention which device it
is on. A small library answers (cuda.cpp), compiled when it is first needed, and only while the step is traced.

The kernel of attention PyTorch decides for each call by what the device, the types and the shapes allow, in an order of
preference (``select_sdp_backend`` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): cuDNN first on Hopper and
data-center Blackwell, then FlashAttention, then the memory-efficient kernels, which alone take float32, then plain
products. What a kernel keeps for the backward differs between them, and so does what a plan can do. Not followed:
nested tensors, AMD's GPUs, an order that the user sets (``sdpa_kernel(..., set_priority=True)``).
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from checkmate.memory.native import Source, Unbuildable
from checkmate.torch_internals.running import triton_utils

MATH, FLASH, EFFICIENT, CUDNN = range(4)  # as at::SDPBackend has them
UNBATCHED = (2, 15)  # from this PyTorch on, fused kernels take three dimensions
_SCALARS = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}  # c10::ScalarType
_HALF = (torch.float16, torch.bfloat16)
_FLASH_FROM, _EFFICIENT_FROM, _LAST = (8, 0), (5, 0), (12, 1)  # compute capabilities
log = logging.getLogger("checkmate.capture")
CUDNN_VERSION = 91900  # of the builds for CUDA 13 of PyTorch 2.11; taken where PyTorch was built without it
_CHOICE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
LIBRARY = Source(
    Path(__file__).with_name("cuda.cpp"),
    ("c10", "torch_cpu"),
    (("pretend", None, (_CHOICE, ctypes.c_long)), ("no_longer", None, ())),
)
_lock = threading.RLock()
_choices: list[Any] = []  # PyTorch keeps the address of the last one


class Attention(NamedTuple):
    """A call of `torch.nn.functional.scaled_dot_product_attention`, as cuda.cpp describes it."""

    scalar: int  # the type of the query
    one_type: int
    dims: int
    heads: int
    key_heads: int
    value_heads: int
    queries: int  # length of the sequence; where cuda.cpp asks, 2 stands for each longer one
    keys: int  # where it asks, 3 for a longer one that is not that of the queries
    head_dim: int
    key_dim: int
    value_dim: int
    masked: int
    dropout: int
    causal: int
    grouped: int
    in_line: int  # elements of the last dimension follow each other
    trains: int

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the query; None if no fused kernel takes it."""
        return _SCALARS.get(self.scalar)


def choose(call: Attention, capability: tuple[int, int], cudnn: int) -> int:
    """Choose a kernel, by number, for a device of this compute capability; ``cudnn``: 91900 for version 9.19.0.

    >>> half = Attention(5, 1, 4, 12, 12, 12, 1024, 1024, 64, 64, 64, 0, 0, 1, 0, 1, 1)
    >>> [choose(half, of, 91900) == kernel for of, kernel in (((9, 0), CUDNN), ((8, 0), FLASH), ((7, 5), EFFICIENT))]
    [True, True, True]
    """
    major, minor = capability
    kernels = [
        (FLASH, torch.backends.cuda.flash_sdp_enabled, _FLASH_FROM, _flash),
        (EFFICIENT, torch.backends.cuda.mem_efficient_sdp_enabled, _EFFICIENT_FROM, _efficient),
    ]
    if cudnn > 91500 and major in (9, 10) and minor in (0, 3):
        kernels.insert(0, (CUDNN, torch.backends.cuda.cudnn_sdp_enabled, _FLASH_FROM, _cudnn))
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    fits = (
        (call.dims == 4 or (call.dims == 3 and version >= UNBATCHED))
        and call.one_type
        and call.in_line
        and min(call.queries, call.keys) > 0
    )
    for kernel, is_enabled, since, takes in kernels if fits else ():
        if is_enabled() and since <= capability <= _LAST and takes(call, capability):
            return kernel
    return MATH


def _flash(call: Attention, capability: tuple[int, int]) -> bool:
    consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    too_wide = 192 < call.head_dim <= 224 or (call.head_dim > 224 and call.dropout)
    return (
        call.dtype in _HALF
        and not call.masked
        and call.head_dim == call.key_dim == call.value_dim <= 256
        and not (call.trains and consumer and too_wide)
        and not (call.causal and call.queries != call.keys)
        and _heads_match(call)
    )


def _efficient(call: Attention, capability: tuple[int, int]) -> bool:
    half = call.dtype in _HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    aligned = max(4 if capability >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
    return (
        (call.dtype in (torch.float16, torch.float32) or (call.dtype is torch.bfloat16 and capability >= (8, 0)))
        and call.heads == call.key_heads == call.value_heads
        and call.head_dim == call.key_dim > 0
        and call.value_dim > 0
        and not call.head_dim % aligned
        and not call.value_dim % aligned
    )


def _cudnn(call: Attention, capability: tuple[int, int]) -> bool:
    deterministic = torch.are_deterministic_algorithms_enabled()
    most = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and (call.head_dim, call.value_dim) == (192, 128):
        most = 192
    return (
        call.dtype in _HALF
        and _heads_match(call)
        and max(call.head_dim, call.value_dim) <= most
        and not call.head_dim % 8
        and not call.value_dim % 8
        and call.keys > 1
        and not (call.queries == 1 and call.dropout)
        and (not deterministic or torch.is_deterministic_algorithms_warn_only_enabled())
    )


def _heads_match(call: Attention) -> bool:
    if call.grouped:
        return call.key_heads == call.value_heads > 0 and not call.heads % call.key_heads
    return call.heads == call.key_heads == call.value_heads


@contextmanager
def as_on_cuda(capability: tuple[int, int]) -> Iterator[bool]:
    """Within the block, fake tensors on ``cuda:0`` can be traced as on a device of this compute capability.

    Where there is a CUDA device nothing is changed: kernels are chosen for that one. Gives whether it can be done;
    where the library cannot be had, one line of the log says why.
    """
    if torch.cuda.is_available():
        yield True
        return
    try:
        library = LIBRARY.load()
    except (Unbuildable, OSError) as error:
        log.warning(
            "The step is planned with the ops that run on the CPU, not with those of a GPU: to trace these without one "
            "takes a C++ compiler, and %s.",
            error,
        )
        yield False
        return
    # Answer what the library is asked, and what Python's side of PyTorch asks.
    cudnn = torch.backends.cudnn.version() or CUDNN_VERSION

    @_CHOICE
    def chosen(fields: Any) -> int:
        return choose(Attention(*fields[: len(Attention._fields)]), capability, cudnn)

    common = torch.cuda.amp.common
    with _lock:
        library.checkmate_pretend(chosen, cudnn)
        _choices[:] = [chosen]
        try:
            with (
                patch.object(common, "amp_definitely_not_available", lambda: False),
                patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
                triton_for(capability),
            ):
                yield True
        finally:
            library.checkmate_no_longer()


@contextmanager
def triton_for(capability: tuple[int, int]) -> Iterator[None]:
    """Within the block, capture Triton kernels and find the tensors they write, for such a device."""
    triton: Any = sys.modules.get("triton")
    if triton is None:  # then no kernel of a user's is there
        yield
        return
    target = triton.backends.compiler.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver = SimpleNamespace(get_current_target=lambda: target)
    with (
        patch.object(triton_utils, "has_triton", lambda **_: True),
        patch.object(triton.runtime.driver, "_active", driver),
    ):
        yield
