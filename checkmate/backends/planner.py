"""The options of `checkmate.compile` and its like, checked once, and the `Planner` that plans each captured step.

On the main path, 7 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import signature
from math import inf
from typing import Any, Literal, TypedDict, get_args

from checkmate.backends import ranks
from checkmate.capture.fusion.kernels import Kernels
from checkmate.codegen.second_memory import SecondMemories
from checkmate.core.problem import Problem
from checkmate.core.rules import Rules, check, names_any, with_rules
from checkmate.core.solution import Query, Solution, infeasible
from checkmate.errors import BudgetError, InfeasibleBudget
from checkmate.memory.available import Available, rounded_down
from checkmate.profiling.source import Choice, Source, source_of
from checkmate.solvers import plan_cache, solve
from checkmate.solvers.background_search import first_plan
from checkmate.solvers.search.adapt import cheapest_known
from checkmate.solvers.search.min_budget import min_budget
from checkmate.units import check_positive, exact_bytes, format_bytes, parse_budget, parse_share

log = logging.getLogger("checkmate.backends.planner")

Memory = Literal["arena", "allocator"]
WaitOption = Literal["first", "best"] | float
Bytes = int | float | str
FIRST_SECONDS = 1.0  # to look for a plan before a step runs with what there is
_HOSTS = ("pinned", "memory")  # second memories that are no files


class CompileOptions(TypedDict, total=False):
    """Options of `checkmate.compile` and `checkmate.training_step`, explained by `compile`."""

    method: str
    time_limit: float
    reserve: Bytes | None
    verify: bool | None
    profile: Choice
    cache: bool
    max_plans: int
    memory: Memory | None
    wait: WaitOption
    rules: Rules | None
    host_budget: Bytes | None
    host: str | None
    overlap: bool
    kernels: Kernels


OF_TRACE = (
    "profile",
    "cache",
    "host_budget",
    "host",
    "overlap",
    "kernels",
)  # options of `checkmate.trace`, beside a batch
OF_EXPLAIN = (*OF_TRACE, "rules")
OF_VERIFY = (*OF_EXPLAIN, "method", "time_limit", "reserve", "memory")


@dataclass(frozen=True)
class Options:
    """The options of `checkmate.compile`, which explains them, and its like, with their defaults.

    Raises:
        BudgetError: if the budget or the reserve is no number of bytes.
        RuleError: if a rule is none.
        ValueError: if another option has no such value.

    >>> options = Options(budget="1 GB", reserve="100 MB")
    >>> options.total, options.set_aside
    (1000000000, 100000000)
    """

    budget: Bytes = "fit"  # the free memory
    method: str = "auto"
    time_limit: float = 60.0
    reserve: Bytes | None = None  # none of bytes that are named; of what there is, the state of an optimizer
    verify: bool | None = None  # where PyTorch has not been tried
    profile: Choice = "measure"
    cache: bool = True
    max_plans: int = 64
    memory: Memory | None = None  # an arena, where one can be had
    wait: WaitOption = "first"
    rules: Rules | None = None
    host_budget: Bytes | None = None
    host: str | None = None  # a file on the CPU, pinned memory on CUDA; alone: most of what is free there
    overlap: bool = False  # collectives beside other ops
    kernels: Kernels = "eager"
    share: float | None = field(init=False, repr=False)  # of the free memory, that the budget is; None: it is in bytes
    total: int = field(init=False, repr=False)  # bytes of the budget; 0 for a share, which is found with the first plan
    set_aside: int = field(init=False, repr=False)  # bytes of the budget for what the step cannot see
    host_bytes: int = field(init=False, repr=False)  # of the second memory; 0 if there is none, or nobody says

    @classmethod
    def of(cls, way_in: Callable[..., Any], names: Iterable[str], chosen: Mapping[str, Any], budget: Bytes) -> Options:
        """Make options from the keywords of a public function; a TypeError names an unknown one."""
        for name in chosen:
            if name not in names:
                kinds = signature(way_in).parameters.values()
                own = [p.name for p in kinds if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
                all_known = [*own, *(f.name for f in fields(cls) if f.name in names)]
                raise TypeError(no_option(f"checkmate.{way_in.__name__}", name, all_known))
        return cls(budget, **chosen)

    @classmethod
    def among(cls, names: Iterable[str], keywords: dict[str, Any], **own: Any) -> Options:
        """Take options out of the keywords of a call; a TypeError for one that only earlier versions had."""
        for name, values in GONE.items():
            if isinstance(value := keywords.get(name), str) and value in values:  # else it is an argument of the step
                raise TypeError(no_option("checkmate", name, ()))
        return cls(**own, **{name: keywords.pop(name) for name in names if name in keywords})

    def __post_init__(self) -> None:
        if isinstance(self.max_plans, bool) or not isinstance(self.max_plans, int) or self.max_plans < 1:
            raise ValueError(f"max_plans is a whole number of plans, 1 at least, not {self.max_plans!r}.")
        solve.check_method(self.method)
        check_positive("time_limit", self.time_limit, " of seconds")
        if self.memory is not None and self.memory not in get_args(Memory):
            raise ValueError(f"Unknown memory {self.memory!r}; there are {', '.join(get_args(Memory))}.")
        if self.kernels not in get_args(Kernels):
            raise ValueError(f"Unknown kernels {self.kernels!r}; there are {', '.join(get_args(Kernels))}.")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap is True or False, not {self.overlap!r}.")
        is_number = isinstance(self.wait, (int, float)) and not isinstance(self.wait, bool)
        if self.wait not in ("first", "best") and not (is_number and 0 < self.wait < inf):  # type: ignore[operator]
            raise ValueError(f'wait is "first", "best", or a positive number of seconds, not {self.wait!r}.')
        if self.rules is not None:
            check(self.rules)
            vars(self)["rules"] = {**self.rules}  # as they are now
        solve.check_host(self.method, has_host=self.host_budget is not None or self.host is not None)
        # Text becomes bytes here, and nowhere else.
        share, set_aside, host, host_bytes = parse_share(self.budget), 0, self.host, 0
        total = parse_budget(self.budget) if share is None else 0
        if self.reserve is not None and self.reserve != 0:
            try:
                set_aside = parse_budget(self.reserve)
            except BudgetError as error:
                raise BudgetError(f"reserve={self.reserve!r}: {error}") from None
        if self.host_budget is not None:
            host_bytes = parse_budget(self.host_budget)
        if host is not None and not (isinstance(host, str) and (host in _HOSTS or host.startswith("file:"))):
            raise ValueError(
                f'Unknown second memory {host!r}: host is "file:/fast/disk", "file:" for the folder of temporary '
                'files, or "pinned" for a step on CUDA.'
            )
        vars(self).update(share=share, total=total, set_aside=set_aside, host_bytes=host_bytes)

    @property
    def costs(self) -> Source:
        """The source of the costs of ops."""
        return source_of(self.profile, cache=self.cache)

    @property
    def second_memories(self) -> SecondMemories | None:
        """The second memory of a step; None if there is none."""
        has_one = self.host_bytes or self.host is not None
        return SecondMemories(self.host, self.host_bytes, cache=self.cache) if has_one else None


# Options that earlier versions had, with their values, and what to write instead.
GONE = {"numerics": ("exact", "rounding"), "backend": ("eager", "inductor")}
INSTEAD = {
    "numerics": "Every plan has the bits of plain PyTorch. Leave it out; for a lower budget give host_budget=, or take "
    "a smaller batch and accumulate gradients",
    "backend": 'Plans run PyTorch\'s own kernels, or groups of ops compiled by Inductor: kernels="fused"',
}


def no_option(way_in: str, name: object, names: Sequence[str]) -> str:
    """The message for an unknown option, with what to write instead."""
    if name in GONE:
        return f"{way_in} has no option {name!r} any more. {INSTEAD[str(name)]}."
    matches = get_close_matches(str(name), names, 1)
    meant = f"Did you mean {matches[0]!r}?" if matches else f"Its options are {', '.join(names)}."
    return f"{way_in} has no option {name!r}. {meant}"


class Planner:
    """Plans the captured graphs of one step within its budget.

    The budget is named by the options, or a share of the free memory when the step is first planned. What was found
    stays for further graphs; a copy of the step, or one that is loaded on another machine, looks for itself. The last
    batch of an epoch is smaller: earlier plans help.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> Planner(Options(budget="1 kB", reserve="996 B", cache=False)).plan(chain).cost
    4.0
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.total, self.reserve = options.total, options.set_aside  # bytes; those of a share are not found yet: 0
        self.source = ""  # where the bytes of a share come from, in words
        self._solutions: list[weakref.ref[Solution]] = []
        self._matched: set[str] = set()  # patterns that have named an op of a graph

    @property
    def budget(self) -> int:
        """Bytes that a running step may take."""
        return self.total - self.reserve

    def find_budget(self, memory: Available, least: Callable[[int], int], state: int) -> None:
        """Take the budget's share of the free memory, if the options name no bytes.

        Args:
            memory: the free memory.
            least: gives the least of a number of bytes on all ranks that need the same plan.
            state: bytes that an optimizer may come to hold, which are set aside where no reserve is named.
        """
        share = self.options.share
        assert share is not None
        self.total = max(1, least(rounded_down(int(share * memory.bytes))))
        words = "what there is" if share == 1 else f"{100 * share:g}% of what there is"
        self.source = f"The budget is {words}, {exact_bytes(self.total)}: {memory}."
        if self.options.reserve is None and state:
            self.reserve = state
            self.source += (
                f" {format_bytes(state)} of it are reserved for an optimizer that keeps two numbers for each "
                "parameter, as Adam does; reserve= says how much."
            )
        log.info("%s", self.source)  # as plans are: nothing is wrong, and of a warning each rank would give one

    def plan(
        self, problem: Problem, beside: int = 0, *, go_on: bool = False, known: Sequence[Solution] = ()
    ) -> Solution:
        """Find the cheapest plan within the budget less ``beside`` bytes, or raise `InfeasibleBudget` or `RuleError`.

        Args:
            go_on: take the first plan; its `Solution.rest` is to go on with if a better one may come. Ranks wait for
                the best.
            known: plans of the same step at other sizes; the cheapest of those that fit is taken, if any does.
        """
        # Apply the rules, except rules that named an op of an earlier graph and name none here.
        if rules := self.options.rules:
            patterns = {pattern for pattern in rules if names_any(pattern, problem.graph)}
            if absent := [pattern for pattern in rules if pattern in self._matched - patterns]:
                log.info("in this graph rules name nothing: %s", ", ".join(map(repr, absent)))
            problem = with_rules(problem, {pattern: asks for pattern, asks in rules.items() if pattern not in absent})
            self._matched |= patterns
            solve.refuse_unknown_rules(problem, self.options.method)
        solve.check_homes(problem, self.options.method)
        # Refuse a reserve that leaves nothing.
        options, reserve = self.options, self.reserve + beside
        if self.total <= reserve:
            why = f"The reserve of {format_bytes(reserve)} leaves nothing of the budget of {format_bytes(self.total)}."
            raise infeasible(why, self.total, min_budget(problem).peak + reserve)
        if known and options.wait != "best":
            cheapest = cheapest_known(problem, self.total - reserve, known)
            if cheapest is not None:
                return cheapest
        together, budget, seconds, wait = ranks.train_together(), self.total - reserve, options.time_limit, inf
        if go_on and not together and options.wait != "best":
            wait = options.wait if not isinstance(options.wait, str) else FIRST_SECONDS
        query = Query(problem, budget, options.method, seconds, wait=wait, cache=options.cache)
        # Ways to a plan: the loss in more parts if none fits; one rank for all; known plans; a first one; a method.
        earlier = [plan for reference in self._solutions if (plan := reference()) is not None]
        look_on = wait == inf and not together  # ranks, whose costs differ, have to ask alike
        known_or_new = plan_cache.kept(first_plan(solve.attempt), earlier)
        solver = solve.cheapest_split(ranks.one_plan(known_or_new), look_on=look_on)
        solution = solver(query)
        if solution.plan is None:
            # Refuse, with the smallest budget that works, which is equal on all ranks.
            refusing = ranks.one_plan(lambda query: solve.refused(solution, seconds, reserve), "refusal")
            solution = refusing(replace(query, problem=solution.problem))
            assert solution.refusal is not None
            smallest, op = solution.refusal.min_budget + reserve, solution.refusal.op
            raise InfeasibleBudget(solution.message, budget=self.total, min_budget=smallest, op=op)
        solution = solve.with_halved(solution)
        alive = [reference for reference in self._solutions if reference() is not None]
        self._solutions = [*alive, weakref.ref(solution)]
        return solution
