"""The question to a solver, and its answer: a plan with its cost, a bound that proves how good it is, and a message.

On the main path, 14 of 16: see docs/idea.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import inf
from typing import Any

from checkmate.core.answer import area_picture, facts_html
from checkmate.core.plan import Plan, Run
from checkmate.core.problem import Problem
from checkmate.core.schedule import KIND, Schedule
from checkmate.core.simulator import simulate
from checkmate.core.timing import Timing, timing, walk
from checkmate.errors import InfeasibleBudget
from checkmate.units import exact_bytes, format_bytes, format_seconds

OPTIMAL_GAP = 1e-6  # a smaller gap than this is rounding, not recomputation


def format_gap(gap: float, at_most: bool = False) -> str:
    """Write a gap as a share; one that is not closed but rounds to zero as ``< 0.01%``, after "at most" as ``0.01%``.

    >>> format_gap(0.0123), format_gap(1e-5), format_gap(1e-5, at_most=True), format_gap(0.0)
    ('1.23%', '< 0.01%', '0.01%', '0.00%')
    """
    return f"{'' if at_most else '< '}0.01%" if OPTIMAL_GAP < gap < 5e-5 else f"{gap:.2%}"


class Status(Enum):
    """The outcome of a solve, with its meaning in words.

    What is proven is proven of schedules, R and S: each op runs once a stage at most, in PyTorch's order. A plan that
    runs ops again in another order may be better, or fit where no schedule does. `checkmate.min_budget` speaks of all.
    """

    OPTIMAL = "optimal", f"no schedule with fewer seconds fits the budget ({KIND})"
    FEASIBLE = "feasible", "fits the budget; the gap says how much better another schedule could be at most"
    INFEASIBLE = "infeasible", f"proven: no schedule fits the budget ({KIND})"
    NOT_FOUND = "not found", "no plan was found; that none exists is not proven"

    def __init__(self, label: str, meaning: str) -> None:
        self.label = label
        self.meaning = meaning

    def __repr__(self) -> str:
        return f"Status.{self.name}"


@dataclass(frozen=True)
class Query:
    """A question to a solver: the cheapest plan of a problem within a budget."""

    problem: Problem
    budget: int  # bytes
    method: str = "auto"
    seconds: float = 60.0  # to look for it
    gap: float = 1e-4  # (cost - bound) / cost at which to stop
    start: Solution | Schedule | None = None  # a known plan to begin with
    patience: float = inf  # seconds after which "auto" ends if there is no plan
    wait: float = inf  # seconds after which "auto" ends if there is one
    spent: float = 0.0  # seconds that were allowed before
    cache: bool = False  # plans are read from disk, and the answer is kept there
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method


@dataclass(frozen=True)
class Refusal:
    """The reason why no plan was found, and a budget that works."""

    min_budget: int  # bytes: the smallest budget for which a plan is known
    op: str  # the op in the way
    reason: str  # in words
    without: dict[str, int] = field(default_factory=dict)  # bytes: the smallest budget without a rule; "": without all


@dataclass(frozen=True)
class SecondMemoryUse:
    """The values of a plan that wait in a second memory."""

    values: int  # how many
    peak: int  # the most bytes there, with those of homes
    timing: Timing
    sent: int  # bytes that leave in a step
    fetched: int  # and that come back

    @property
    def waited(self) -> float:
        """Seconds of the step in which no op runs."""
        return self.timing.waited

    def __str__(self) -> str:
        text = f"{self.values:,} value{'s' * (self.values != 1)}, {format_bytes(self.peak)}"
        return f"{text}, hidden {self.timing.hidden:.1%}, waited {format_seconds(self.waited)}"


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """The answer to a `Problem` and a budget.

    ``schedule`` and ``plan`` are there exactly if the status is OPTIMAL or FEASIBLE; such a plan has passed the
    verifier, and ``cost`` and ``peak`` are the simulator's.
    """

    status: Status
    problem: Problem
    budget: int  # bytes
    method: str
    schedule: Schedule | None = None
    plan: Plan | None = None
    cost: float = float("inf")  # seconds of the step
    bound: float = 0.0  # seconds that every schedule within the budget takes, proven
    peak: int | None = None  # bytes
    seconds: float = 0.0  # spent solving
    message: str = ""  # details that the status does not say
    details: dict[str, Any] = field(default_factory=dict)  # figures of the method; nothing goes by them
    origin: str = ""  # of a plan that was not found by this solve alone: "plan cache", "another size", "rank 0"
    interrupted: bool = False  # by Ctrl-C, before the method had come to its end
    stuck: int | None = None  # the op at which a method had nothing left to evict
    refusal: Refusal | None = None  # where there is no plan
    rest: Query | None = None  # the question for the time that is left, if a better plan may come

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: no schedule saves a larger share of the step; infinite without a plan."""
        if self.plan is None:
            return float("inf")
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def overhead(self) -> float:
        """The cost relative to running each op once, minus one: recomputation and waits.

        Negative where links carry more beside the processor than that is.
        """
        base = self.problem.keep_all_cost
        return self.cost / base - 1 if base > 0 else 0.0

    @property
    def recomputation(self) -> float:
        """The part of the overhead that is not spent waiting for a second memory, at least 0."""
        base, moves = self.problem.keep_all_cost, self.plan is not None and self.plan.moves
        return max(0.0, self.overhead - (self.waited / base if moves and base > 0 else 0.0))

    @property
    def spent_on(self) -> str:
        """The parts of the overhead, in words."""
        if self.plan is not None and self.plan.started:
            return "recomputation, less what links carry meanwhile"
        return "recomputation and waiting" if self.waited else "recomputation"

    @property
    def waited(self) -> float:
        """Seconds of the step in which no op runs, because a link is not done."""
        if self.plan is not None and (self.problem.graph.links or self.plan.moves):
            return timing(self.plan, self.problem).waited
        return 0.0

    @property
    def runs_over(self) -> int:
        """The number of runs that write over a value."""
        return 0 if self.plan is None else self.plan.runs_over

    @cached_property
    def second_memory(self) -> SecondMemoryUse | None:
        """The use of the second memory; None if the plan does not use it."""
        if self.plan is None or not self.plan.moves:
            return None
        peak, times, moved = simulate(self.plan, self.problem).host_peak, timing(self.plan, self.problem), [0, 0]
        for transfer in times.transfers:
            moved[transfer.back] += int(self.problem.sizes[transfer.value])
        return SecondMemoryUse(len(self.plan.moved), peak, times, *moved)

    @cached_property
    def modules(self) -> Any:
        """The forward and backward `torch.fx.GraphModule` of the plan.

        Raises:
            ValueError: if there is no plan, or the problem was not captured from PyTorch.
        """
        if self.plan is None:
            raise ValueError(f"There are no modules without a plan: {self.status.meaning}.")
        if self.problem.codegen is None:
            raise ValueError("This problem was not captured from PyTorch: it has a plan but no modules.")
        return self.problem.codegen(self.plan)

    def __repr__(self) -> str:
        outcome = f"cost={self.cost:g}, bound={self.bound:g}, peak={self.peak}" if self.plan else self.message
        return f"Solution({self.status!r}, budget={self.budget}, method={self.method!r}, {outcome})"

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {name:<11}{text}" for name, text in self.facts)])

    def _repr_html_(self) -> str:
        """Show the facts of `str`, and the memory over the step as a small picture, in a notebook."""
        shown = facts_html(self.title, self.facts)
        if self.plan is None:
            return shown
        held, events = simulate(self.plan, self.problem).bytes_at, list(walk(self.plan, self.problem))
        begins, seconds = [event.at for event in events if isinstance(event.step, Run)], events[-1].until
        if seconds > 0:
            ends = [end / seconds for end in (*begins[1:], seconds)]
        else:  # op by op
            ends = [(i + 1) / len(held) for i in range(len(held))]
        beyond = self.budget > 1.5 * max(held)
        above = ", above this picture" if beyond else ""
        words = f"Memory over the step: budget {format_bytes(self.budget)}{above}, peak {format_bytes(max(held))}"
        line = None if beyond else self.budget
        return shown + area_picture(held, ends, line=line, words=words, end=format_seconds(seconds))

    @property
    def title(self) -> str:
        """The outcome in a line."""
        return f"{self.status.label} ({self.method}): {self.message or self.status.meaning}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The names and texts of the figures that are printed."""
        facts = [("budget", format_bytes(self.budget))]
        if self.plan is not None and self.schedule is not None and self.peak is not None:
            again, keep_all = self.schedule.recomputed, max(1, self.problem.keep_all_peak)
            facts += [
                ("peak", f"{format_bytes(self.peak)} ({self.peak / keep_all:.1%} of keeping all)"),
                ("step", f"{format_seconds(self.cost)} ({self.overhead:+.2%} {self.spent_on})"),
                ("bound", f"{format_seconds(self.bound)} (gap {format_gap(self.gap)})"),
                ("runs again", f"{(again > 0).sum()} of {len(again)} ops, {again.sum()} times in all"),
                *(("in parts", text) for text in self.problem.splits),
            ]
            if "allocated_peak" in self.details:
                allocated, held = (format_bytes(self.details[f"{kind}_peak"]) for kind in ("allocated", "reserved"))
                text = f"{allocated} in blocks of PyTorch's allocator, which holds {held}, as replayed"
                facts.append(("allocated", text))
            if "halved" in self.details:
                more, seconds = self.details["halved"]
                facts.append(("with more", f"{format_bytes(more)}: half of that at most, {format_seconds(seconds)}"))
            if self.second_memory is not None:
                facts.append(("transfers", str(self.second_memory)))
            if self.second_memory is not None and self.problem.homes:
                home_bytes, kept_bytes = self.problem.homes_bytes, self.problem.begin_bytes - self.problem.resident
                stays = f"{format_bytes(kept_bytes) if kept_bytes else 'none'} kept here between calls"
                facts.append(("at home", f"{format_bytes(home_bytes)} in the second memory, {stays}"))
                back, out = format_bytes(self.second_memory.fetched), format_bytes(self.second_memory.sent)
                facts.append(("links", f"in {back}, out {out}, {self.waited / (self.cost or 1):.0%} of the step waits"))
            if over := self.runs_over:
                facts.append(("in place", f"{over} of {len(self.plan.runs)} runs write over an input"))
        if self.problem.profile.estimated:
            facts.append(("costs", self.problem.profile.source))
        return [*facts, ("solved in", format_seconds(self.seconds))]


