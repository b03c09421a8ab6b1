"""Keep tracing to the kernels that eager PyTorch runs.

AOTAutograd traces some ops through decompositions in Python whose results are close to those of the kernels, not equal:
a bilinear upsampling differs in the last bits of its gradient. While a step is captured these decompositions are set
aside; PyTorch then records the op itself and its own backward. None of them is peculiar to the CPU: they take the place
of the kernels of every device. Batch norm by cuDNN is decomposed too and cannot be set aside here; see `cudnn`. Matrix
products are decomposed as in C++, which takes no tensor that is traced as it takes others, but for one mistake, mended
here: it chose another kernel for a vector times a batch.

Dynamo takes some ops apart before that, so that a number they take may be a tensor: ``addcdiv`` with a ``value``
becomes a quotient, a product and a sum. Importing this module has it leave them whole in what our backends capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from checkmate.capture.patches.is_compiling import answer_of

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
    decompositions.should_fold = _folds  # type: ignore[assignment]
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
    """Where nothing is dropped eager PyTorch gives the tensor itself, and tracing a copy in other strides."""
    return decompositions.dropout(x, p, train) if train and p != 0 else x


def _folds(x: torch.Tensor, y: torch.Tensor, is_out: bool) -> bool:
    """Whether a product of batches calls the kernel for one matrix: eager asks for the strides of y transposed."""
    return bool(_should_fold(x, y if x.ndim >= y.ndim else y.mT, is_out))


def _whole(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's handler of a function or method that it takes apart, but for what our backends capture."""

    @wraps(handler)
    def handled(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(self, tx, *args, **kwargs) if answer_of(tx.output.compiler_fn) is None else None

    return handled


def _install() -> None:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function in handlers.keys() & {torch.addcdiv, torch._foreach_lerp_, torch._foreach_pow}:
        handlers[function] = _whole(handlers[function])
    for method in {"method_add_", "method_addcmul_", "method_addcdiv_"} & {*dir(TensorVariable)}:
        setattr(TensorVariable, method, _whole(getattr(TensorVariable, method)))


def _inexact() -> list[torch._ops.OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_PREFIXES)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


_install()
