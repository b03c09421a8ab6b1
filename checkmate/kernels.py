"""Keep tracing to the kernels that eager PyTorch runs.

AOTAutograd traces some ops through decompositions in Python whose results are close to those of the kernels, not equal:
a bilinear upsampling differs in the last bits of its gradient. While a step is captured these decompositions are set
aside; PyTorch then records the op itself and its own backward. None of them is peculiar to the CPU: they take the place
of the kernels of every device. Batch norm by cuDNN is decomposed too and cannot be set aside here; see `cudnn`.

Batch norm on the CPU lays its result out in the memory format that its input suggests, the fake one in the strides of
its input. Of a transposed input a program, and every op after it, then saw strides that no run has: one that asks
`Tensor.is_contiguous` took the other branch. Importing this module mends PyTorch's rule, for the process: a backend is
called when Dynamo has traced already.

Recurrent modules Dynamo captures only if told to. `nn.RNN` is then made of the ops that eager PyTorch runs on the CPU,
and gives their bits. `nn.GRU` does not: eager applies its gates in place, to rows that lie apart, a functional graph to
new tensors. `nn.LSTM` is one kernel of oneDNN, whose workspace tracing does not know. The backend refuses these two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch._dynamo.exc import Unsupported
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

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


def with_recurrent_modules(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.compile` that captures recurrent modules too, for its backend to judge.

    Told to only where a capture has met one, since a change of Dynamo's configuration costs time at each call.
    """

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Unsupported as error:
            if "RNN, GRU, or LSTM" not in str(error):
                raise
        with torch._dynamo.config.patch(allow_rnn=True):
            return run(*args, **kwargs)

    return running


def _inexact() -> list[torch._ops.OpOverload]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_PREFIXES)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _in_the_layout_of_the_kernel(helper: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of every batch norm, which gives the fake results too, with the strides of the CPU's kernel."""

    @wraps(helper)
    def normalized(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, *statistics = helper(x, *args, **kwargs)
        if x.device.type == "cpu":
            output = output.contiguous(memory_format=suggest_memory_format(x))
        return output, *statistics

    return normalized


decompositions.native_batch_norm_helper = _in_the_layout_of_the_kernel(decompositions.native_batch_norm_helper)
FakeTensorMode.cache_clear()  # of results in the old strides
