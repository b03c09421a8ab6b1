"""Random draws of a captured step, and how to repeat them.

A draw changes the generator, so it runs once, and what it drew is kept; or, where that is large, what is kept is the
state that the generator had before: the draw is then an op like any other, and can run again. Its first run leaves the
generator as plain PyTorch does. Each later run draws from a generator of its own, set to the kept state.

On an accelerator a kernel draws by a seed and an offset, 16 bytes on the host, which `Drawn` sets and puts back: the
same launch with the same two draws the same numbers, as `torch.utils.checkpoint` relies on. That holds for whatever
draws there, dropout, attention with dropout, noise; it is tried before it is planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten
DEVICE_STATE_BYTES = 16  # of an accelerator's generator: seed and offset
STATE_BYTES = torch.get_rng_state().numel()  # of the CPU's generator
SEEDS = {"philox_seed", "dropout_seed", "seed"}  # names of arguments, instead of a generator
WORTH_BYTES = 4 * STATE_BYTES  # a smaller mask is kept itself


def draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a PyTorch op draws from a generator.

    Attention ops carry the tag even where their dropout probability is zero, and where they are handed the seed that
    another drew by, as backwards are.
    """
    seeded = any(argument.name in SEEDS for argument in op._schema.arguments)
    if torch.Tag.nondeterministic_seeded not in op.tags or seeded:
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            p = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(p != 0.0)
    return True


def draw_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """A bool tensor in the shape and memory order of ``x``, each entry true with probability p.

    The draws are those that ``empty_like(x).bernoulli_(p)`` makes, in number and order; the functional ``bernoulli`` of
    PyTorch draws in logical order instead, and differs where ``x`` is channels-last.
    """
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(p)


def draw_numbers(x: torch.Tensor, p: float) -> torch.Tensor:
    """Zeros and ones in the type, shape and memory order of ``x``, each one with probability p."""
    return torch.empty_like(x).bernoulli_(p)


def save_state(x: torch.Tensor) -> torch.Tensor:
    """Save the CPU generator's state and the strides of a mask for ``x``: (STATE_BYTES + 8 * x.dim(),) bytes."""
    order = torch.tensor(torch.empty_like(x, dtype=torch.bool, device="meta").stride(), dtype=torch.int64)
    return torch.cat([torch.get_rng_state(), order.view(torch.uint8)])


def draw_saved(saved: torch.Tensor, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Draw as ``draw_mask(x, p)`` does, right after ``saved = save_state(x)``."""
    return _empty(saved, shape).bernoulli_(p)


def draw_again(saved: torch.Tensor, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Draw the mask again at any time, from a separate generator, in the same bytes of memory."""
    generator = torch.Generator()
    generator.set_state(saved[:STATE_BYTES])
    return _empty(saved, shape).bernoulli_(p, generator=generator)


def hold_place(x: torch.Tensor) -> torch.Tensor:
    """An unused state, in bytes like `save_state`'s, for a mask that is drawn once."""
    size = STATE_BYTES + 8 * x.dim()
    parts = torch.empty(size, dtype=torch.uint8)  # there while save_state puts its own together, as the plan counts it
    place = torch.empty_like(parts)
    del parts
    return place


def draw_once(place: torch.Tensor, x: torch.Tensor, p: float) -> torch.Tensor:
    """``draw_mask(x, p)`` while the unused state exists, as the plan counts it."""
    return draw_mask(x, p)


def save_device_state(device: torch.device) -> torch.Tensor:
    """Seed and offset of an accelerator's generator, (16,) bytes on the CPU, without synchronization."""
    return torch.get_device_module(device).get_rng_state(device)


@dataclass(frozen=True)
class Drawn:
    """An op that draws on an accelerator, called with ``saved = save_device_state(on)`` right before."""

    op: OpOverload
    again: bool = False  # another time, at any time: the generator stays as it is then

    __name__ = "drawn"

    def __call__(self, *args: Any, on: torch.device, saved: torch.Tensor, **kwargs: Any) -> Any:
        """Run the op."""
        if not self.again:
            return self.op(*args, **kwargs)
        generators, now = torch.get_device_module(on), save_device_state(on)
        generators.set_rng_state(saved, on)
        try:
            return self.op(*args, **kwargs)
        finally:
            generators.set_rng_state(now, on)

    def __str__(self) -> str:
        return f"checkmate.{self.op._schema.name.removeprefix('aten::')}"


def _empty(saved: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    order = saved[STATE_BYTES:].view(torch.int64).tolist()
    return torch.empty_strided(shape, order, dtype=torch.bool)


SAVES = (save_state, save_device_state)
DRAWS: set[Any] = {draw_mask, draw_numbers, draw_once, *SAVES}  # run once, beside the ops that PyTorch marks


def drawn_again(target: Any) -> Any:
    """The target of an op after its first run."""
    if isinstance(target, Drawn):
        return replace(target, again=True)
    return draw_again if target is draw_saved else target
