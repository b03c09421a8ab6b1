"""Trace ops as eager PyTorch runs them, where tracing takes decompositions or formulas with other bits.

AOTAutograd traces some ops through decompositions in Python whose results are close to those of the kernels, not equal:
a bilinear upsampling differs in the last bits of its gradient. While a step is captured these decompositions are set
aside, on every device; PyTorch then records the op itself and its own backward. Batch norm by cuDNN is decomposed too
and cannot be set aside here; see `cudnn`. Matrix products are decomposed as in C++, but for the choice between a
product of batches and one of matrices, which is made here as C++ makes it.

Of a few reductions autograd's formula depends on the data: whether a number is zero, or is none. Tensors that are
traced cannot be asked, and get a formula for all cases, which rounds differently or has minus zero where eager has
zero. Here the gradient of such an op is traced as one op, which leaves the choice to eager PyTorch's autograd when it
runs.

``torch.linalg.svdvals`` and its like compute vectors if the gradient needs them, by another routine of LAPACK, which
rounds otherwise. PyTorch assumes that a traced tensor may need a gradient (ATen's ``_may_require_fw_or_bw_grad`` says
yes to each subclass of a tensor); here the tensor itself is asked.

Under a mode of the dispatcher the ops that a kernel calls in C++ read a lazy conjugate as if it was none: pinv of a
complex matrix has other numbers there. AOTAutograd has such a mode around the first call of what it compiles, to look
at custom ops. Here it is left out.

The inverse of a short-time Fourier transform transposes real numbers in C++, after which autograd lays out the gradient
anew, and complex ones in Python. A batch of one matrix beside a batch of several is that matrix in C++ only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.fx import traceback

from checkmate.capture.patches.results.image_sizes import upsample
from checkmate.errors import Unsupported
from checkmate.torch_internals import capturing
from checkmate.torch_internals.capturing import decompositions
from checkmate.torch_internals.running import (
    DispatchKey,
    DispatchKeySet,
    TorchDispatchMode,
    _AutoDispatchBelowAutograd,
    _current_autograd_node,
    _DisablePythonDispatcher,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _engine_run_backward,
    _ForceDispatchKeyGuard,
    functorch,
    outside_tracing,
)

aten = torch.ops.aten
_DROPOUT, _ISTFT, _MATMUL = aten.dropout.default, aten.istft.default, aten.matmul.default
_WHERE = aten.where.ScalarOther
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_PREFIXES = (
    *("upsample_", "_upsample_", "multi_margin_loss", "multilabel_margin_loss_forward", "softshrink", "hardshrink"),
    *("rnn_tanh", "rnn_relu", "gru", "lstm", "broadcast_tensors", "unsafe_chunk"),
)
_OF_ALL = (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default)
_REDUCTIONS = {str(op): op for op in (*_OF_ALL, aten.prod.default, aten.prod.dim_int, aten.cumprod.default)}
_VALUES = {  # functions that give values only, or are computed from these
    *(torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.matrix_rank),
    *(torch.linalg.matrix_norm, torch.linalg.norm, torch.norm, torch.functional.norm, torch.nuclear_norm),
}
_WITH_VECTORS = {aten._linalg_svd.default: False, aten._linalg_eigh.default: "L"}  # by their second argument's default


def value_of(leaf: Any) -> Any:
    """The captured number behind a symbol of Dynamo's, without a guard on it; other values unchanged."""
    return leaf.node.hint if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) else leaf


@contextmanager
def eager_kernels(step: fx.GraphModule) -> Iterator[None]:
    """Within the block, a step of Dynamo's is traced to the ops, and later called with the bits, of eager PyTorch."""
    packets = [getattr(aten, name) for name in dir(aten) if name.startswith(_PREFIXES)]
    inexact = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    kernels = {op: {key: kernel for key, kernel in op.py_kernels.items() if key not in _KEYS} for op in inexact}
    for op in inexact:
        if op._overloadname == "vec":
            kernels[op] |= dict.fromkeys(_KEYS, partial(upsample, getattr(aten, op._schema.name[6:]).default))
    kernels[_DROPOUT] = {key: _dropout if key in _KEYS else kernel for key, kernel in _DROPOUT.py_kernels.items()}
    kernels[_ISTFT] = {key: partial(_istft, kernel) for key, kernel in _ISTFT.py_kernels.items()}
    kernels[_MATMUL] = {key: partial(_matmul, kernel) for key, kernel in _MATMUL.py_kernels.items()}
    kernels[_WHERE] = {**_WHERE.py_kernels, DispatchKey.CompositeImplicitAutograd: _where}
    described = [n.meta.get("example_value") for n in step.graph.nodes]
    is_complex = any(isinstance(value, Tensor) and value.is_complex() for value in described)
    for name, op in _REDUCTIONS.items():
        if op is aten.cumprod.default and not is_complex:  # the formula for all data has eager's bits
            continue
        kernels[op] = {**op.py_kernels, DispatchKey.Autograd: partial(_reduce, name)}
    before = {op: dict(op.py_kernels) for op in kernels}
    try:
        _set(kernels)
        with (
            patch.object(decompositions, "should_fold", _folds),
            patch.object(capturing._FirstInvocationContext, "__init__", _look_at_no_call),
        ):
            yield
    finally:
        _set(before)


def _look_at_no_call(self: Any) -> None:
    self._is_first = False


