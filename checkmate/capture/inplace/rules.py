"""Table of ops that can write their result over an argument, and how to call them to do so.

Only variants that need no second copy are here: some of PyTorch's ``out=`` are generated, and fill a new tensor that
they then copy. What computes each element from the same element of its arguments may write over these on any device, as
PyTorch documents for ``out=``. The others are for the CPU only; some of these run block by block, in more time
(`kernels`).

That bits are equal is tried, for each shape, layout and type, when costs are measured (`checkmate.profiling`). Whether
the argument may go is another question (`aliasing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.inplace import kernels
from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.capture.nodes import PlannedOp

aten = torch.ops.aten


@dataclass(frozen=True)
class Written:
    """A call of an op that writes its first result over one of its arguments.

    >>> Written(aten.exp.out, (0,)).out
    'out'
    """

    into: Callable[..., Any]  # the op's variant, or a function of ours
    positions: tuple[int, ...]  # of the arguments that it may write over
    out: str | None = "out"  # keyword of its output tensor; None: it writes over its first argument
    pointwise: bool = True  # each element is made of the same element of the arguments: it holds on any device
    block: Callable[..., int | None] | None = None  # of the op's arguments: it runs block by block, of these bytes

    @property
    def slower(self) -> bool:
        """Tell whether it takes longer than the plain op."""
        return self.block is not None


_UNARY = (
    *("abs", "ceil", "cos", "cosh", "elu", "erf", "erfc", "exp", "exp2", "expm1", "floor", "gelu", "hardsigmoid"),
    *("hardswish", "hardtanh", "leaky_relu", "log", "log1p", "log2", "mish", "neg", "reciprocal", "round", "rsqrt"),
    *("sgn", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square", "tan", "tanh"),
)
_BINARY = ("add", "div", "mul", "sub")  # also with a number, which ``mul_`` rounds to half precision before
_OF_GRADIENT_AND_ONE_MORE = (
    *("gelu", "hardsigmoid", "hardtanh", "leaky_relu", "sigmoid", "silu", "softplus", "tanh", "threshold"),
)
_OF_LOSS = ("binary_cross_entropy", "mse_loss", "smooth_l1_loss")  # gradient: of one number, or of each term
# Backwards that read nothing but the shape of their second argument: they add to a gradient of zeros.
_OF_SHAPE = ("avg_pool2d", "max_pool2d_with_indices", "nll_loss", "nll_loss2d")


def _backward(name: str) -> tuple[Any, Any]:
    packet = getattr(aten, f"{name}_backward")
    return packet.default, packet.grad_input


TABLE: Mapping[Any, Written] = {
    **{getattr(aten, name).default: Written(getattr(aten, name).out, (0,)) for name in _UNARY},
    **{getattr(aten, name).Tensor: Written(getattr(aten, name).out, (0, 1)) for name in _BINARY},
    **{getattr(aten, name).Scalar: Written(getattr(aten, name).out, (0,)) for name in _BINARY},
    **{getattr(aten, name).default: Written(getattr(aten, name).out, (0, 1)) for name in ("maximum", "minimum")},
    aten.relu.default: Written(aten.relu_.default, (0,), None),
    aten.selu.default: Written(aten.selu_.default, (0,), None),
    **{op: Written(into, (0, 1), "grad_input") for op, into in map(_backward, _OF_GRADIENT_AND_ONE_MORE)},
    **{op: Written(into, (0, 1, 2), "grad_input") for op, into in map(_backward, _OF_LOSS)},
    aten.addcdiv.default: Written(aten.addcdiv.out, (0, 1, 2)),
    aten.addcmul.default: Written(aten.addcmul.out, (0, 1, 2)),
    aten.clamp.default: Written(aten.clamp.out, (0,)),
    aten.clamp_max.default: Written(aten.clamp_max.out, (0,)),
    aten.clamp_min.default: Written(aten.clamp_min.out, (0,)),
    aten.clone.default: Written(kernels.take_over, (0,)),
    aten.div.Tensor_mode: Written(aten.div.out_mode, (0, 1)),
    aten.elu_backward.default: Written(aten.elu_backward.grad_input, (0, 5), "grad_input"),
    aten.lerp.Scalar: Written(aten.lerp.Scalar_out, (0, 1)),
    aten.lerp.Tensor: Written(aten.lerp.Tensor_out, (0, 1, 2)),
    aten.log_sigmoid_backward.default: Written(aten.log_sigmoid_backward.grad_input, (0, 1), "grad_input"),
    aten.masked_fill.Scalar: Written(aten.masked_fill_.Scalar, (0,), None),
    aten.masked_fill.Tensor: Written(aten.masked_fill_.Tensor, (0,), None),
    aten.pow.Tensor_Scalar: Written(aten.pow.Tensor_Scalar_out, (0,)),
    aten.pow.Tensor_Tensor: Written(aten.pow.Tensor_Tensor_out, (0, 1)),
    aten.rsub.Scalar: Written(kernels.rsub_over, (0,)),
    aten.where.self: Written(aten.where.self_out, (1, 2)),
    # by rows, channels or windows
    **{op: Written(into, (1,), "grad_input", False) for op, into in map(_backward, _OF_SHAPE)},
    aten._native_batch_norm_legit_functional.default: Written(kernels.batch_norm_over, (0,), pointwise=False),
    aten.native_batch_norm_backward.default: Written(
        kernels.batch_norm_backward_over, (0, 1), pointwise=False, block=kernels.batch_norm_block
    ),
    aten.convolution.default: Written(kernels.convolution_over, (0,), pointwise=False, block=kernels.convolution_block),
    aten.convolution_backward.default: Written(
        kernels.convolution_backward_over, (0, 1), pointwise=False, block=kernels.convolution_backward_block
    ),
    convolution_backward_input: Written(
        kernels.convolution_backward_input_over, (0,), pointwise=False, block=kernels.convolution_backward_input_block
    ),
    aten._safe_softmax.default: Written(kernels.safe_softmax_over, (0,), pointwise=False),
    aten._softmax.default: Written(aten._softmax.out, (0,), pointwise=False),
    aten._log_softmax.default: Written(aten._log_softmax.out, (0,), pointwise=False),
    aten._softmax_backward_data.default: Written(aten._softmax_backward_data.out, (0, 1), "grad_input", False),
    aten._log_softmax_backward_data.default: Written(aten._log_softmax_backward_data.out, (0, 1), "out", False),
}


def written_of(target: Any) -> Written | None:
    """The in-place call of an op over an argument, from the table or the op itself; None if there is none."""
    if isinstance(target, PlannedOp):
        return Written(target, target.out) if target.out else None
    return TABLE.get(target) or getattr(target, "written", None)


def positions(node: fx.Node) -> tuple[int, ...]:
    """The arguments that a node's op could write its first result over, by its tensors."""
    return tuple(i for i in positions_to_try(node) if is_whole(node.args[i]))


