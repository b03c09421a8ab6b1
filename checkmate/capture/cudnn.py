"""Put cuDNN's batch norm into the joint graph where eager PyTorch runs it, since AOTAutograd traces another kernel.

``aten.cudnn_batch_norm`` writes the running statistics without saying so in its schema. AOTAutograd therefore traces
PyTorch's own kernel in its place, whose sums are in another order: other bits than eager's. Here the node becomes a
call of cuDNN on copies of the statistics, with what cuDNN reserves for its backward as one more output.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.nodes import call
from checkmate.torch_internals import running
from checkmate.torch_internals.capturing import suggest_memory_format

aten = torch.ops.aten


def expose_cudnn(graph: fx.Graph) -> None:
    """Call cuDNN for each batch norm, forward and backward, for which eager PyTorch calls it."""
    for op in (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats):
        for node in graph.find_nodes(op="call_function", target=op):
            x, weight, bias, *rest = node.args
            args: Any = (x, weight, bias, *([] if len(rest) == 5 else [None, None]), *rest)
            if not is_for_cudnn(args[:5], args[5], args[7]):
                continue

            # The node becomes a call of `batch_norm`, which gives what cuDNN reserves, too.
            val = tuple(node.meta["val"])
            saved = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 1), None)
            node.target, node.args = batch_norm, args
            with val[0].fake_mode:
                reserved = torch.empty(reserve_bytes(args[0].meta["val"]), dtype=torch.uint8, device=val[0].device)
            node.meta["val"] = (*val, reserved)

            # The backward that reads what it saved becomes one of `batch_norm_backward`.
            backward = aten.native_batch_norm_backward.default
            readers = [n for n in (saved.users if saved else ()) if n.target is backward and n.args[5] is saved]
            if readers:
                with graph.inserting_after(node):
                    reserve = call(node, operator.getitem, (node, len(val)), val=reserved)
            for reader in readers:
                grad, x, weight, _, _, mean, rstd, _, eps, _ = reader.args
                reader.target = batch_norm_backward
                reader.args = (grad, x, weight, mean, rstd, eps, reserve)
                with val[0].fake_mode:  # cuDNN makes all three gradients, asked for or not
                    likes = fx.node.map_arg((x, weight, weight), lambda n: n.meta["val"])
                    pairs = zip(reader.meta["val"], likes, strict=True)
                    reader.meta["val"] = tuple(torch.empty_like(like) if old is None else old for old, like in pairs)
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        args = node.args
        if is_for_cudnn(args[:5], False, args[6]):
            node.target = evaluate


def is_for_cudnn(tensors: Sequence[fx.Node | None], training: bool, eps: float) -> bool:
    """Ask PyTorch whether eager mode takes cuDNN for a batch norm: input, weight, bias, running mean and variance."""
    fakes: list[Any] = [None if n is None else n.meta["val"] for n in tensors]
    x, weight, bias, mean, var = fakes
    if x.device.type != "cuda" or weight is None or bias is None:
        return False
    if mean is None or var is None:
        if not training:
            return False
        mean, var = weight, bias  # in training they may be missing; the question takes no None, and asks only that
    return (
        running._select_batch_norm_backend(x, weight, bias, mean, var, training, eps) == running._BatchNormBackend.Cudnn
    )


def reserve_bytes(x: Tensor) -> int:
    """Bytes that cuDNN keeps from a training forward for its backward, beyond the usual statistics.

    Where there is no device to ask, a bit for each element: the mask that its kernels of several ops in one keep. This
    estimate is high: the kernels for tensors that are not channels last may keep nothing.
    """
    if not torch.cuda.is_available():
        return -(-x.numel() // 8)
    return int(running._get_cudnn_batch_norm_reserve_space_size(x, True))


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Result, mean, 1 / standard deviation, the new running statistics if there are any, and cuDNN's reserve.

    The statistics handed in stay as they are, so that this can run again.
    """
    statistics = () if mean is None or var is None else (mean.clone(), var.clone())
    new = statistics or (None, None)
    result, saved_mean, saved_rstd, reserve = aten.cudnn_batch_norm(x, weight, bias, *new, training, momentum, eps)
    return (result, saved_mean, saved_rstd, *statistics, reserve)


def evaluate(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the running statistics, and two empty tensors: its backward is PyTorch's own."""
    return aten.cudnn_batch_norm(x, weight, bias, mean, var, False, momentum, eps)[:3]


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float, reserve: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias. cuDNN may write to its reserve, so it gets a copy."""
    grad = grad.contiguous(memory_format=suggest_memory_format(x))
    return aten.cudnn_batch_norm_backward(x, grad, weight, None, None, mean, rstd, eps, reserve.clone())
