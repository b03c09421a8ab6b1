"""Trace a step on tensors without data, for models that do not fit in memory here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx

from checkmate.capture.around import Around
from checkmate.memory import meter
from checkmate.torch_internals.capturing import FakeTensor, MetaTensorDesc, MetaTensorDescriber


def is_fake(tensor: Any) -> bool:
    """Tell whether a tensor has no data: a fake one, or one on the meta device."""
    return isinstance(tensor, FakeTensor) or (isinstance(tensor, torch.Tensor) and tensor.is_meta)


@contextmanager
def meta_as(device: torch.device) -> Iterator[None]:
    """Within the block, tracing takes meta tensors for tensors on this device.

    As they are they cannot be traced: PyTorch chooses kernels by the device, and for the meta device it has no
    backward of some ops and records a step without it. What is on the CPU beside them is taken to be there as well, as
    a model is whose batch has no data; but for numbers, tensors of no dimension, which may be on the CPU in any step.
    Fake tensors are where they say.
    """
    describe = MetaTensorDescriber.describe_tensor

    def describe_there(self: MetaTensorDescriber, t: torch.Tensor, **options: Any) -> MetaTensorDesc[Any]:
        desc = describe(self, t, **options)
        stays = desc.device.type == "cpu" and (not desc.ndim or isinstance(t, FakeTensor))
        return replace(desc, device=device) if desc.device.type in ("meta", "cpu") and not stays else desc

    with patch.object(MetaTensorDescriber, "describe_tensor", describe_there):
        yield


class Descriptions(Around):
    """Free, before the first call of a step, objects that only capture and measurement needed.

    That is the fake tensors by which Dynamo describes its graph: they keep autograd's nodes, and these the numbers that
    tensors were multiplied by, each in a real tensor of eight bytes, which no plan knows. What malloc keeps goes back
    to the machine.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._described = [module]

    def before(self, inputs: list[Any]) -> None:
        """Free them once."""
        while self._described:
            parts = [part for part in self._described.pop().modules() if isinstance(part, fx.GraphModule)]
            for node in (node for part in parts for node in part.graph.nodes):
                node.meta.pop("example_value", None)
            meter.trim()
