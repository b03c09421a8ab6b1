"""Keep tracing to the kernels that eager PyTorch runs.

AOTAutograd traces some ops through decompositions in Python whose results are close to those of the kernels, not equal:
a bilinear upsampling differs in the last bits of its gradient. While a step is captured these decompositions are set
aside; PyTorch then records the op itself and its own backward. None of them is peculiar to the CPU: they take the place
of the kernels of every device. Batch norm by cuDNN is decomposed too and cannot be set aside here; see `cudnn`. Matrix
products are decomposed as in C++, which takes no tensor that is traced as it takes others, but for the choice between a
product of batches and one of matrices, which is made here as C++ makes it.

Dynamo takes some ops apart before that, so that a number they take may be a tensor: ``addcdiv`` with a ``value``
becomes a quotient, a product and a sum. Importing this module has it leave them whole in what our backends capture, and
pass over ``torch.backends.cudnn.flags(...)``, which it does not know, where nothing is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from checkmate.capture.patches.is_compiling import answer_of
from checkmate.torch_internals.descriptions import decompositions
from checkmate.torch_internals.dispatcher import (
    DispatchKey,
    OpOverload,
    TorchDispatchMode,
    _disable_current_modes,
    _DisablePythonDispatcher,
)
from checkmate.torch_internals.dynamo import NullContextVariable, TorchInGraphFunctionVariable, wrap_tensor_method
from checkmate.torch_internals.kernels import _foreach_lerp_, _foreach_pow
from checkmate.torch_internals.names import put_in_place

_should_fold = decompositions.should_fold
_DROPOUT = torch.ops.aten.dropout.default
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_PREFIXES = (
    "upsample_",
    "_upsample_",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "softshrink",
    "hardshrink",
    "rnn_tanh",
    "rnn_relu",
    "gru",
    "lstm",
    "broadcast_tensors",
    "unsafe_chunk",
)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Within the block, ops that tracing would decompose inexactly are traced as themselves."""
    set_aside = {
        op: {key: op.py_kernels[key] for key in _KEYS if key in op.py_kernels} for op in (*_inexact(), _DROPOUT)
    }
    decompositions.should_fold = _folds
    try:
        for op, kernels in set_aside.items():
            for key in kernels:
                del op.py_kernels[key]
            op._dispatch_cache.clear()
        _DROPOUT.py_kernels.update(dict.fromkeys(set_aside[_DROPOUT], _dropout))
        yield
    finally:
        decompositions.should_fold = _should_fold
        for op, kernels in set_aside.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """Where nothing is dropped, eager PyTorch gives the tensor itself; where all is, a product, without a draw."""
    if not train or p == 0 or x.numel() == 0:
        return x
    return x * torch.zeros((), dtype=x.dtype, device=x.device) if p == 1 else decompositions.dropout(x, p, train)


class _Products(TorchDispatchMode):
    """Sees which products of batches run."""

    folded = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.folded = self.folded and op is not torch.ops.aten.bmm.default
        return op(*args, **(kwargs or {}))


def _folds(x: torch.Tensor, y: torch.Tensor, is_out: bool) -> bool:
    """Whether a product of batches calls the kernel for one matrix: asked of the running version, without data.

    It depends on shapes, on strides, and on whether the smaller one needs a gradient, in each version otherwise.
    """
    with _disable_current_modes(), _DisablePythonDispatcher(), _Products() as seen:
        described = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (x, y)]
        for meta, tensor in zip(described, (x, y), strict=True):
            meta.requires_grad_(tensor.requires_grad and not is_out)
        torch.matmul(*described)
    return seen.folded


def _whole(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's handler of a function or method that it takes apart, but for what our backends capture."""

    @wraps(handler)
    def handled(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = answer_of(tx.output.compiler_fn) is not None
        return None if is_ours or handler is None else handler(self, tx, *args, **kwargs)

    return handled


def _no_flags(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's call of ``torch.backends.cudnn.flags``; None: it is refused, as the kernels run later, without them."""
    described = [n.meta.get("example_value") for n in tx.output.graph.nodes]
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in described)
    return None if on_gpu or answer_of(tx.output.compiler_fn) is None else NullContextVariable()


def _dropout_of_nothing(self: Any, tx: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's call of dropout: of no elements it is the tensor itself, of a type that has no draws, too; else None."""
    x = kwargs.get("input", x)
    if x is None or answer_of(tx.output.compiler_fn) is None or not x.is_tensor() or not x.realize().valid_size():
        return None
    return x if any(type(n) is int and n == 0 for n in x.realize().size) else None


def _inexact() -> list[OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_PREFIXES)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _install() -> None:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    handlers |= dict.fromkeys((torch.dropout, torch.nn.functional.dropout), _dropout_of_nothing)
    for function in handlers.keys() & {torch.addcdiv, _foreach_lerp_, _foreach_pow}:
        handlers[function] = _whole(handlers[function])
    handlers[torch.backends.cudnn.flags] = _no_flags
    for method in ("add_", "addcmul_", "addcdiv_"):
        wrap_tensor_method(method, _whole)


put_in_place("kernels of eager PyTorch", _install)