def positions_to_try(node: fx.Node) -> tuple[int, ...]:
    """The arguments to try, by types, shapes and strides, also if one is a part of its memory.

    Only floats are written over: they are what is large, and what a trial has made-up numbers for.
    """
    written, result = written_of(node.target), first_result(node)
    if written is None or result is None or not (written.pointwise or result.device.type == "cpu"):
        return ()
    if written.block is not None and block_bytes(node) is None:
        return ()
    return tuple(i for i in written.positions if i < len(node.args) and is_alike(node.args[i], result))


def block_bytes(node: fx.Node) -> int | None:
    """Bytes per block, for an op that runs in place block by block; else None."""
    written = written_of(node.target)
    block = None if written is None else written.block
    return None if block is None else block(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))


def first_result(node: fx.Node) -> torch.Tensor | None:
    """The first fake result of a node, or its only one."""
    val = node.meta.get("val")
    first = val[0] if isinstance(val, (tuple, list)) and val else val
    return first if isinstance(first, torch.Tensor) else None


def is_alike(argument: Any, result: torch.Tensor) -> bool:
    """Tell whether an argument is dense in memory, with the layout of the result."""
    a = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if not isinstance(a, torch.Tensor) or a.layout is not torch.strided or result.layout is not torch.strided:
        return False
    wanted = result.dtype, result.shape, result.stride(), result.device
    if not result.is_floating_point() or (a.dtype, a.shape, a.stride(), a.device) != wanted:
        return False
    return not a.is_conj() and not a.is_neg() and bool(aten.is_non_overlapping_and_dense(a))


def is_whole(argument: Any) -> bool:
    """Tell whether an argument covers all of its memory exactly once."""
    a = argument.meta["val"]
    return bool(a.untyped_storage().nbytes() == a.numel() * a.element_size())


def call_over(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> tuple[Any, Any, Any]:
    """Target, arguments and keywords of the in-place call over one of the arguments.

    >>> x = torch.tensor([-1.0, 2.0])
    >>> target, args, kwargs = call_over(aten.relu.default, (x,), {}, 0)
    >>> target(*args, **kwargs) is x, x
    (True, tensor([0., 2.]))
    """
    written = written_of(target)
    assert written is not None
    return written.into, args, kwargs if written.out is None else {**kwargs, written.out: args[position]}
