"""Ops on images and signals whose sizes are symbols, where PyTorch traces them in C++, which asks for numbers.

An upsampling is traced as the kernel that C++ calls, with the sizes that C++ computes, and its gradient is described by
the size that it is given. A pooling of signals is one of images that have one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from checkmate.torch_internals.capturing import (
    FakeTensorMode,
    decompositions,
    meta_table,
    register_op_impl,
    suggest_memory_format,
)
from checkmate.torch_internals.names import put_in_place
from checkmate.torch_internals.running import DispatchKey

aten = torch.ops.aten
_GRID = aten.affine_grid_generator.default
_POOL, _POOL_WITH_INDICES = aten.max_pool1d.default, aten.max_pool1d_with_indices.default
_IN_THE_FORMAT = {aten.upsample_bilinear2d_backward.default, aten.upsample_trilinear3d_backward.default}
_CONTIGUOUS = {
    *(aten.upsample_linear1d_backward.default, aten.upsample_bicubic2d_backward.default),
    *(aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default),
    *(aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default),
    aten._upsample_bicubic2d_aa_backward.default,
}


def upsample(op: Any, x: Tensor, sizes: Sequence[Any] | None, *options: Any) -> Tensor:
    """Upsample by the kernel ``op`` to ``sizes``, or by factors, which are the last argument."""
    *aligned, factors = options
    return op(x, decompositions.upsample_compute_output_size(x.shape, sizes, factors), *aligned, *(factors or ()))


def _describe_gradient(
    mode: FakeTensorMode, op: Any, grad: Tensor, sizes: Sequence[Any], shape: Sequence[Any], *_: Any
) -> Tensor:
    """The fake gradient of an upsampling's input, in the strides of the kernel's."""
    strides = suggest_memory_format(grad) if op in _IN_THE_FORMAT else torch.contiguous_format
    with mode:
        return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=strides)


def _describe_grid(mode: FakeTensorMode, op: Any, theta: Tensor, size: Sequence[Any], aligned: bool) -> Tensor:
    """The fake grid of an affine map."""
    with mode:
        return theta.new_empty([size[0], *size[2:], len(size) - 2])


def _pool_with_indices(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest of each window of signals, and where they are."""
    rows = (1, *window), (1, *(stride or window)), (0, *padding), (1, *dilation)
    largest, indices = aten.max_pool2d_with_indices(x.unsqueeze(-2), *rows, ceil)
    return largest.squeeze(-2), indices.squeeze(-2)


def _install() -> None:
    for op in _IN_THE_FORMAT | _CONTIGUOUS:
        register_op_impl(op)(_describe_gradient)
    register_op_impl(_GRID)(_describe_grid)
    meta_table.setdefault(_GRID, _describe_grid)  # else it is described by its decomposition
    _POOL_WITH_INDICES.py_impl(DispatchKey.CompositeImplicitAutograd)(_pool_with_indices)
    _POOL.py_impl(DispatchKey.CompositeImplicitAutograd)(lambda *args: _pool_with_indices(*args)[0])


put_in_place("sizes of images that change", _install)
