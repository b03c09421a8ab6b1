"""How a captured step is planned: what a user asked for, checked once, and what plans by it."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal, get_args

from checkmate.backends import ranks
from checkmate.codegen.second_memory import SecondMemories
from checkmate.core.problem import Problem
from checkmate.core.rules import Rules, check, names_any, with_rules
from checkmate.core.solution import Solution
from checkmate.errors import BudgetError, InfeasibleBudget
from checkmate.profiling.profilers import Choice
from checkmate.solvers import known_plans
from checkmate.solvers.known_plans import Rest
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import cheapest_split, check_host, check_method, refused
from checkmate.units import check_positive, exact_bytes, format_bytes, parse_bytes

log = logging.getLogger("checkmate.backends.planner")

Code = Literal["eager", "inductor"]
Memory = Literal["arena", "allocator"]
Wait = Literal["first", "best"] | float
Numerics = Literal["exact", "rounding"]
FIRST_SECONDS = 1.0  # to look for a plan before a step runs with what there is
_HOSTS = ("pinned", "memory")  # that are no files
MOST_PLANS = 64  # of one step, unless a user asks for another number


@dataclass(frozen=True)
class Options:
    """What is asked of `checkmate.compile`; its documentation says what each means.

    Raises:
        BudgetError: if the budget or the reserve is no number of bytes.
        RuleError: if a rule is none.
        ValueError: if another option has no such value.

    >>> Options(budget="1 GB", reserve="100 MB").set_aside
    100000000
    """

    budget: int | float | str
    method: str = "auto"
    time_limit: float = 60.0
    reserve: int | float | str = 0
    verify: bool | None = False  # None: where PyTorch has not been tried
    profile: Choice = "measure"
    cache: bool = True
    backend: Code = "eager"
    max_plans: int = MOST_PLANS
    memory: Memory | None = None  # an arena, where one can be had
    wait: Wait = "best"
    rules: Rules | None = None
    host_budget: int | float | str | None = None
    host: str | None = None  # a file on the CPU, pinned memory on CUDA
    numerics: Numerics = "exact"

    def __post_init__(self) -> None:
        if isinstance(self.max_plans, bool) or not isinstance(self.max_plans, int) or self.max_plans < 1:
            raise ValueError(f"max_plans is a whole number of plans, 1 at least, not {self.max_plans!r}.")
        method = check_method(self.method, {})
        check_positive("time_limit", self.time_limit, " of seconds")
        if self.backend not in get_args(Code):
            raise ValueError(f"Unknown backend {self.backend!r}; the backends are {', '.join(get_args(Code))}.")
        if self.memory is not None and self.memory not in get_args(Memory):
            raise ValueError(f"Unknown memory {self.memory!r}; there are {', '.join(get_args(Memory))}.")
        if self.memory == "arena" and self.backend != "eager":
            raise ValueError(f'memory="arena" is for backend="eager" so far, not for {self.backend!r}.')
        _check_wait(self.wait)
        if self.rules is not None:
            check(self.rules)
            object.__setattr__(self, "rules", {**self.rules})  # as they are now
        if self.host_budget is not None and self.backend != "eager":
            raise ValueError(
                f'host_budget is for backend="eager" so far, not for {self.backend!r}: its kernels are fused across '
                "what is sent and fetched."
            )
        if may_round(self.numerics) and self.backend != "eager":
            raise ValueError(
                f'numerics="rounding" is for backend="eager", not for {self.backend!r}, which rounds otherwise than '
                "plain PyTorch anyway, and runs nothing in parts."
            )
        check_host(method, has_host=self.host_budget is not None)
        _ = self.total, self.set_aside, self.elsewhere  # numbers of bytes, or an error

    @property
    def total(self) -> int:
        """Bytes of the budget."""
        return parse_bytes(self.budget)

    @property
    def patience(self) -> float:
        """Seconds to look for a plan before the first step runs."""
        return self.wait if not isinstance(self.wait, str) else FIRST_SECONDS if self.wait == "first" else inf

    @property
    def elsewhere(self) -> SecondMemories | None:
        """Where values may wait; None: nowhere."""
        return second_memories(self.host, self.host_budget, cache=self.cache)

    @property
    def set_aside(self) -> int:
        """Bytes of the budget that are left to what the step does not know."""
        try:
            return 0 if self.reserve == 0 else parse_bytes(self.reserve)
        except BudgetError as error:
            raise BudgetError(f"reserve={self.reserve!r}: {error}") from None


class Planner:
    """Plans the graphs that are captured of one step. The last batch of an epoch is smaller: earlier plans help.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> Planner(Options(budget=4, cache=False)).plan(chain).cost
    4.0
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._made: list[weakref.ref[Solution]] = []
        self._named: set[str] = set()  # patterns that have named an op of a graph

    def plan(self, problem: Problem, beside: int = 0) -> Solution:
        """The cheapest plan found within the budget, less its reserve and so many bytes ``beside`` it.

        Raises:
            InfeasibleBudget: if no plan was found.
            RuleError: if a rule names nothing in this graph nor in one before, or cannot be obeyed.
        """
        return self._plan(problem, self.options.set_aside + beside, inf)[0]

    def begin(self, problem: Problem) -> tuple[Solution, Rest | None]:
        """The plan to begin with, and what is open of it, if a better one may come. Ranks wait for the best.

        Raises:
            InfeasibleBudget, RuleError: as for `plan`.
        """
        wait = inf if ranks.train_together() else self.options.patience
        return self._plan(problem, self.options.set_aside, wait)

    def _plan(self, problem: Problem, reserve: int, wait: float) -> tuple[Solution, Rest | None]:
        options, problem = self.options, self._ruled(problem)
        if options.total <= reserve:
            raise _nothing_left(problem, options.total, reserve)
        rests: dict[int, Rest | None] = {}

        def find(one: Problem, seconds: float) -> Solution:
            solution, rest = self._plan_one(one, options.total - reserve, wait, seconds)
            rests[id(solution)] = rest
            return solution

        look_on = wait == inf and not ranks.train_together()  # ranks, whose costs differ, have to ask alike
        solution = cheapest_split(problem, find, options.time_limit, look_on=look_on)
        if solution.plan is None:
            why = partial(refused, solution, time_limit=options.time_limit)  # the same on all ranks, whose costs differ
            about: dict[str, Any] = {"method": f"{options.method}, refused", "time_limit": options.time_limit}
            solution = ranks.one_plan(why, solution.problem, options.total - reserve, **about)
            note = f" {format_bytes(reserve)} of it are reserved." if reserve else ""
            assert solution.refusal is not None
            smallest, op = solution.refusal.min_budget + reserve, solution.refusal.op
            raise InfeasibleBudget(f"{solution.message}{note}", budget=options.total, min_budget=smallest, op=op)
        self._made = [*(known for known in self._made if known() is not None), weakref.ref(solution)]
        return solution, rests[id(solution)]

    def _plan_one(self, problem: Problem, within: int, wait: float, seconds: float) -> tuple[Solution, Rest | None]:
        """The same of a problem as it is, not split further; an answer without a plan does not say why."""
        options, rest = self.options, None
        earlier = tuple(solution for known in self._made if (solution := known()) is not None)
        asked: dict[str, Any] = {"method": options.method, "time_limit": seconds}

        def find() -> Solution:
            nonlocal rest
            found, rest = known_plans.begin(problem, within, earlier=earlier, cache=options.cache, wait=wait, **asked)
            return found

        return ranks.one_plan(find, problem, within, **asked), rest

    def _ruled(self, problem: Problem) -> Problem:
        """With the rules. One that named an op before is no mistake where a part of the step is left out."""
        rules = self.options.rules
        if not rules:
            return problem
        named = {pattern for pattern in rules if names_any(pattern, problem.graph)}
        if absent := [pattern for pattern in rules if pattern in self._named - named]:
            log.info("in this graph rules name nothing: %s", ", ".join(map(repr, absent)))
        ruled = with_rules(problem, {pattern: asks for pattern, asks in rules.items() if pattern not in absent})
        self._named |= named
        return ruled


