"""Whether a region in parts has the bits of the whole: tried on made-up inputs of its shapes, types and layouts."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from checkmate.capture.splits.parts import InParts

INPUTS, MOST_INPUTS = 2, 32  # on which all bits must be equal
ENOUGH = 2**20  # numbers on which an order that differs shows
_tried: dict[tuple[Any, ...], bool] = {}


def same_bits(parts: InParts) -> bool:
    """Whether a region in parts has the bits of the whole, with as many threads as now."""
    key = parts.text, parts.length, torch.get_num_threads()
    if key not in _tried:
        whole = fx.GraphModule({}, parts.whole).forward
        with _disable_current_modes(), torch.no_grad():
            _tried[key] = all(_equal(parts, whole, seed) for seed in range(inputs_of(parts)))
    return _tried[key]


def inputs_of(parts: InParts) -> int:
    """How many inputs a region is tried on: more if it is small."""
    return min(MOST_INPUTS, max(INPUTS, ENOUGH // max(1, sum(n.meta["val"].numel() for n in parts.region.made))))


def _equal(parts: InParts, whole: Any, seed: int) -> bool:
    draw = torch.Generator().manual_seed(seed)
    inputs = [_made_up(n.meta["val"], draw, seed) for n in parts.whole.find_nodes(op="placeholder")]
    try:
        pairs = list(zip(whole(*inputs), parts(*inputs), strict=True))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return all(a.stride() == b.stride() and bool((_bytes(a) == _bytes(b)).all()) for a, b in pairs)


def _made_up(like: Tensor, draw: torch.Generator, seed: int) -> Tensor:
    """Normal numbers, or such between 0.1 and 0.9, which are valid variances; bools; zeros, which are valid indices."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    memory = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))  # an element may be many
    if like.dtype.is_floating_point:
        numbers = torch.empty(len(memory))
        memory.copy_(numbers.uniform_(0.1, 0.9, generator=draw) if seed % 2 else numbers.normal_(generator=draw))
    elif like.dtype is torch.bool:
        memory.copy_(torch.rand(len(memory), generator=draw) < 0.7)
    else:
        memory.zero_()
    return made


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
