"""Products of matrices each of whose elements is summed in one order, whatever the shapes and the processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class OneOrder(TorchDispatchMode):
    """Within it ``mm`` and ``addmm`` go row by row, so that a part of a product has the bits of the whole.

    The kernels of a processor may sum in an order that depends on how many rows and columns there are.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in (aten.mm, aten.addmm):
            return func(*args, **(kwargs or {}))
        made = _product(*args)
        return kwargs["out"].copy_(made) if kwargs and "out" in kwargs else made


def _product(*args: Tensor) -> Tensor:
    *bias, a, b = args
    columns = b.t().float().contiguous()
    made = torch.stack([(row * columns).sum(-1) for row in a.float()])
    return (made + bias[0].float() if bias else made).to(a.dtype)