def second_memories(host: str | None, budget: int | float | str | None, *, cache: bool) -> SecondMemories | None:
    """Where values may wait, as `checkmate.compile` is asked; None: nowhere.

    Raises:
        BudgetError: if the budget is no number of bytes.
        ValueError: if there is no such memory, or no budget for it.
    """
    if budget is None:
        if host is not None:
            raise ValueError(f'host={host!r} is for values that wait there: say how many bytes, host_budget="10 GB".')
        return None
    room = parse_bytes(budget)
    if host is not None and not (isinstance(host, str) and (host in _HOSTS or host.startswith("file:"))):
        raise ValueError(
            f'Unknown second memory {host!r}: host is "file:/fast/disk", "file:" for the folder of temporary files, '
            'or "pinned" for a step on CUDA.'
        )
    return SecondMemories(host, room, cache=cache)


def may_round(numerics: Any) -> bool:
    """Whether sums over parts may be taken, which are those of plain PyTorch but for rounding.

    Raises:
        ValueError: if there are no such numerics.
    """
    if numerics not in get_args(Numerics):
        raise ValueError(f'numerics is "exact", the bits of plain PyTorch, or "rounding", not {numerics!r}.')
    return bool(numerics == "rounding")


def _check_wait(wait: Any) -> None:
    if wait in ("first", "best"):
        return
    if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 < wait < inf:
        raise ValueError(f'wait is "first", "best", or a positive number of seconds, not {wait!r}.')


def _nothing_left(problem: Problem, budget: int, reserve: int) -> InfeasibleBudget:
    smallest = min_budget(problem).peak + reserve
    return InfeasibleBudget(
        f"The reserve of {format_bytes(reserve)} leaves nothing of the budget of {format_bytes(budget)}. "
        f"Smallest budget that works: {exact_bytes(smallest)}.",
        budget=budget,
        min_budget=smallest,
        op="",
    )