Solver = Callable[[Query], Solution]


def smallest_budget(count: int, of: str = "", note: str = "") -> str:
    """Name the budget that works, ``of`` what if not of a step, with a note."""
    return f"Smallest budget that works{of}: {exact_bytes(count, up=True)}{note}."


def infeasible(why: str, budget: int, smallest: int, op: str = "", of: str = "", note: str = "") -> InfeasibleBudget:
    """The error for a budget that is too small: why it is, and the budget that works, as `smallest_budget` says it."""
    words = f"{why} {smallest_budget(smallest, of, note)}"
    return InfeasibleBudget(words, budget=budget, min_budget=smallest, op=op)


def check_problem(problem: object) -> None:
    """Raise a TypeError for anything but a problem."""
    if not isinstance(problem, Problem):
        raise TypeError(f"This takes a Problem, not {_kind(problem)}. Make one: checkmate.trace(step, *batch).")


def check_solution(solution: object) -> None:
    """Raise a TypeError for anything but a solution."""
    if not isinstance(solution, Solution):
        ways = "Make one: checkmate.solve(problem, budget)."
        if isinstance(plans := getattr(solution, "plans", None), list):
            ways = "Those of a compiled step are in its list plans: " + (
                "give step.plans[0]." if plans else "call the step once, and give step.plans[0]."
            )
        raise TypeError(f"This takes a Solution, not {_kind(solution)}. {ways}")


def require_plan(solution: Solution, act: str) -> tuple[Plan, Schedule]:
    """The plan and schedule of a solution that is to be compared, drawn, ... ``act`` names this in errors.

    Raises:
        TypeError: if it is no solution.
        ValueError: if it has no plan.
    """
    check_solution(solution)
    if solution.plan is None or solution.schedule is None:
        raise ValueError(f"There is no plan to {act}: {solution.message or solution.status.meaning}")
    return solution.plan, solution.schedule


def _kind(thing: object) -> str:
    """Describe an object in a word or two: ``function step``, ``Linear``."""
    name = getattr(thing, "__name__", None)
    return f"{type(thing).__name__} {name}" if isinstance(name, str) else type(thing).__name__
