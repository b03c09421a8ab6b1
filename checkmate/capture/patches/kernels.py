"""Set aside decompositions in Python while a step is traced: their bits are not those of eager PyTorch's kernels.

AOTAutograd traces some ops through decompositions in Python whose results are close to those of the kernels, not equal:
a bilinear upsampling differs in the last bits of its gradient. While a step is captured these decompositions are set
aside; PyTorch then records the op itself and its own backward. None of them is peculiar to the CPU: they take the place
of the kernels of every device. Batch norm by cuDNN is decomposed too and cannot be set aside here; see `cudnn`. Matrix
products are decomposed as in C++, which takes no tensor that is traced as it takes others, but for the choice between a
product of batches and one of matrices, which is made here as C++ makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from checkmate.torch_internals.descriptions import decompositions
from checkmate.torch_internals.dispatcher import DispatchKey, TorchDispatchMode, outside_tracing

_DROPOUT = torch.ops.aten.dropout.default
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_PREFIXES = (
    *("upsample_", "_upsample_", "multi_margin_loss", "multilabel_margin_loss_forward", "softshrink", "hardshrink"),
    *("rnn_tanh", "rnn_relu", "gru", "lstm", "broadcast_tensors", "unsafe_chunk"),
)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Within the block, ops that tracing would decompose inexactly are traced as themselves."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_PREFIXES)]
    inexact = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    kept = {op: {key: one for key, one in op.py_kernels.items() if key not in _KEYS} for op in inexact}
    dropout = {key: _dropout if key in _KEYS else one for key, one in _DROPOUT.py_kernels.items()}
    with kernels_in_python({**kept, _DROPOUT: dropout}), patch.object(decompositions, "should_fold", _folds):
        yield


@contextmanager
def kernels_in_python(kernels: Mapping[Any, Mapping[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Within the block, ops have these kernels in Python and no others, each by its dispatch key."""
    before = {op: dict(op.py_kernels) for op in kernels}
    try:
        _set(kernels)
        yield
    finally:
        _set(before)


def _set(kernels: Mapping[Any, Mapping[Any, Callable[..., Any]]]) -> None:
    for op, by_key in kernels.items():
        op.py_kernels.clear()
        op.py_kernels.update(by_key)
        op._dispatch_cache.clear()


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """Drop out as eager PyTorch: the tensor itself at p = 0, a product without a draw at p = 1."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    if x.is_complex():  # decomposed with other draws than the kernel's
        return x * torch.empty_like(x, dtype=x.dtype.to_real()).bernoulli_(1 - p).div_(1 - p)
    return decompositions.dropout(x, p, train)


class _Products(TorchDispatchMode):
    """Sees which products of batches run."""

    folded = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.folded = self.folded and op is not torch.ops.aten.bmm.default
        return op(*args, **(kwargs or {}))


def _folds(x: torch.Tensor, y: torch.Tensor, is_out: bool) -> bool:
    """Tell whether a product of batches calls the kernel for one matrix: asked of the running version, without data.

    It depends on shapes, on strides, and on whether the smaller one needs a gradient, in each version otherwise.
    """
    with outside_tracing(), _Products() as seen:
        described = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (x, y)]
        for meta, tensor in zip(described, (x, y), strict=True):
            meta.requires_grad_(tensor.requires_grad and not is_out)
        torch.matmul(*described)
    return seen.folded
