"""Predict the blocks that PyTorch's CUDA allocator gives and holds for a plan, and plan within a budget of blocks.

The allocations of a plan are replayed by the allocator's rules (`checkmate.memory.cuda_allocator`), from the state in
which the device is when the step is planned, with nothing cached. A plan for which the allocator would give more than
the budget does not hold it: the step is planned again with what is too much taken off the limit. Ops whose workspaces
are several allocations count as if these were one. It has run on a simulated device only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from checkmate.backends.static_memory import lives_on
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, infeasible
from checkmate.errors import InfeasibleBudget, SolverError
from checkmate.memory.cuda_allocator import EXPANDABLE, DeviceState, Used, replay, replay_steps
from checkmate.units import exact_bytes, format_bytes

log = logging.getLogger("checkmate.memory")

TRIES = 4  # plans that are looked for, each with more of the budget set aside, before the lowest of all
GIVEN, HELD = "allocated_peak", "reserved_peak"  # in the details of a plan: bytes


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
