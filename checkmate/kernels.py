"""Keep tracing to the kernels that eager PyTorch runs.

AOTAutograd traces some ops through decompositions in Python whose results are close to those of the kernels, not equal:
a bilinear upsampling differs in the last bits of its gradient. While a step is captured these decompositions are set
aside; PyTorch then records the op itself and its own backward. None of them is peculiar to the CPU: they take the place
of the kernels of every device. Batch norm by cuDNN is decomposed too and cannot be set aside here; see `cudnn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_PREFIXES = (
    "upsample_",
    "_upsample_",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "softshrink",
    "hardshrink",
)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Within the block, ops that tracing would decompose inexactly are traced as themselves."""
    set_aside = {op: {key: op.py_kernels[key] for key in _KEYS if key in op.py_kernels} for op in _inexact()}
    try:
        for op, kernels in set_aside.items():
            for key in kernels:
                del op.py_kernels[key]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in set_aside.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _inexact() -> list[torch._ops.OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_PREFIXES)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
