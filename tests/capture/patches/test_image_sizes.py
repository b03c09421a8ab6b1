"""Descriptions of upsampling's gradients and of grids are the kernels' own."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checkmate.capture.patches.results import image_sizes
from tests.support.sampling import in_turn

aten = torch.ops.aten
LAYOUTS = ("contiguous", "channels last", "transposed")


def _laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.contiguous(memory_format=last if layout == "channels last" else torch.contiguous_format)


@in_turn(op=sorted(image_sizes._IN_THE_FORMAT | image_sizes._CONTIGUOUS, key=str), layout=LAYOUTS, channels=(1, 3))
def test_gradients_of_upsampling(op: Any, layout: str, channels: int) -> None:
    dims = next(int(c) for c in str(op) if c.isdigit())
    sizes, shape = [7, 9, 4][:dims], [2, channels, *[5, 6, 3][:dims]]
    args = (_laid_out(torch.randn(2, channels, *sizes), layout), sizes, shape, *[False] * ("nearest" not in str(op)))
    made = op(*args)
    with FakeTensorMode() as mode:
        fake = op(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args])
    assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), made.dtype)


@in_turn(size=([2, 3, 5, 7], [2, 3, 4, 5, 7]), aligned=(False, True))
def test_grids(size: list[int], aligned: bool) -> None:
    theta = torch.randn(2, len(size) - 2, len(size) - 1)
    made = aten.affine_grid_generator(theta, size, aligned)
    with FakeTensorMode() as mode:
        fake = aten.affine_grid_generator(mode.from_tensor(theta), size, aligned)
    assert (fake.shape, fake.stride()) == (made.shape, made.stride())
