"""Gradients of several micro-batches, summed as plain PyTorch sums them: in each parameter's ``.grad``.

The first gradient is stored there, later ones are added to it in place. What it is stored in is made before the
backward: it outlives the step, so that it is no part of what the step's plan allocates, but is in use all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Sums:
    """The sums of the parameters that get gradients in some step."""

    def __init__(self) -> None:
        self._strides: dict[torch.Tensor, tuple[int, ...]] = {}  # of each parameter's sum
        self._rooms: dict[torch.Tensor, torch.Tensor] = {}  # that are not in use yet

    def expect(self, parameter: torch.Tensor, strides: Sequence[int]) -> None:
        """A step will add to the gradient of this parameter, which autograd stores with these strides."""
        self._strides.setdefault(parameter, tuple(strides))

    @property
    def held_bytes(self) -> int:
        """Bytes of all sums."""
        return sum(p.numel() * p.element_size() for p in self._strides)

    def make_rooms(self) -> None:
        """Have room for the sum of each parameter that has none."""
        for parameter in self._strides:
            if parameter.grad is None and parameter not in self._rooms:
                self._rooms[parameter] = self._room(parameter)

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """What autograd does with a gradient."""
        if parameter.grad is None:
            room = self._rooms.pop(parameter, None)
            parameter.grad = (self._room(parameter) if room is None else room).copy_(gradient)
        else:
            parameter.grad.add_(gradient)

    def _room(self, parameter: torch.Tensor) -> torch.Tensor:
        strides = self._strides[parameter]
        return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device)


def rehearsed_add() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function that adds to a sum made up for a parameter, to measure what that costs."""
    sums: dict[torch.Tensor, torch.Tensor] = {}

    def add(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in sums:
            sums[parameter] = torch.zeros_like(gradient)
        return sums[parameter].add_(gradient)

    return add


def token_of(parameter: torch.Tensor) -> torch.Tensor:
    """A number that says, by being there, that something was done with a parameter's gradient."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device)
