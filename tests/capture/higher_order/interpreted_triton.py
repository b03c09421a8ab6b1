"""Kernels of Triton's on the CPU: captured as on a GPU, and run by Triton's interpreter, plainly and compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, _patch_lang
from triton.runtime.jit import JITFunction

from checkmate.capture.without_device.cuda import triton_for

CAPABILITY = 9, 0


@contextmanager
def interpreted() -> Iterator[list[str]]:
    """Within the block a launch runs by the interpreter. Gives the names of the kernels that have run."""
    ran: list[str] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        ran.append(self.fn.__name__)
        # The interpreter holds the arguments in cycles. They are young as long as nothing else is collected, and to
        # look for them among all objects of a process with many tests takes longer than the kernel.
        collects = gc.isenabled()
        gc.disable()
        try:
            _interpreted(self).run(*args, **options)
        finally:
            if collects:
                gc.enable()
        gc.collect(0)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        scope = _patch_lang(self.fn)  # which Triton's own call leaves in place, so that nothing compiles any more
        try:
            return _interpreted(self).rewrite()(*args, **options)
        finally:
            scope.restore()

    def index_by_item(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)  # Triton 3.6 takes an array of one element for a number, which NumPy 2.4 refuses
        tensor.__index__ = lambda self: self.handle.data.item()

    plain = interpreter._patch_lang_tensor
    called = patch.object(JITFunction, "run", run), patch.object(JITFunction, "__call__", call)
    with triton_for(CAPABILITY), called[0], called[1], patch.object(interpreter, "_patch_lang_tensor", index_by_item):
        yield ran


def _interpreted(kernel: Any) -> Any:
    return InterpretedFunction(kernel.fn)
