"""Make the arena that a compiled step on the CPU allocates from, and say what a plan allocates on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.backends.planner import Memory
from checkmate.backends.step_problem import joint_of
from checkmate.capture.nodes import tensors
from checkmate.codegen.boxed import takes_one_list
from checkmate.core.solution import Solution
from checkmate.inspection.addresses import lives_of
from checkmate.memory import build
from checkmate.memory.arena import Arena, Phase
from checkmate.memory.lives import Lives
from checkmate.solvers import addresses
from checkmate.solvers.addresses import Block
from checkmate.solvers.common.processes import BackgroundCall

PLACE_SECONDS = 0.5  # to place what a step allocates: the second step waits for it
PLACE_LOWER_SECONDS = 30.0  # to place it lower, in a process of its own
PLACE_GAP = 1e-3  # an arena that could be lower by a smaller share is low enough
Lower = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def arenas(memory: Memory | None, *, cache: bool) -> Callable[[], Arena | None]:
    """What makes an arena for each captured step. What they need is built meanwhile, and kept on disk with ``cache``.

    Where a user did not ask for a memory, nobody is warned that there can be none.
    """
    if memory == "allocator":
        return lambda: None
    build.start(keep=cache, level=logging.INFO if memory is None else logging.WARNING)
    return lambda: Arena(place_soon, place_lower=place_lower)


def serving(arena: Arena | None, plan: Solution, device: torch.device) -> Arena | None:
    """The arena of a step that follows a plan, told what it will take; None elsewhere than on the CPU."""
    if arena is None or plan.peak is None or device.type != "cpu":
        return None
    arena.expect(plan.peak - plan.problem.resident)
    return arena


def lives_on(plan: Solution, device: torch.device) -> Lives:
    """What a plan allocates on a device, in order, and not what it makes on the CPU: states of generators are there."""
    values, elsewhere = plan.problem.graph.values, set[str]()
    for value, faces in zip(values, joint_of(plan.problem).faces, strict=True):
        made = tensors([node.meta["val"] for node in faces])
        if made and all(t.device.type != device.type for t in made):
            elsewhere.add(value.name)
    first = ((life, life.boxes[0]) for life in lives_of(plan))
    lives = [life for life, box in first if box.role == "workspace" or box.name not in elsewhere]
    columns = ([getattr(life, name) for life in lives] for name in ("bytes", "born", "died"))
    return Lives(*(np.array(column, dtype=np.int64) for column in columns))


def within(arena: Arena | None, phase: Phase, lower: Lower) -> Lower:
    """What lowers a module to a function that allocates from an arena; without one as it is."""
    if arena is None:
        return lower
    return lambda module, inputs: takes_one_list(arena.within(phase, lower(module, inputs)))


def place_soon(lives: Lives) -> tuple[int, ...]:
    """An offset for each, soon."""
    return _offsets(_blocks(lives), PLACE_SECONDS)


def place_lower(lives: Lives) -> BackgroundCall:
    """The same with more time, in a process of its own."""
    return BackgroundCall(partial(_offsets, seconds=PLACE_LOWER_SECONDS), _blocks(lives))


def _offsets(blocks: list[Block], seconds: float) -> tuple[int, ...]:
    return addresses.place_blocks(blocks, time_limit=seconds, gap=PLACE_GAP).offsets


def _blocks(lives: Lives) -> list[Block]:
    return [Block(*block) for block in zip(*(a.tolist() for a in (lives.born, lives.died, lives.sizes)), strict=True)]
