"""Plan a step from what is known: the same step's plan on disk, or that of another batch size, to begin with.

    the same question           -> its plan, if it is as good as asked for, or there was as much time for it
    the same, other costs       -> its plan and a new bound, if that is about as good
    a smaller step, in between  -> the plan of the step before, adapted: a few seconds at most, no worse than it was
    the same ops                -> the nearest plan, adapted, and then as much time as without it
    none of these               -> a plan from nothing

A gap that is smaller than what measured costs are off by gets less than all of the time, in proportion. What is found
is kept on disk (`checkmate.solvers.common.plan_store`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from checkmate.core.fingerprint import fingerprints
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.solvers.common import plan_store as plan_cache
from checkmate.solvers.common.plan_store import Question, Record
from checkmate.solvers.common.task import Clock
from checkmate.solvers.solve import attempt
from checkmate.units import format_seconds

log = logging.getLogger("checkmate.solve")

GAP = 1e-4  # asked for
DERIVE_SECONDS = 3.0  # at most for a step that is no larger than one planned before in this process
BOUND_SECONDS = 3.0  # at most for a new bound, where costs have changed
WAVER = 0.01  # of the step: a plan for other costs may be worse by this much; measured costs differ by more
NEAR = 0.01  # of the room: a budget that differs by less is about the same
LONGER = 5  # times as long is looked for a plan where none is found
WORTH_A_PROCESS = 2.5  # seconds: less is waited for, as a process takes half a second to begin
BETTER = 0.01  # of the step: a plan that saves less is not worth taking over while a step is trained


def begin(
    problem: Problem,
    budget: int,
    *,
    method: str = "auto",
    time_limit: float = 60.0,
    earlier: Sequence[Solution] = (),
    cache: bool = True,
    wait: float = inf,
    patience: float = inf,
) -> tuple[Solution, UnfinishedSearch | None]:
    """The plan of a step after so many seconds, and what is then still open; None: nothing that could matter.

    An answer without a plan does not say why; `checkmate.solvers.solve.refused` adds that. ``origin`` says "plan cache"
    where the plan is as it was on disk; "other costs", "less time" or "another size" where it began with a plan that
    was found for or in these.

    Args:
        problem: what to schedule; it is not split further.
        budget: bytes.
        method: see `solve`. Plans are adapted by "auto" only.
        time_limit: seconds.
        earlier: solutions of this process, for other batches of the same step.
        cache: read plans from disk, and keep this one there.
        wait: seconds to look for a plan; longer where none is found meanwhile, and all of the time where the method is
            not "auto".
        patience: seconds after which "auto" gives up without a plan.
    """
    clock = Clock()
    if budget >= problem.keep_all_peak and method == "auto" and not problem.limits.gone:
        return attempt(problem, budget, time_limit=time_limit), None
    wish = _wish(problem, budget, method, time_limit, earlier)
    wait = max(wait, patience) if patience < inf else wait
    early = method == "auto" and wait + WORTH_A_PROCESS <= wish.limit
    known = plan_cache.lookup(wish.question) if cache else None
    enough = replace(wish, gap=max(wish.gap, BETTER)) if early else wish
    solution = None if known is None else _recall(problem, enough, known)
    if solution is not None:
        return replace(solution, seconds=clock.elapsed), None
    records = plan_cache.relatives(wish.question) if cache else []
    spent = wait if early else wish.limit
    ends: dict[str, Any] = {"patience": patience, "enough": wait if early else inf} if method == "auto" else {}
    while True:
        asked = replace(wish, limit=spent, time_limit=spent) if spent < wish.limit else wish
        solution = _begin(problem, asked, known, earlier, records, ends)
        if solution.status is not Status.NOT_FOUND or spent >= min(patience, wish.limit):
            break
        spent = LONGER * spent if LONGER * spent + WORTH_A_PROCESS <= wish.limit else wish.limit
    spent = min(spent, max(wait, solution.seconds)) if early else spent
    if cache and solution.plan is not None:
        kept = min(spent, solution.seconds) if solution.interrupted else spent
        plan_cache.store(Record.of(solution, method, kept))
    solution = replace(solution, seconds=clock.elapsed)
    if spent >= wish.limit or solution.plan is None:
        return solution, None
    unfinished = UnfinishedSearch(problem, budget, solution, wish.limit - spent, wish.gap, spent, cache)
    return solution, None if unfinished.is_closed else unfinished


@dataclass(frozen=True)
class UnfinishedSearch:
    """What is still open where a plan was taken before planning had come to its end."""

    problem: Problem
    budget: int  # bytes
    start: Solution  # the plan that was taken
    seconds: float  # that planning may go on
    gap: float  # to stop at
    spent: float  # seconds that were allowed before
    cache: bool  # plans are kept on disk

    @property
    def is_closed(self) -> bool:
        """No schedule can be notably better, or the user has ended planning by Ctrl-C."""
        return self.start.interrupted or not self.is_better(self.start.bound, self.start.cost)

    def is_better(self, cost: float, than: float) -> bool:
        """Whether a plan of this cost is worth taking over from one of another."""
        return cost <= (1 - BETTER) * than

    def bare(self) -> UnfinishedSearch:
        """The same without PyTorch: another process can be sent it."""
        problem = replace(self.problem, emit=None, smaller=None)
        return replace(self, problem=problem, start=replace(self.start, problem=problem, details={}))

    def keep(self, solution: Solution, seconds: float) -> None:
        """Keep a plan on disk that was found in so many seconds of those left."""
        if self.cache:
            plan_cache.store(Record.of(solution, "auto", self.spent + seconds))


@dataclass(frozen=True)
class _Wish:
    """What is asked for."""

    question: Question
    limit: float  # seconds to look for it
    gap: float  # to stop at
    time_limit: float  # seconds, if nothing is found in the limit

    def met_by(self, record: Record) -> bool:
        """Looking again would give no better plan, or need not."""
        return record.gap <= self.gap or record.time_limit >= self.limit


def _wish(problem: Problem, budget: int, method: str, time_limit: float, earlier: Sequence[Solution]) -> _Wish:
    """A step that is no larger than one before gets little time, and a gap as small as that one's will do.

    The largest step so far gets all the time: it is what training spends most on, and of steps in any order few are
    larger than all before.
    """
    question = Question.of(problem, budget, method)
    before = _same_ops(problem, earlier)
    if method != "auto" or all(other.problem.keep_all_cost < problem.keep_all_cost for other in before):
        return _Wish(question, time_limit, GAP, time_limit)
    gap = max(GAP, min(other.gap for other in before))
    return _Wish(question, min(time_limit, DERIVE_SECONDS), gap, time_limit)


def _same_ops(problem: Problem, earlier: Sequence[Solution]) -> list[Solution]:
    structure = fingerprints(problem).structure
    return [s for s in earlier if s.plan is not None and fingerprints(s.problem).structure == structure]


def _recall(problem: Problem, wish: _Wish, known: Record) -> Solution | None:
    """The plan on disk for this question, if it is good enough."""
    if not wish.met_by(known):
        return None
    solution = known.certified(problem, wish.question.budget)
    if solution is None:
        log.warning("The plan in %s breaks the rules or the budget; planned anew.", wish.question.path)
        return None
    plan_cache.used(wish.question)
    log.info("plan from %s: %s", wish.question.path, solution)
    return solution


def _begin(
    problem: Problem,
    wish: _Wish,
    known: Record | None,
    earlier: Sequence[Solution],
    records: Sequence[Record],
    ends: dict[str, Any],
) -> Solution:
    """Solve, from the nearest known plan on, if the method can begin with one; ``ends``: options of "auto"."""
    budget = wish.question.budget
    if wish.question.method != "auto":
        return attempt(problem, budget, method=wish.question.method, time_limit=wish.time_limit)
    start: Solution | Schedule | None = None if known is None else known.certified(problem, budget)
    origin = "less time"
    if start is None and (close := [record for record in records if _is_close(record, wish.question)]):
        record = min(close, key=lambda r: (not r.answers(wish.question), abs(r.question.room - wish.question.room)))
        start, origin = _bounded(problem, wish, record), "other costs"
        if start is not None and wish.met_by(record) and start.gap <= _about(wish, record):
            return replace(start, origin=origin)
    if start is None:
        start, origin = _nearest(problem, budget, _same_ops(problem, earlier), records), "another size"
    if start is None:
        return attempt(problem, budget, time_limit=wish.limit, settle=WAVER, **ends)
    asked: dict[str, Any] = {"settle": WAVER, **ends}
    solution = attempt(problem, budget, time_limit=wish.limit, gap=wish.gap, start=start, **asked)
    if solution.plan is None and wish.limit < min(wish.time_limit, ends["patience"]):
        return attempt(problem, budget, time_limit=wish.time_limit, **asked)
    return replace(solution, origin=origin)


def _is_close(record: Record, question: Question) -> bool:
    """The same step, for about the same room."""
    names = ("sizes", "method", "checkmate")
    same = all(getattr(record.question, name) == getattr(question, name) for name in names)
    return same and abs(record.question.room - question.room) <= NEAR * max(0, question.room)


def _about(wish: _Wish, record: Record) -> float:
    """The gap to stop at, where a plan for other costs is at hand."""
    same_costs = record.question.costs == wish.question.costs
    return max(wish.gap, record.gap + (0.0 if same_costs else WAVER)) if wish.met_by(record) else wish.gap


def _bounded(problem: Problem, wish: _Wish, record: Record) -> Solution | None:
    """A plan for the same step, with today's costs and a bound for them; None if it does not fit."""
    start = record.certified(problem, wish.question.budget)
    if start is None:
        return None
    limit = min(wish.limit, BOUND_SECONDS)
    found = attempt(problem, wish.question.budget, time_limit=limit, gap=_about(wish, record), start=start)
    log.info("plan for other costs or bytes, with a new bound after %s: %s", format_seconds(found.seconds), found)
    return start if found.plan is None else found


def _nearest(
    problem: Problem, budget: int, earlier: Sequence[Solution], records: Sequence[Record]
) -> Solution | Schedule | None:
    """The plan that was made for a budget as tight as this one; of this process, where there is one."""

    def far(budget_then: int, keep_all: int) -> float:
        return abs(budget / problem.keep_all_peak - budget_then / keep_all)

    if earlier:
        return min(earlier, key=lambda s: far(s.budget, s.problem.keep_all_peak))
    usable = [(record, schedule) for record in records if (schedule := record.schedule(problem)) is not None]
    return min(usable, key=lambda pair: far(pair[0].question.budget, pair[0].keep_all_peak))[1] if usable else None
