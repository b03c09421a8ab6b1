"""The arena of a captured step: where its addresses come from, and its place around forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.backends.planner import Memory
from checkmate.codegen.boxed import takes_one_list
from checkmate.core.solution import Solution
from checkmate.memory import build
from checkmate.memory.arena import Arena, Lives, Phase
from checkmate.solvers import addresses
from checkmate.solvers.addresses import Block

PLACE_SECONDS = 3.0  # to place what a step allocates: the second step waits for it
PLACE_GAP = 1e-3  # an arena that could be lower by a smaller share is low enough
Lower = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def arenas(memory: Memory | None, *, cache: bool) -> Callable[[], Arena | None]:
    """What makes an arena for each captured step. What they need is built meanwhile, and kept with ``cache``.

    Args:
        memory: what a user asked for. Where they did not, nobody is warned that there can be none.
        cache: keep what is built on disk.
    """
    if memory == "allocator":
        return lambda: None
    build.start(keep=cache, level=logging.INFO if memory is None else logging.WARNING)
    return lambda: Arena(place)


def expect(arena: Arena | None, plan: Solution, device: torch.device) -> None:
    """Tell an arena what its step will take; on another device than the CPU it serves nothing."""
    if arena is not None and device.type == "cpu" and plan.peak is not None:
        arena.expect(plan.peak - plan.problem.resident)


def within(arena: Arena | None, phase: Phase, lower: Lower) -> Lower:
    """What lowers a module to a function that allocates from the arena; without one as it is."""
    if arena is None:
        return lower
    return lambda module, inputs: takes_one_list(arena.within(phase, lower(module, inputs)))


def place(lives: Lives) -> np.ndarray:
    """An offset for each, by `checkmate.solvers.addresses.place`."""
    blocks = [Block(*block) for block in zip(*(a.tolist() for a in (lives.born, lives.died, lives.sizes)), strict=True)]
    return np.array(addresses.place(blocks, time_limit=PLACE_SECONDS, gap=PLACE_GAP).offsets, dtype=np.int64)
