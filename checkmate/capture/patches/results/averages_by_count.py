"""Batch norms with ``momentum=None``, whose averages weigh each batch by 1 / ``num_batches_tracked``.

`torch.nn.BatchNorm2d` and its like read that count as a number in each step, and a graph would hold one number. What
is normalized does not depend on the averages while a module trains: the graph normalizes without them, and one op takes
the next averages, by the call of `torch.nn.functional.batch_norm` that plain PyTorch makes, with the count that the
step finds. Bits are those of plain PyTorch, whose call computes both; the op takes the time of a second one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkmate.capture.patches.only_our_captures import follow
from checkmate.torch_internals.capturing import VariableTracker

_FORWARD = nn.BatchNorm2d.forward  # shared by all but SyncBatchNorm


@torch.library.custom_op("checkmate::next_averages", mutates_args=())
def next_averages(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, count: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance over ``count`` batches, from those over the batches before ``x``.

    Args:
        x: a batch, of shape (batch, channels, ...).
        mean, var: the averages over all batches before it, of shape (channels,).
        weight, bias, eps: with which the batch is normalized.
        count: of batches with ``x``, of no dimension.
    """
    mean, var = mean.clone(), var.clone()
    share = 1.0 / max(float(count), 1.0)  # where the op's time is measured, the count is made up
    F.batch_norm(x, mean, var, weight, bias, True, share, eps)
    return mean, var


@next_averages.register_fake
def _describe(x: Tensor, mean: Tensor, var: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(var)


def _forward(norm: Any, input: Tensor) -> Tensor:
    """The forward of a batch norm with momentum None, with the same bits."""
    norm._check_input_dim(input)
    tracks = norm.training and norm.track_running_stats
    mean, var = (norm.running_mean, norm.running_var) if tracks or not norm.training else (None, None)
    by_batch = norm.training or (mean is None and var is None)
    counts = tracks and norm.momentum is None and norm.num_batches_tracked is not None
    if counts and mean is not None and var is not None:
        norm.num_batches_tracked.add_(1)
        with torch.no_grad():
            averages = next_averages(input, mean, var, norm.weight, norm.bias, norm.num_batches_tracked, norm.eps)
            mean.copy_(averages[0])
            var.copy_(averages[1])
        mean = var = None
    return F.batch_norm(input, mean, var, norm.weight, norm.bias, by_batch, 0.0, norm.eps)


def _call(plain: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is _FORWARD:
        norm, *_ = arguments = [*self.self_args(), *args]
        if getattr(getattr(norm, "value", None), "momentum", 0) is None:
            return VariableTracker.build(tx, _forward).call_function(tx, arguments, kwargs)
    return plain(self, tx, args, kwargs)


follow("UserFunctionVariable.call_function", _call)
