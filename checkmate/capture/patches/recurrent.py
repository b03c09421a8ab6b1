"""`nn.RNN`, `nn.GRU` and `nn.LSTM`, captured as the ops and kernels that eager PyTorch runs.

Dynamo captures them only if told to. `nn.RNN` and `nn.GRU` are then made of the ops that eager PyTorch runs on the CPU,
and so is `nn.LSTM` with projections. Else each layer and direction of `nn.LSTM` is one kernel of oneDNN, which leaves a
workspace for its backward. PyTorch describes it as one of no bytes, and the gradients of the two biases as one tensor.
Here the kernel itself is asked how many bytes there are, once for each shape. It leaves no workspace where gradients
are not enabled, which the code of a plan runs without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkmate.torch_internals.capturing import (
    FakeTensorMode,
    dynamo_config,
    mkldnn_rnn_layer,
    mkldnn_rnn_layer_backward,
    register_op_impl,
)
from checkmate.torch_internals.names import put_in_place
from checkmate.torch_internals.running import _AutoDispatchBelowAutograd, outside_tracing, tree_flatten, tree_unflatten

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_NO_KERNEL = "could not create a primitive descriptor"


def with_recurrent_modules(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.compile`, called for capture, that captures recurrent modules too."""

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        with dynamo_config.patch(allow_rnn=True):
            return run(*args, **kwargs)

    return running


def lstm_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A layer of an LSTM in one direction: output, hidden state, cell state, workspace. Invisible to autograd."""
    with torch.enable_grad(), _AutoDispatchBelowAutograd():
        return LAYER(*args, **kwargs)


def _describe(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The fake results of one layer: output, hidden state, cell state, workspace."""
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(n, torch.SymInt) for leaf in leaves if isinstance(leaf, Tensor) for n in leaf.shape):
        raise RuntimeError("oneDNN tells how large the workspace of an LSTM is for given sizes only")
    described = tuple(_Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    size = _workspace_bytes(described, spec)
    with mode:
        *results, empty = mkldnn_rnn_layer(*args, **kwargs)
        return *results, empty.new_empty(size)


def _describe_backward(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The fake gradients of a layer's input, four weights and two states; those of its biases are two tensors.

    The kernel computes all of them in single precision, which PyTorch 2.13 knows.
    """
    with mode:
        gradients = mkldnn_rnn_layer_backward(*args, **kwargs)
        return tuple(gradient.new_empty(gradient.shape, dtype=torch.float32) for gradient in gradients)


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


@cache
def _workspace_bytes(described: tuple[Any, ...], spec: Any) -> int:
    with outside_tracing():
        leaves = [torch.zeros(x.shape, dtype=x.dtype, device="cpu") if isinstance(x, _Shape) else x for x in described]
        args, kwargs = tree_unflatten(leaves, spec)
        try:
            return int(lstm_layer(*args, **kwargs)[3].nbytes)
        except RuntimeError as error:
            if _NO_KERNEL not in str(error):
                raise
            return 0  # Dynamo asks all the same; what is then captured are the ops that eager PyTorch runs instead


def _install() -> None:
    register_op_impl(LAYER)(_describe)
    register_op_impl(torch.ops.aten.mkldnn_rnn_layer_backward.default)(_describe_backward)


put_in_place("nn.LSTM", _install)
