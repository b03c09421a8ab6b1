"""The front door: run a method, which offers plans and bounds; answer with the best, and say what happened.

On the main path, 9 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.rules import Rules, as_mapping, with_rules, without_rules
from checkmate.core.solution import Query, Refusal, Solution, Solver, Status, check_problem, smallest_budget
from checkmate.errors import InvalidProblem, RuleError, SolverError
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.common.incumbent import Clock, Incumbent, Remarks, Task
from checkmate.solvers.search.adapt import Start, as_schedule
from checkmate.solvers.search.min_budget import (
    TIME_LIMIT,
    bottleneck,
    ends_of,
    min_budget,
    slow_budget,
    smallest_within,
)
from checkmate.solvers.search.overlap import overlap
from checkmate.statusline import showing
from checkmate.units import check_positive, exact_bytes, format_bytes, format_seconds, parse_bytes

__all__ = ["min_budget", "solve"]

log = logging.getLogger("checkmate.solve")

PATIENCE = 1.0  # seconds to look for each budget that a refusal names; auto may take longer for the smallest
SLOW = 1.5  # times the step: where the smallest budget takes that, a refusal says so, and names a roomier budget
SAVES = 0.8  # times the step of the smallest budget: a roomier budget is named where its step takes less than this
FIRST_SECONDS, PER_OP = 0.5, 1e-3  # to look for a plan of a step, and of each split, before any is looked at for long
SHARES = (1, 1 / 2, 1 / 4, 1 / 8)  # of the time limit: a step, its splits; further ones get as much as the last
WORTH_A_SPLIT = 0.01  # of the cost: so much a further split has to save
HALVING = 1.0  # seconds to look for a budget that halves the step
LEAST_SECONDS = 0.5  # to look for the smallest budget without each rule, at least
PROVING = ("auto", "milp")  # their bounds grow with their time
FOLLOWS_ALL = ("auto", "milp", "lp-rounding", "next-use")  # the others know of ops that run once, and of no other rule


def solve(
    problem: Problem,
    budget: int | float | str,
    *,
    method: str = "auto",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    start: Start | None = None,
    rules: Rules | None = None,
    progress: bool | None = None,
    watch: Callable[[Incumbent], None] | None = None,
    **options: Any,
) -> Solution:
    """A plan for the problem within the budget, with the least recomputation that the method finds.

    Ctrl-C ends it with the best plan so far, which is valid, and a message that says so; a second Ctrl-C, or one before
    there is a plan, is raised as usual. Where a solver fails after a plan was found, that plan is the answer.

    Args:
        budget, method, time_limit, gap, progress, watch: as docs/options.md has them. The logger "checkmate.solve" has
            the progress too, at INFO.
        start: a known plan to begin with, for "auto" and "milp": of this problem, or of one with the same ops and other
            sizes or costs, such as a smaller batch. It need not fit. What a Solution has proven counts where it holds.
        rules: as for `checkmate.compile`; they take the place of those that the problem has.
        options: of the method.

    Returns:
        A Solution of any status. Where there is a plan, ``details["trajectory"]`` lists (seconds, cost, bound) at each
        improvement; where there is none, ``refusal`` says why, and what would work.

    Raises:
        BudgetError: if the budget is not a positive number of bytes.
        TypeError: if the problem is none.
        InvalidProblem: if values are at home in the second memory, and the method does not know of any.
        RuleError: if a rule names nothing, cannot be obeyed, or is none that the method can follow.
        ValueError: if no method has this name, it has no such option, a limit is out of range, or the start is of
            another graph.
        KeyboardInterrupt: on Ctrl-C before there is a plan.

    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> solve(problem, "3 B").cost
    4.0
    """
    check_problem(problem)
    problem = problem if rules is None else with_rules(problem, rules)
    check_limits(time_limit, gap)
    check_method(method, options if start is None else {**options, "start": start})
    refuse_unknown_rules(problem, method)
    check_host(method, has_host=problem.host is not None)
    check_homes(problem, method)
    ends = options if method == "auto" else {}
    patience, wait = ends.pop("patience", inf), ends.pop("enough", inf)
    query = Query(problem, parse_bytes(budget), method, time_limit, gap, start, patience, wait, options=options)
    clock = Clock()
    solution = cheapest_split(partial(attempt, progress=progress, watch=watch))(query)
    solution = with_halved(solution) if solution.plan is not None else refused(solution, time_limit)
    return replace(solution, seconds=clock.elapsed)


def attempt(
    query: Query, *, progress: bool | None = None, watch: Callable[[Incumbent], None] | None = None
) -> Solution:
    """Solve a problem without further splits; an answer without a plan gives no reason.

    The question was checked: the method takes the options, follows the rules, and has the second memory that it needs.
    """
    problem, budget, method, options = query.problem, query.budget, query.method, {**query.options}
    if query.start is not None:
        options["start"] = query.start if method == "auto" else as_schedule(problem, query.start)
    if method == "auto":
        options |= {"patience": query.patience if query.patience < query.seconds else inf, "enough": query.wait}
    common = {name: options.pop(name) for name in ("threads", "seed") if name in options}
    task, chosen = Task(problem, budget, Clock(query.seconds), query.gap, **common), METHODS[method]
    incumbent, clock = Incumbent(task), task.clock
    if watch is not None:
        watch(incumbent)
    with showing(incumbent.line, share=lambda: clock.elapsed / query.seconds, shown=progress):
        if budget < problem.unavoidable_bytes.max():
            solution = Solution(Status.INFEASIBLE, problem, budget, method, bound=inf, seconds=clock.elapsed)
        else:
            # Of a method that knows of no second memory take the plan, and none of its bounds.
            knows = problem.host is None or chosen.sends
            own = incumbent if knows else Incumbent(replace(task, problem=problem.with_host(None)))
            run = partial(chosen.run, **options)
            if problem.graph.links:
                run = partial(overlap, recompute=run, proves=method in PROVING)
            # If the method is interrupted or fails, its offers remain.
            try:
                remarks = run(own.task, own)
            except KeyboardInterrupt:
                if own.R is None:
                    raise
                remarks = Remarks(f"interrupted after {format_seconds(clock.elapsed)}", interrupted=True)
            except SolverError as error:
                log.warning("%s failed: %s", method, error)
                remarks = Remarks(f"{method} failed", {"failed": [str(error)]})
            if not knows and own.R is not None:
                incumbent.offer(own.R, method)
            solution = incumbent.solution(method, remarks)
    log.info("%s", solution)
    return solution


def refused(solution: Solution, seconds: float = TIME_LIMIT, reserve: int = 0) -> Solution:
    """An answer without a plan, with the reason, and the budget or rule that would work.

    Args:
        seconds: that were allowed to look for a plan, and are for the smallest budget.
        reserve: bytes that are set aside beside the plan, which the budgets in the message include.
    """
    problem, budget = solution.problem, solution.budget
    patience = max(PATIENCE, min(TIME_LIMIT, seconds)) if solution.method == "auto" else PATIENCE
    ends = min_budget(problem, time_limit=patience)
    # The op that is in the way, and why: one may need more alone, with what every schedule holds while it runs.
    alone = budget < problem.unavoidable_bytes.max()
    if alone:
        k = int(np.argmax(problem.unavoidable_bytes))
        reason = f"{_name(problem, k)} alone needs {format_bytes(problem.unavoidable_bytes[k])}"
    elif budget < ends.bound:
        solution = replace(solution, status=Status.INFEASIBLE, bound=inf)
        k = bottleneck(problem)
        reason = f"{_name(problem, k)} with what it is made from takes {format_bytes(ends.bound)}"
    else:
        k = bottleneck(problem) if solution.stuck is None else solution.stuck
        reason = f"{_name(problem, k)} stands in the way"
        if solution.message and solution.status is not Status.INFEASIBLE:
            reason = solution.message
        elif solution.seconds >= seconds:
            reason = f"the time was over, after {format_seconds(solution.seconds)}"
    # The budget that works, and what it costs.
    way_out = "Method 'auto' has one."
    if alone or ends.peak > budget:
        halves = " and ".join(split.partition(": ")[0] for split in problem.splits)
        note = f", of which {format_bytes(reserve)} are reserved" if reserve else ""
        works = smallest_budget(ends.peak + reserve, note=f", with {halves}{note}" if halves else note)
        below = "it" if ends.proven else exact_bytes(ends.bound + reserve)
        way_out = f"{works} No plan fits below {below}.{_what_it_costs(problem, reserve)}"
    proven = alone or solution.status is Status.INFEASIBLE
    claim = f"No schedule fits {format_bytes(budget)}: {reason}."
    if not proven:
        claim = f"{solution.method} found no schedule within {format_bytes(budget)}: {reason}."
    failures = "".join(f"{solution.method} failed: {why} " for why in solution.details.get("failed", ()))
    without = smallest_without(problem, patience) if ends.peak > budget else {}
    refusal = Refusal(ends.peak, problem.graph.ops[k].name, f"{failures}{reason}", without)
    # Name the rules that ask for more bytes, and how many.
    saving = {rule.pattern: rule.text for rule in problem.rules if without.get(rule.pattern, ends.peak) < ends.peak}
    written = {pattern: format_bytes(count + reserve, up=True) for pattern, count in without.items()}
    parts = [f"without {text}, {written[pattern]} would do" for pattern, text in saving.items()]
    if without.get("", ends.peak) < min((without[pattern] for pattern in saving), default=ends.peak):
        parts.append(f"without any rule, {written['']}{'' if parts else ' would do'}")
    rules = " No rule is in the way: the smallest budget is no smaller without them." if without else ""
    if parts:
        rules = f" Rules are in the way: {'; '.join(parts)}."
    message = f"{failures}{claim} {way_out}{rules}"
    return replace(solution, refusal=refusal, message=message)


def cheapest_split(solver: Solver, *, look_on: bool = True) -> Solver:
    """Ask for the problem, or for its further splits: the cheapest plan; the last answer if none has a plan.

    Each is looked at for a moment first, and only where none has a plan then for longer: near the smallest budget a
    search may spend all its time on a problem without a plan, where the next split has one at once.

    The first split that fits may not be the cheapest: its larger parts leave less room for values that are kept. So the
    next ones are looked at, too, as long as their ops, each run once, take less time than the cheapest plan.

    Args:
        solver: is asked for each, in its share of the seconds, with a start that is split like it.
        look_on: after the first split that has a plan.
    """

    def cheapest(query: Query) -> Solution:
        start, best, interrupted = query.start, None, False
        splits_of_start = start.problem.splits if isinstance(start, Solution) else query.problem.splits
        answers: dict[int, tuple[Problem, Solution]] = {}  # in the order of splits
        problems: Iterable[Problem] = query.problem.splits_in_turn()
        moment = FIRST_SECONDS + PER_OP * len(query.problem.graph.ops)
        for patience in (moment, inf) if moment < query.seconds else (inf,):
            clock = Clock(query.seconds)
            for i, problem in enumerate(problems):
                if best is not None and (clock.is_over or problem.keep_all_cost >= (1 - WORTH_A_SPLIT) * best.cost):
                    break
                share = replace(
                    query,
                    problem=problem,
                    seconds=SHARES[min(i, len(SHARES) - 1)] * query.seconds,
                    start=start if splits_of_start == problem.splits else None,
                    patience=min(patience, query.patience),
                )
                answers[id(problem)] = problem, (answer := solver(share))
                if answer.plan is not None and (best is None or answer.cost < best.cost):
                    best = answer
                if interrupted := answer.interrupted:
                    break
                if best is not None:
                    further_cost_more = best.cost * (1 - WORTH_A_SPLIT) <= best.problem.keep_all_cost
                    if problem is query.problem or not look_on or further_cost_more:
                        break
            if best is not None or interrupted:
                break
            # There may be a plan after more than a moment. Methods but "auto" have taken all the time.
            problems = [p for p, a in answers.values() if a.status is Status.NOT_FOUND and a.method == "auto"]
        return best or [*answers.values()][-1][1]

    return cheapest


def with_halved(solution: Solution) -> Solution:
    """Add a budget that would halve a step of more than double time: ``details["halved"]``, (bytes, seconds).

    It is the smallest that was found in a second, by first plans.
    """
    problem, clock = solution.problem, Clock(HALVING)
    if problem.host is not None or problem.limits.recomputed or solution.cost <= 2 * problem.keep_all_cost:
        return solution
    halved = smallest_within(problem, solution.cost / 2, solution.budget, clock)
    return replace(solution, details={**solution.details, "halved": halved})


def check_method(name: str, options: Collection[str] = ()) -> None:
    """Raise a ValueError for an unknown method or option; it names the known ones."""
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"There is no method {name!r}. The methods are {', '.join(METHODS)}.")
    names = METHODS[name].options
    if unknown := [option for option in options if option not in names]:
        raise ValueError(f"Method {name!r} has no option {unknown[0]!r}. Its options are {', '.join(names) or 'none'}.")


def check_host(method: str, *, has_host: bool) -> None:
    """Raise a ValueError for a method that needs a second memory if there is none."""
    if METHODS[method].needs_host and not has_host:
        raise ValueError(
            f"Method {method!r} is for a step with a second memory. Give it one: compile(host_budget=...), or "
            "problem.with_host(Host(budget, send=bytes_per_second, fetch=bytes_per_second))."
        )


def check_homes(problem: Problem, method: str) -> None:
    """Raise an InvalidProblem for a method that knows of no values at home in a second memory, where there are any."""
    if problem.homes and not METHODS[method].homes:
        methods = ", ".join(name for name, other in METHODS.items() if other.homes)
        raise InvalidProblem(
            f"Method {method!r} plans no step with values at home in the second memory. Methods that do: {methods}."
        )


def check_limits(time_limit: float, gap: float) -> None:
    """Raise a ValueError for a limit that is not a number or out of range."""
    check_positive("time_limit", time_limit, " of seconds")
    if isinstance(gap, bool) or not isinstance(gap, numbers.Real) or not 0 <= gap <= 1:
        raise ValueError(f"gap is a share between 0 and 1, such as 0.01, not {gap!r}.")


def _what_it_costs(problem: Problem, reserve: int) -> str:
    """Say that the smallest budget is slow, and name one that is not: at the smallest hardly any order is left."""
    costs = slow_budget(problem, ends_of(problem, time_limit=0.0).peak, slow=SLOW)
    if costs is None:
        return ""
    slow = f" There a step takes at most {costs.times:.1f} times as long"
    if costs.times_there > SAVES * costs.times:
        return f"{slow}."
    return f"{slow}; with {format_bytes(costs.budget + reserve, up=True)}, {costs.times_there:.1f} times."


def _name(problem: Problem, k: int) -> str:
    op = problem.graph.ops[k]
    return f"{op.name} ({op.where})" if op.where else op.name


def refuse_unknown_rules(problem: Problem, method: str) -> None:
    """Raise a RuleError if a method cannot follow a rule of the problem."""
    for rule in problem.rules:
        if rule.pin is None and method not in FOLLOWS_ALL:
            raise RuleError(
                f"Method {method!r} cannot follow the rule {rule.text}: of all rules it knows 'keep' and 'once' only. "
                f"Methods that follow every rule: {', '.join(FOLLOWS_ALL)}."
            )


def smallest_without(problem: Problem, time_limit: float) -> dict[str, int]:
    """Smallest budgets in bytes without each pattern's rule; for "" without all. None if there are no rules.

    >>> dag = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[4, 1, 1, 1], forward=3)
    >>> smallest_without(with_rules(dag, {"op": "once"}), 1.0)
    {'op': 6}
    """
    rules = as_mapping(problem)
    if not rules:
        return {}
    patterns = [*rules, ""] if len(rules) > 1 else [*rules]
    seconds = max(LEAST_SECONDS, time_limit / len(patterns))
    plain, peaks = without_rules(problem), {}
    for pattern in patterns:
        other_rules = {name: asks for name, asks in rules.items() if pattern and name != pattern}
        peaks[pattern] = min_budget(with_rules(plain, other_rules), time_limit=seconds).peak
    return peaks
