"""Make the arena that a compiled step on the CPU allocates from, and compare a plan with its first step.

Sizes of values are known exactly; what ops take beside them was measured, perhaps by another process long ago. On the
CPU the arena of the step counts what it serves. On an accelerator the peak that PyTorch's allocator keeps is reset
before the first forward, as it is when ops are measured, and read after both halves.
"""

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
from checkmate.devices import REQUESTED
from checkmate.look.addresses import storages_of
from checkmate.memory import native
from checkmate.memory.arena import PHASES, Arena, Phase, Run
from checkmate.memory.lives import Lives
from checkmate.solvers import addresses
from checkmate.solvers.addresses import Block
from checkmate.solvers.common.processes import BackgroundCall
from checkmate.units import format_bytes

log = logging.getLogger("checkmate.profiling")
PLACE_SECONDS = 0.5  # to place what a step allocates: the second step waits for it
PLACE_LOWER_SECONDS = 30.0  # to place it lower, in a process of its own
PLACE_GAP = 1e-3  # an arena that could be lower by a smaller share is low enough
Lower = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def arenas(memory: Memory | None, *, cache: bool) -> Callable[[], Arena | None]:
    """A factory of arenas, one per captured step. Their library is built meanwhile; with ``cache`` it is kept.

    A warning says that there can be none only if the user asked for one.
    """
    if memory == "allocator":
        return lambda: None
    native.start(keep=cache, level=logging.INFO if memory is None else logging.WARNING)
    return lambda: Arena(place_soon, place_lower=place_lower)


def serving(arena: Arena | None, plan: Solution, device: torch.device) -> Arena | None:
    """Prepare the arena of a step for the bytes of its plan; None except on the CPU."""
    if arena is None or plan.peak is None or device.type != "cpu":
        return None
    arena.expect(plan.peak - plan.problem.resident)
    return arena


def lives_on(plan: Solution, device: torch.device) -> Lives:
    """The allocations of a plan on a device, in order, without values on the CPU such as generator states."""
    values, elsewhere = plan.problem.graph.values, set[str]()
    for value, nodes in zip(values, joint_of(plan.problem).nodes_of_value, strict=True):
        results = tensors([node.meta["val"] for node in nodes])
        if results and all(t.device.type != device.type for t in results):
            elsewhere.add(value.name)
    storages = ((block, first) for block, (first, *_) in storages_of(plan))
    blocks = [block for block, first in storages if first.role == "workspace" or first.name not in elsewhere]
    columns = ([getattr(block, name) for block in blocks] for name in ("size", "born", "died"))
    return Lives(*(np.array(column, dtype=np.int64) for column in columns))


def within(arena: Arena | None, phase: Phase, lower: Lower) -> Lower:
    """Turn modules into functions that allocate from an arena; without an arena, from PyTorch."""
    if arena is None:
        return lower
    return lambda module, inputs: takes_one_list(arena.within(phase, lower(module, inputs)))


def place_soon(lives: Lives, seconds: float = PLACE_SECONDS) -> tuple[int, ...]:
    """Find an offset for each allocation."""
    blocks = zip(*(a.tolist() for a in (lives.born, lives.died, lives.sizes)), strict=True)
    return addresses.place_blocks([Block(*block) for block in blocks], time_limit=seconds, gap=PLACE_GAP).offsets


def place_lower(lives: Lives) -> BackgroundCall:
    """Search longer for lower offsets, in a child process."""
    return BackgroundCall(partial(place_soon, seconds=PLACE_LOWER_SECONDS), lives)


class FirstStep:
    """Compares the bytes of a first step with its plan; ``forget`` makes its ops be measured anew at the next plan.

    ``state_bytes``: of states of optimizers, which count as resident and are made by the first step.
    """

    def __init__(self, plan: Solution, device: torch.device, state_bytes: int, forget: Callable[[], None]) -> None:
        assert plan.peak is not None
        self._resident = plan.problem.resident
        self.planned = plan.peak - self._resident  # bytes
        self._device, self._made, self._forget, self._said = device, state_bytes, forget, False
        self._waits = {*PHASES}  # phases that were not called yet
        self._levels: list[int] = []  # in use on the accelerator: before and after the forward, before the backward

    def took(self, taken: int, planned: int) -> None:
        """Compare the bytes of a step with its plan's, both without resident bytes."""
        if taken <= planned + self._made or self._said:
            return
        self._said = True
        log.warning(
            "A step took %s where its plan takes %s: its ops take more than was measured before. They are measured "
            "anew when the step is planned next, by the next start at the latest. (A step takes more as well whose "
            "graph is kept, by backward(retain_graph=True), or that is differentiated by some of its results only.)",
            format_bytes(self._resident + taken),
            format_bytes(self._resident + planned),
        )
        self._forget()

    def told(self, taken: int, capacity: int) -> None:
        """Compare the bytes of a step from an arena that serves other plans too."""
        self.took(taken, self.planned)

    def around(self, phase: Phase, run: Run) -> Run:
        """Wrap a function of one list to measure its first call on an accelerator; unchanged on the CPU."""
        if self._device.type == "cpu":
            return run

        @takes_one_list
        def watched(inputs: list[Any]) -> Any:
            if phase not in self._waits or (phase == "backward" and not self._levels):
                return run(inputs)
            self._waits.remove(phase)
            if phase == "forward":
                torch.accelerator.reset_peak_memory_stats(self._device)
            before = torch.accelerator.memory_stats(self._device)
            result = run(inputs)
            after = torch.accelerator.memory_stats(self._device)
            # Bytes that came into use between the two calls are not the step's.
            now, peak = f"{REQUESTED}.current", f"{REQUESTED}.peak"
            self._levels += before.get(now, 0), after.get(now, 0)
            begin, *between = self._levels[:3]
            foreign = max(0, between[1] - between[0]) if len(between) == 2 else 0
            if after.get(peak, 0) > before.get(peak, 0):
                self.took(after[peak] - begin - foreign, self.planned)
            return result

        return watched
