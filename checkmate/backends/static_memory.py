"""The arena of a captured step: where its addresses come from, and its place around forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.core.solution import Solution
from checkmate.memory import build
from checkmate.memory.arena import Arena, Lives, Phase

Lower = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def arenas(*, cache: bool) -> Callable[[], Arena]:
    """What makes an arena for each step that is captured. What they need is built meanwhile, and kept with ``cache``."""
    build.start(keep=cache)
    return lambda: Arena(place, 0)


def expect(arena: Arena | None, plan: Solution, device: torch.device) -> None:
    """Tell an arena what its step will take; on another device than the CPU it serves nothing."""
    if arena is not None and device.type == "cpu" and plan.peak is not None:
        arena.capacity = plan.peak - plan.problem.resident


def within(arena: Arena | None, phase: Phase, lower: Lower) -> Lower:
    """What lowers a module to a function that allocates from the arena; without one as it is."""
    if arena is None:
        return lower
    return lambda module, inputs: arena.within(phase, lower(module, inputs))


def place(lives: Lives) -> np.ndarray:
    """An offset for each: the largest first, each as low as it can be beside those that live at the same time."""
    order = np.lexsort((lives.born, -(lives.died - lives.born), -lives.sizes))
    offsets = np.zeros(len(order), dtype=np.int64)
    placed = np.empty((4, len(order)), dtype=np.int64)  # begin, end, born, died; by begin
    for count, i in enumerate(order):
        begin, end, born, died = placed[:, :count]
        beside = (born < lives.died[i]) & (lives.born[i] < died)
        tops = np.maximum.accumulate(np.concatenate([[0], end[beside]]))  # of all below
        fits = np.flatnonzero(begin[beside] - tops[:-1] >= lives.sizes[i])
        at = tops[fits[0]] if len(fits) else tops[-1]
        place = np.searchsorted(begin, at)
        placed[:, place + 1 : count + 1] = placed[:, place:count].copy()
        placed[:, place] = at, at + lives.sizes[i], lives.born[i], lives.died[i]
        offsets[i] = at
    return offsets