def _set(kernels: Mapping[Any, Mapping[Any, Callable[..., Any]]]) -> None:
    for op, by_key in kernels.items():
        op.py_kernels.clear()
        op.py_kernels.update(by_key)
        op._dispatch_cache.clear()


def _dropout(x: Tensor, p: float, train: bool | None) -> Tensor:
    """Drop out as eager PyTorch does: the tensor itself at p = 0, a product without a draw at p = 1."""
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    if x.is_complex():  # decomposed with other draws than the kernel's
        return x * torch.empty_like(x, dtype=x.dtype.to_real()).bernoulli_(1 - p).div_(1 - p)
    return decompositions.dropout(x, p, train)


def _istft(decomposed: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Transpose by real numbers, as the kernel does: autograd then lays out the gradient anew."""
    real = torch.view_as_real(x.resolve_conj()).transpose(-3, -2)
    return decomposed(torch.view_as_complex(real).transpose(-2, -1), *args, **kwargs)


def _matmul(decomposed: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Multiply as C++ does, which takes a batch of one matrix, beside a batch of several, for that matrix."""
    if x.dim() == y.dim() == 3 and (x.shape[0] == 1) != (y.shape[0] == 1):
        x, y = (x.squeeze(0), y) if x.shape[0] == 1 else (x, y.squeeze(0))
    return decomposed(x, y)


def _where(mask: Tensor, x: Tensor, other: float) -> Tensor:
    """Fill with a number where the mask is false; for the gradient of `masked_fill`'s value, select where it is true.

    Autograd sums the result. Of tensors that are traced, and within ``torch.func``, it sums zeros with the others.
    """
    node, caller = _current_autograd_node(), sys._getframe().f_back  # none on the engine's own thread
    by_formula = caller is None or caller.f_code is _engine_run_backward.__code__  # not by a hook
    is_of_value = node is not None and node.name() == "MaskedFillBackward1" and by_formula
    if not is_of_value or functorch.maybe_current_level() is not None:
        return _WHERE._op_dk(DispatchKey.CompositeImplicitAutograd, mask, x, other)
    mask, x = torch.broadcast_tensors(mask, x)
    return aten.index(x, [mask])


class _Products(TorchDispatchMode):
    """Records which batched products run."""

    folded = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.folded = self.folded and op is not aten.bmm.default
        return op(*args, **(kwargs or {}))


def _folds(x: Tensor, y: Tensor, is_out: bool) -> bool:
    """Tell whether a batched product calls the kernel for one matrix, which depends on PyTorch's version."""
    # Have it multiply tensors of these shapes and strides without data, which need gradients as these do.
    as_at_first = _ForceDispatchKeyGuard(
        DispatchKeySet(DispatchKey.BackendSelect), DispatchKeySet(DispatchKey.Undefined)
    )
    with outside_tracing(), as_at_first, _Products() as seen:  # also if the kernel of another op multiplies
        described = []
        for t in (x, y):
            needs = t.requires_grad and not is_out  # said here, as torch.func refuses requires_grad_()
            options: dict[str, Any] = {"dtype": t.dtype, "device": "meta", "requires_grad": needs}
            shape, strides = (list(map(value_of, numbers)) for numbers in (t.shape, t.stride()))
            described.append(torch.empty_strided(shape, strides, **options))
        torch.matmul(*described)
    return seen.folded


@torch.library.custom_op("checkmate::gradient", mutates_args=())
def gradient(op: str, grad: Tensor, x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """The gradient with respect to ``x`` of a reduction over ``dims``, or all, from its result's gradient.

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
        (result,) = torch.autograd.grad(_call(op, leaf, dims, keepdim, dtype), leaf, grad)
    return _empty(op, x).copy_(result)


@gradient.register_fake
def _describe(op: str, grad: Tensor, x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return _empty(op, x)


def _empty(op: str, x: Tensor) -> Tensor:
    strides = torch.contiguous_format if _REDUCTIONS[op] in _OF_ALL else torch.preserve_format
    return torch.empty_like(x, memory_format=strides)


def _call(op: str, x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    options: dict[str, Any] = {"keepdim": keepdim} if keepdim else {}
    if dtype is not None:
        options["dtype"] = dtype
    return _REDUCTIONS[op](x, *dims, **options)


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, x: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.called = op, options
        with _AutoDispatchBelowAutograd():
            return _call(op, x, *options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, options = ctx.called
        return None, gradient(op, grad, *ctx.saved_tensors, *options), None, None, None


def _reduce(op: str, x: Tensor, *dims: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    if functorch.maybe_current_level() is not None:
        raise Unsupported(
            f"Within torch.func the gradient of {op} cannot be captured: PyTorch picks its formula by the data. Write "
            "it by other ops: x.amax() for x.max(), x.amin() for x.min(), x.flatten().median(0).values for x.median()."
        )
    return _Reduction.apply(op, x, [*dims[:1]], keepdim or dims[1:] == (True,), dtype)


def without_vectors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op, so that it computes no vectors if eager PyTorch computes none."""
    if op not in _WITH_VECTORS or (args[0].requires_grad and torch.is_grad_enabled()):
        return args
    stack = traceback.get_current_meta().get("source_fn_stack") or [("", None)]
    second = args[1] if len(args) > 1 else _WITH_VECTORS[op]
    return (args[0], second, False) if stack[-1][1] in _VALUES else args
