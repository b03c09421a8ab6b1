"""Trace a step for CUDA on a machine without CUDA: PyTorch's questions to a device are answered here.

Tracing runs nothing, but autograd asks which stream is current, ATen whether there is cuDNN, attention which device it
is on. A small library answers (cuda.cpp), compiled when it is first needed, and only while the step is traced.
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
from typing import Any
from unittest.mock import patch

import torch

from checkmate.capture.without_device.attention_choice import Attention, choose
from checkmate.memory.native import Source, Unbuildable
from checkmate.torch_internals.running import triton_utils

log = logging.getLogger("checkmate.capture")
CUDNN = 91900  # of the builds for CUDA 13 of PyTorch 2.11; taken where PyTorch was built without it
_CHOICE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
LIBRARY = Source(
    Path(__file__).with_name("cuda.cpp"),
    ("c10", "torch_cpu"),
    (("pretend", None, (_CHOICE, ctypes.c_long)), ("no_longer", None, ())),
)
_lock = threading.RLock()
_choices: list[Any] = []  # PyTorch keeps the address of the last one


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
    cudnn = torch.backends.cudnn.version() or CUDNN

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
