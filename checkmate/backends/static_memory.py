"""Give a plan its memory, and compare it with its first step: an arena on the CPU, blocks of the allocator on CUDA.

Sizes of values are known exactly; what ops take beside them was measured, perhaps by another process long ago. On the
CPU the arena of the step counts what it serves. On an accelerator the peak that PyTorch's allocator keeps is reset
before the first forward, as it is when ops are measured, and read after both halves.

For CUDA the allocations of a plan are replayed by the allocator's rules (`checkmate.memory.cuda_allocator`), from the
state in which the device is when the step is planned, with nothing cached. A plan for which the allocator would give
more than the budget does not hold it: the step is planned again with what is too much taken off the limit. Ops whose
workspaces are several allocations count as if these were one. It has run on a simulated device only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.backends.planner import Memory
from checkmate.backends.step_problem import joint_of
from checkmate.capture.nodes import tensors
from checkmate.codegen.boxed import takes_one_list
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, infeasible
from checkmate.devices import REQUESTED
from checkmate.errors import InfeasibleBudget, SolverError
from checkmate.look.addresses import storages_of
from checkmate.memory import native
from checkmate.memory.arena import PHASES, Arena, Boxed, Phase
from checkmate.memory.cuda_allocator import EXPANDABLE, DeviceState, Used, replay, replay_steps
from checkmate.memory.lives import Lives
from checkmate.solvers import addresses
from checkmate.solvers.addresses import Block
from checkmate.solvers.common.processes import BackgroundCall
from checkmate.units import exact_bytes, format_bytes

PLACE_SECONDS = 0.5  # to place what a step allocates: the second step waits for it
PLACE_LOWER_SECONDS = 30.0  # to place it lower, in a process of its own
PLACE_GAP = 1e-3  # an arena that could be lower by a smaller share is low enough
Lower = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

log = logging.getLogger("checkmate.memory")
TRIES = 4  # plans that are looked for, each with more of the budget set aside, before the lowest of all
GIVEN, HELD = "allocated_peak", "reserved_peak"  # in the details of a plan: bytes


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
        self._device, self._state_bytes, self._forget, self._has_warned = device, state_bytes, forget, False
        self._waits = {*PHASES}  # phases that were not called yet
        self._levels: list[int] = []  # in use on the accelerator: before and after the forward, before the backward

    def took(self, taken: int, planned: int) -> None:
        """Compare the bytes of a step with its plan's, both without resident bytes."""
        if taken <= planned + self._state_bytes or self._has_warned:
            return
        self._has_warned = True
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

    def around(self, phase: Phase, run: Boxed) -> Boxed:
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


@dataclass(frozen=True)
class Replays:
    """Replays plans of a step that begins in a state of its device."""

    state: DeviceState
    device: torch.device
    budget: int = 0  # bytes that may be given

    @classmethod
    def now(cls, device: torch.device, budget: int) -> Replays | None:
        """Replay steps from the present state of a device; None on the CPU, or with another allocator.

        What measuring has left cached goes back to the device, once other streams that still use it have ended.
        """
        if device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        state = DeviceState.now(device)
        return None if state is None else cls(state, device, budget)

    def first(self, plan: Solution) -> Used:
        """The bytes that the allocator gives and holds in one step."""
        return replay(lives_on(plan, self.device), self.state.allocator, self.state.key)

    def steps(self, plan: Solution, *, expanding: bool = False) -> Used:
        """The maxima over successive steps; ``expanding``: if the allocator ran with expandable segments.

        What is resident for the plan and not there yet, as the state of an optimizer, counts without rests of blocks.
        """
        allocator = self.state.expanding if expanding else self.state.allocator
        later = max(0, plan.problem.resident - self.state.allocator.allocated)
        return Used(*(later + used for used in replay_steps(lives_on(plan, self.device), allocator, self.state.key)))

    def told(self, plan: Solution) -> Solution:
        """The plan, with the bytes given and held for it in its details."""
        if plan.plan is None:
            return plan
        try:
            used = self.steps(plan)
        except torch.OutOfMemoryError:  # for any budget: the step itself will say so
            return plan
        return replace(plan, details={**plan.details, GIVEN: used.allocated, HELD: used.reserved})

    def check(self, plan: Solution) -> None:
        """Note the bytes given and held for a plan that was found later; a SolverError if they exceed the budget."""
        plan.details.update(self.told(plan).details)
        if (blocks := plan.details.get(GIVEN, 0)) > self.budget:
            most = exact_bytes(self.budget)
            raise SolverError(f"PyTorch's allocator would give {exact_bytes(blocks)} for it, of a budget of {most}.")

    def tell(self, plan: Solution) -> None:
        """Log the bytes given and held for a plan, and the saving by expandable segments."""
        if GIVEN not in plan.details:
            return
        blocks, held, advice = plan.details[GIVEN], plan.details[HELD], ""
        if not self.state.expandable:
            best = self.steps(plan, expanding=True)
            saved = (("gives", blocks - best.allocated), ("holds", held - best.reserved))
            words = [f"{format_bytes(more)} of what it {does}" for does, more in saved if more > 0]
            advice = f"; {EXPANDABLE} would save {' and '.join(words)}" if words else ""
        figures = map(format_bytes, (plan.peak or 0, blocks, held))
        log.info("a plan asks for %s; PyTorch's allocator gives %s for it, and holds %s%s", *figures, advice)


def plan_in_blocks(find: Callable[[Problem, int], Solution], problem: Problem, replays: Replays) -> Solution:
    """Plan with ``find`` until the allocator's blocks stay within the budget.

    ``find`` plans the problem with some bytes left beside the plan. It is asked for another with as much beside it as
    the allocator gives beyond the last, `TRIES` times at most, and then for the lowest of all.

    Raises:
        InfeasibleBudget: if the allocator gives more than the budget for the lowest plan, too: it says how much.
    """
    beside, refusal, tries = 0, None, 0
    while True:
        # Find a plan; where nothing fits any more beside what was set aside, take the lowest of all.
        try:
            solution = find(problem, beside)
        except InfeasibleBudget as error:
            if refusal is not None:
                raise
            refusal = error
            beside -= error.min_budget - error.budget  # which leaves room for the lowest plan, and no other
            continue
        # Replay it: it is taken if its blocks stay within the budget.
        solution = replays.told(solution)
        blocks, peak = solution.details.get(GIVEN, 0), solution.peak or 0
        if blocks <= replays.budget:
            replays.tell(solution)
            return solution
        if refusal is not None:
            # The blocks of the lowest plan are above the budget, too.
            reserve = refusal.budget - replays.budget
            least = blocks + reserve
            note = f" {format_bytes(reserve)} of it are reserved." if reserve else ""
            expanding = replays.steps(solution, expanding=True).allocated + reserve
            advice = f", {exact_bytes(expanding, up=True)} with {EXPANDABLE}" if expanding < least else ""
            why = (
                f"No schedule fits {format_bytes(refusal.budget)} in blocks of PyTorch's allocator: the lowest asks "
                f"for {exact_bytes(peak + reserve)}, for which it gives more.{note}"
            )
            raise infeasible(why, refusal.budget, least, refusal.op, note=advice)
        # Set aside what the blocks take beyond the bytes that are asked for.
        tries += 1
        beside = blocks - peak if tries < TRIES else replays.budget  # nothing is left then
        log.info(
            "a plan asks for %s, and PyTorch's allocator gives %s; planning again with %s of the budget set aside",
            *map(format_bytes, (peak, blocks, beside)),
        )
