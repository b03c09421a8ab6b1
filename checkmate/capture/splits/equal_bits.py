"""Whether a region in parts has the bits of the whole: tried on made-up inputs of its shapes, types and layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from checkmate.capture.splits.parts import InParts
from checkmate.capture.ways.batch_norm import gradient_of_input, normalized

INPUTS, MOST_INPUTS = 2, 32  # on which all bits must be equal
ENOUGH = 2**20  # numbers on which an order that differs shows
SUMMED_UP = 2**22  # numbers read: of so many an order shows in most of what they are summed to
COMPARED = 2**10  # numbers, at least
_EPS = 1e-5  # of a batch norm
_tried: dict[tuple[Any, ...], float] = {}
aten = torch.ops.aten


def off_in_parts(parts: InParts) -> float:
    """The most that sums over parts are off by, with as many threads as now: a share of their largest element.

    0.0: all bits are those of the whole. Infinite: something that is no such sum has other bits, or half of the digits
    of a sum's type are others, which rounding does not explain.

    max |in parts - whole|  /  max |whole|
    """
    key = parts.text, parts.length, torch.get_num_threads()
    if key not in _tried:
        off = sum(map(off_of, parts.whole.nodes))
        if off < inf:
            whole = fx.GraphModule({}, parts.whole).forward
            with _disable_current_modes(), torch.no_grad():
                off += max(_unless_it_fails(partial(_off, parts, whole, seed)) for seed in range(inputs_of(parts)))
        _tried[key] = off
    return _tried[key]


def off_of(node: fx.Node) -> float:
    """The same of a batch norm without its sums: what its whole is off by from PyTorch's op. 0.0 of all other ops."""
    if node.target not in (normalized, gradient_of_input):
        return 0.0
    x, weight = node.args[:2] if node.target is normalized else node.args[1:3]
    like: Tensor = x.meta["val"]  # type: ignore[union-attr]
    kind = None if weight is None else weight.meta["val"].dtype  # type: ignore[union-attr]
    key = node.target, like.shape, like.stride(), like.dtype, like.device, kind, torch.get_num_threads()
    if key not in _tried:
        trial = partial(_off_of_normalized if node.target is normalized else _off_of_gradient, like, kind)
        with _disable_current_modes(), torch.no_grad():
            _tried[key] = max(_unless_it_fails(partial(trial, seed)) for seed in range(INPUTS))
    return _tried[key]


def _off_of_normalized(like: Tensor, kind: torch.dtype | None, seed: int) -> float:
    x, weight, bias = _of_batch_norm(like, kind, seed)
    made, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, _EPS)
    return _distance(made, normalized(x, weight, bias, mean, invstd), summed=False)


def _off_of_gradient(like: Tensor, kind: torch.dtype | None, seed: int) -> float:
    x, weight, bias = _of_batch_norm(like, kind, seed)
    grad = _made_up(like, torch.Generator().manual_seed(seed + INPUTS), seed)
    _, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.0, _EPS)
    about = weight, None, None, mean, invstd, True, _EPS, [True, True, True]
    made, of_weight, of_bias = aten.native_batch_norm_backward(grad, x, *about)
    found = gradient_of_input(grad, x, weight, mean, invstd, of_weight, of_bias, x.numel() // x.shape[1])
    return _distance(made, found, summed=True)


def _of_batch_norm(like: Tensor, kind: torch.dtype | None, seed: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """An input like that, weight and bias."""
    draw = torch.Generator().manual_seed(seed)
    x, *others = (_made_up(like, draw, seed), *(torch.rand(like.shape[1], generator=draw) for _ in range(2)))
    weight, bias = (None if kind is None else one.to(like.device, kind) for one in others)
    return x, weight, bias


def same_bits(parts: InParts) -> bool:
    """Whether a region in parts has the bits of the whole, with as many threads as now."""
    return off_in_parts(parts) == 0


def most_off(parts: InParts) -> float:
    """The most that sums over parts may be off by to be offered: a share of their largest element."""
    types = [made.dtype for made, summed in zip(parts.made, parts.summed, strict=True) if summed]
    return max(map(_half_of_the_digits, types), default=0.0)


def inputs_of(parts: InParts) -> int:
    """How many inputs a region is tried on: more if it makes little of little."""
    made = sum(n.meta["val"].numel() for n in parts.region.made)
    read = sum(n.meta["val"].numel() for n in parts.whole.find_nodes(op="placeholder"))
    shows = max(min(ENOUGH // max(1, made), SUMMED_UP // max(1, read)), COMPARED // max(1, made))
    return min(MOST_INPUTS, max(INPUTS, shows))


def _unless_it_fails(trial: Callable[[], float]) -> float:
    """What a trial finds; infinite where an op refuses its inputs."""
    try:
        return trial()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError):
        return inf


def _off(parts: InParts, whole: Any, seed: int) -> float:
    draw = torch.Generator().manual_seed(seed)
    inputs = [_made_up(n.meta["val"], draw, seed) for n in parts.whole.find_nodes(op="placeholder")]
    pairs = list(zip(whole(*inputs), parts(*inputs), parts.summed, strict=True))
    return max(_distance(a, b, summed=summed) for a, b, summed in pairs)


def _distance(whole: Tensor, found: Tensor, *, summed: bool) -> float:
    """By how much a result is off; infinite if it may not be."""
    if whole.stride() != found.stride():
        return inf
    if bool((_bytes(whole) == _bytes(found)).all()):
        return 0.0
    if not summed or not whole.dtype.is_floating_point:
        return inf
    wide = whole.double()
    off = float((found.double() - wide).abs().max() / wide.abs().max())
    return off if off <= _half_of_the_digits(whole.dtype) else inf  # not a number: no


def _half_of_the_digits(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps ** 0.5)


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
