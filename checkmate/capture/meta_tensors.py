"""Tensors without data: how a model that fits no memory here is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDesc, MetaTensorDescriber


def is_fake(tensor: Any) -> bool:
    """It has a shape and a type, but no data: a fake tensor, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or (isinstance(tensor, torch.Tensor) and tensor.is_meta)


@contextmanager
def meta_as_cpu() -> Iterator[None]:
    """Within the block, tracing takes tensors on the meta device for tensors on the CPU.

    As they are they cannot be traced: PyTorch chooses kernels by the device, and for the meta device it has no
    backward of some ops and records a step without it.
    """
    describe = MetaTensorDescriber.describe_tensor

    def describe_on_cpu(self: MetaTensorDescriber, t: torch.Tensor, **options: Any) -> MetaTensorDesc[Any]:
        found = describe(self, t, **options)
        return replace(found, device=torch.device("cpu")) if found.device.type == "meta" else found

    with patch.object(MetaTensorDescriber, "describe_tensor", describe_on_cpu):
        yield
