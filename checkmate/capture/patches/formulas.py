"""Give captured gradients of a few reductions the formula that eager PyTorch picks by the data.

Of a few reductions autograd's formula depends on the data: it asks whether a number is zero, or is none, and goes on
accordingly. Of tensors that are traced it cannot ask, and takes a formula for all cases, which rounds differently or
has minus zero where eager has zero. While a step is captured, the gradient of such an op is traced as one op, which
leaves the choice to eager PyTorch's autograd when it runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkmate.capture.patches.kernels import kernels_in_python
from checkmate.torch_internals.dispatcher import (
    DispatchKey,
    DispatchKeySet,
    _AutoDispatchBelowAutograd,
    _DisablePythonDispatcher,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)

aten = torch.ops.aten
_OF_ALL = (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default)
_OPS = {str(op): op for op in (*_OF_ALL, aten.prod.default, aten.prod.dim_int)}


@torch.library.custom_op("checkmate::gradient", mutates_args=())
def gradient(op: str, grad: Tensor, x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """The gradient with respect to ``x`` of a reduction over ``dims``, or over all, given that of its result.

    Args:
        op: its name, such as ``aten.prod.dim_int``.
        grad: in the shape and type of the result.
        dims, keepdim, dtype: with which it was called. ``dims`` has at most one element.
    """
    by_autograd = DispatchKeySet(DispatchKey.AutogradFunctionality) | DispatchKeySet(DispatchKey.ADInplaceOrView)
    included, excluded = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()
    as_called = _ForceDispatchKeyGuard(included, excluded - by_autograd)
    with as_called, _DisablePythonDispatcher(), torch.enable_grad():  # it runs while a step is captured, too
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(_call(op, leaf, dims, keepdim, dtype), leaf, grad)
    return _empty(op, x).copy_(found)


@gradient.register_fake
def _describe(op: str, grad: Tensor, x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return _empty(op, x)


def _empty(op: str, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format if _OPS[op] in _OF_ALL else torch.preserve_format)


def _call(op: str, x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    options: dict[str, Any] = {"keepdim": keepdim} if dims else {}
    if dtype is not None:
        options["dtype"] = dtype
    result: Tensor = _OPS[op](x, *dims, **options)
    return result


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, x: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.called = op, rest
        with _AutoDispatchBelowAutograd():
            return _call(op, x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, rest = ctx.called
        return None, gradient(op, grad, *ctx.saved_tensors, *rest), None, None, None


def eager_formulas() -> AbstractContextManager[None]:
    """Within the block, the gradients of these reductions are traced as ops that choose their formula when they run."""
    key = DispatchKey.Autograd
    return kernels_in_python({op: {**op.py_kernels, key: partial(_reduce, name)} for name, op in _OPS.items()})


def _reduce(op: str, x: Tensor, *dims: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    result: Tensor = _Reduction.apply(op, x, [*dims[:1]], keepdim or dims[1:] == (True,), dtype)
    return result
