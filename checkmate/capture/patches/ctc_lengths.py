"""The loss of connectionist temporal classification, captured where its lengths are numbers.

How large its workspace is depends on the lengths. PyTorch describes the kernel as one whose sizes depend on data, be
the lengths tensors or numbers. Importing this module describes that for numbers, for the process. The kernel that takes
tensors is captured by no compiler that traces.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def _describe(mode: FakeTensorMode, op: Any, log_probs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The fake losses, one for each sequence, and the kernel's workspace, ``alpha``."""
    target_lengths: Sequence[int] = args[1]
    batch = (log_probs.shape[1],) if log_probs.dim() == 3 else ()
    longest = max(target_lengths, default=0)
    with mode:
        losses = log_probs.new_empty(batch)
        return losses, log_probs.new_empty(*(batch or (1,)), log_probs.shape[0], 2 * longest + 1)


def _describe_backward(
    mode: FakeTensorMode, op: Any, grad: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any
) -> Any:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


for _op, _how in ((aten._ctc_loss.default, _describe), (aten._ctc_loss_backward.default, _describe_backward)):
    op_implementations_checks.insert(0, (partial(operator.is_, _op), _how))  # before what refuses by a tag
