"""Plan a step from known plans: the same step's plan on disk, or a start from that of another batch size.

    the same question           -> its plan, if it is as good as asked for, or had as much time as is waited for one
    the same, other costs       -> its plan and a new bound, if that is about as good
    a smaller step, in between  -> the plan of the step before, adapted: a few seconds at most, no worse than it was
    the same ops                -> the nearest plan, adapted, and then as much time as without it
    none of these               -> a plan from nothing

A gap that is smaller than what measured costs are off by gets less than all of the time, in proportion.

What is found is kept on disk (`checkmate.core.files`), so that the second start of a script need not plan again. One
record for each question: the graph's structure, its sizes, the costs and where they come from, the bytes that are
resident, the budget, the method, and the version of checkmate that planned. It holds what runs again as a list of
(stage, op), what it was proven for, and how long was allowed to look for it. Nothing in it is believed: the plan passes
the verifier and the simulator for today's problem before it is used, and the bound counts only for the very costs,
sizes and bytes that it was proven for. A record that is damaged, or not the one it claims to be, is refused with a
warning. So many plans are kept at most; those go first that were not used for longest.
On the main path, 8 of 16: see docs/idea.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from checkmate.core import files, simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Query, Solution, Solver
from checkmate.errors import InvalidProblem, SolverError
from checkmate.solvers.common.incumbent import Clock, certify, contradicts
from checkmate.solvers.search.adapt import Start, as_start
from checkmate.units import format_seconds
from checkmate.version import __version__

log = logging.getLogger("checkmate.solve")

DERIVE_SECONDS = 3.0  # at most for a step that is no larger than one planned before in this process
BOUND_SECONDS = 3.0  # at most for a new bound, where costs have changed
WAVER = 0.01  # of the step: a plan for other costs may be worse by this much; measured costs differ by more
NEAR = 0.01  # of the room: a budget that differs by less is about the same
WORTH_A_PROCESS = 2.5  # seconds: less is waited for, as a process takes half a second to begin
BETTER = 0.01  # of the step: a plan that saves less is not worth taking over while a step is trained
SETTLING = {"settle": WAVER}  # for "auto": a gap below that is not worth all the time
TABLE = "plans_1"  # on disk
MOST_PLANS, MOST_BYTES = 1000, 2**27  # there
MOST_READ = 8  # records that are looked through for a plan to begin with, the last used first


def kept(solver: Solver, earlier: Sequence[Solution] = ()) -> Solver:
    """Answer by a known plan: as it is on disk, or with the nearest for the solver to begin with; keep the answer.

    ``origin`` is "plan cache" for a plan as it was on disk. Where a known plan was the start, it says how that differs:
    "other costs", "less time" or "another size". Plans are adapted by "auto" only.

    A query that waits for less than its seconds gets the best plan by then, and with it the `Solution.rest`, unless
    that could not matter or is not worth a process.

    Args:
        earlier: solutions of this process, for other batches of the same step.
    """

    def answered(query: Query) -> Solution:
        problem, budget, clock = query.problem, query.budget, Clock()
        by_auto, whole = query.method == "auto", query
        if budget >= problem.keep_all_peak and by_auto and not problem.limits.recomputed:
            return solver(replace(query, patience=inf, wait=inf))
        # The largest step so far gets all the time: it is what training spends most on, and of steps in any order few
        # are larger than all before. Others get little, and a gap as small as that of a step before will do.
        same = [(plan, start) for plan in earlier if (start := as_start(plan, problem)) is not None]
        if by_auto and any(plan.problem.keep_all_cost >= problem.keep_all_cost for plan, _ in same):
            gap = max(query.gap, min(plan.gap for plan, _ in same))
            query = replace(query, seconds=min(query.seconds, DERIVE_SECONDS), gap=gap)
        # A plan is waited for as long as it takes to give up.
        wait = query.wait if query.patience == inf else max(query.wait, query.patience)
        goes_on = by_auto and wait + WORTH_A_PROCESS <= query.seconds
        query = replace(query, wait=wait if goes_on else inf)
        question = Question.of(problem, budget, query.method)
        record = lookup(question) if query.cache else None
        solution: Solution | None = None
        enough = max(query.gap, BETTER) if goes_on else query.gap
        if record is not None and record.meets(min(query.wait, query.seconds), enough):
            solution = record.certified(problem, budget)
            if solution is None:
                log.warning("The plan on disk (%s) breaks the rules or the budget; planned anew.", question.key)
        if record is not None and solution is not None:
            used(question)
            log.info("plan on disk (%s): %s", question.key, solution)
            spent = record.time_limit
        else:
            records = relatives(question) if query.cache else []
            solution = _from_nearest(solver, query, record, same, records) if by_auto else solver(query)
            if solution.plan is None and query.seconds < min(whole.seconds, query.patience):
                solution = solver(replace(whole, wait=query.wait, options=SETTLING))
            # Keep the plan, with the time that was allowed for it.
            spent = min(query.seconds, max(query.wait, solution.seconds))
            if query.cache and solution.plan is not None:
                allowed = min(spent, solution.seconds) if solution.interrupted else spent
                store(Record.of(solution, query.method, allowed))
        is_open = solution.plan is not None and spent < query.seconds and not solution.interrupted
        if is_open and is_better(solution.bound, solution.cost):
            rest = replace(query, seconds=query.seconds - spent, spent=spent, patience=inf, wait=inf)
            solution = replace(solution, rest=replace(rest, start=solution, options=SETTLING))
        return replace(solution, seconds=clock.elapsed)

    return answered


def is_better(cost: float, than: float) -> bool:
    """Tell whether a plan of this cost is enough better than another to take its place."""
    return cost <= (1 - BETTER) * than


def _from_nearest(
    solver: Solver,
    query: Query,
    answer: Record | None,
    earlier: Sequence[tuple[Solution, Start]],
    records: Sequence[Record],
) -> Solution:
    problem, budget, question = query.problem, query.budget, Question.of(query.problem, query.budget, query.method)
    start: Start | None = None if answer is None else answer.certified(problem, budget)
    origin = "less time"
    # The plan of the same step for other costs and about the same room, with a bound for today's costs.
    names = ("sizes", "method", "checkmate")
    close = [
        record
        for record in records
        if all(getattr(record.question, name) == getattr(question, name) for name in names)
        and abs(record.question.room - question.room) <= NEAR * max(0, question.room)
    ]
    if start is None and close:
        record = min(close, key=lambda r: (not r.answers(question), abs(r.question.room - question.room)))
        start, origin = record.certified(problem, budget), "other costs"
        if start is not None:
            # A plan for other costs may be a little worse than what was proven for those.
            seconds, gap = min(query.seconds, query.wait), query.gap
            if will_do := record.meets(seconds, gap):
                gap = max(gap, record.gap + (0.0 if record.question.costs == question.costs else WAVER))
            bound = replace(query, seconds=min(seconds, BOUND_SECONDS), patience=inf, wait=inf)
            bounded = solver(replace(bound, gap=gap, start=start))
            duration = format_seconds(bounded.seconds)
            log.info("plan for other costs or bytes, with a new bound after %s: %s", duration, bounded)
            start = start if bounded.plan is None else bounded
            if will_do and start.gap <= gap:
                return replace(start, origin=origin)
    if start is None:
        # The plan that was made for a budget as tight as this one; of this process, where there is one.
        usable = [(plan.budget / plan.problem.keep_all_peak, start) for plan, start in earlier]
        if not usable:
            plans = ((record, record.schedule(problem)) for record in records)
            usable = [(r.question.budget / r.keep_all_peak, plan) for r, plan in plans if plan is not None]
        tight, origin = budget / problem.keep_all_peak, "another size"
        start = min(usable, key=lambda pair: abs(tight - pair[0]), default=(0.0, None))[1]
    solution = solver(replace(query, start=start, options=SETTLING))
    return solution if start is None else replace(solution, origin=origin)


@dataclass(frozen=True)
class Question:
    """The question that a plan answers. Equal questions have equal answers, apart from luck and time."""

    structure: str  # hashes: see `checkmate.core.fingerprint`
    sizes: str
    costs: str
    source: str  # where the costs come from: it names the device
    resident: int  # bytes
    budget: int  # bytes
    method: str
    checkmate: str = __version__

    @classmethod
    def of(cls, problem: Problem, budget: int, method: str) -> Question:
        """The question that a solve of this problem answers."""
        prints = fingerprints(problem)
        source, resident = problem.profile.source, problem.resident
        return cls(prints.structure, prints.sizes, prints.costs, source, resident, budget, method)

    @property
    def room(self) -> int:
        """Bytes for values that the step itself makes."""
        return self.budget - self.resident

    @property
    def key(self) -> str:
        """The key on disk. Keys of one structure share a prefix; those of one structure and sizes a longer one."""
        digest = files.hash_of([value for name, value in asdict(self).items() if name not in ("structure", "sizes")])
        return f"{self.structure[:16]}-{self.sizes[:16]}-{digest[:16]}"


@dataclass(frozen=True)
class Record:
    """An answer as it is kept on disk."""

    question: Question
    by: str  # the method's own name for the plan
    time_limit: float  # seconds that were allowed
    cost: float  # seconds of the step
    bound: float  # seconds, proven for this very question
    keep_all_peak: int  # bytes
    ops: int
    again: tuple[tuple[int, int], ...]  # (stage, op): what runs beyond each op's own stage
    steps: tuple[tuple[str | int, ...], ...] = ()  # all of a plan of which R does not say all
    boundary: int = 0  # how many of these belong to the forward

    @classmethod
    def of(cls, solution: Solution, method: str, time_limit: float) -> Record:
        """The record of a solution that has a plan."""
        assert solution.schedule is not None
        assert solution.plan is not None
        problem, again = solution.problem, np.argwhere(np.tril(solution.schedule.R, -1)).tolist()
        is_schedule = solution.plan.is_a_schedule
        steps, boundary = ((), 0) if is_schedule else (solution.plan.as_lists(), solution.plan.boundary)
        return cls(
            Question.of(problem, solution.budget, method),
            solution.method,
            float(time_limit),
            float(solution.cost),
            float(solution.bound),
            problem.keep_all_peak,
            len(problem.graph.ops),
            tuple((t, k) for t, k in again),
            tuple(map(tuple, steps)),
            boundary,
        )

    @property
    def gap(self) -> float:
        """(cost - bound) / cost."""
        return (self.cost - self.bound) / self.cost if self.cost > 0 else 0.0

    def meets(self, seconds: float, gap: float) -> bool:
        """Tell whether its gap is no larger than this, or as many seconds were allowed for it."""
        return self.gap <= gap or self.time_limit >= seconds

    def runs(self) -> np.ndarray:
        """R, (T, T) bool."""
        R = np.eye(self.ops, dtype=bool)
        if self.again:
            R[tuple(np.array(self.again).T)] = True
        return R

    def answers(self, question: Question) -> bool:
        """Tell whether the bound holds for a question: same costs and sizes, no more room than it was proven for."""
        names = ("structure", "sizes", "costs", "checkmate")
        same = all(getattr(self.question, name) == getattr(question, name) for name in names)
        return same and question.room <= self.question.room

    def schedule(self, problem: Problem) -> Schedule | None:
        """The schedule, if it is valid for this problem at any budget."""
        if len(problem.graph.ops) != self.ops:
            return None
        schedule = Schedule.from_runs(problem.graph, self.runs())
        return None if simulator.check_plan(simulator.lower(problem, schedule), problem) else schedule

    def certified(self, problem: Problem, budget: int) -> Solution | None:
        """The plan for a problem of the same structure, verified and simulated; None if it exceeds the budget."""
        if len(problem.graph.ops) != self.ops:
            return None
        bound = self.bound if self.answers(Question.of(problem, budget, self.question.method)) else 0.0
        try:
            plan = Plan.from_lists(self.steps, self.boundary) if self.steps else self.runs()
            return certify(problem, budget, plan, method=self.by, bound=bound, origin="plan cache")
        except (SolverError, IndexError):
            return None


def lookup(question: Question) -> Record | None:
    """The kept answer to a question; None if there is none, with a warning if a file is at fault."""
    for record in _read(lambda rows: rows.get([question.key])):
        if record.question == question:
            return record
        log.warning("The plan on disk (%s) answers another question; planned anew.", question.key)
    return None


def relatives(question: Question) -> list[Record]:
    """Plans of the same ops: first those with the same sizes, then others, each the last used first."""
    structure, sizes, _ = question.key.split("-")

    def look(rows: files.Rows) -> dict[str, Any]:
        return rows.beginning(f"{structure}-{sizes}-", MOST_READ) | rows.beginning(f"{structure}-", MOST_READ)

    same_ops = [record for record in _read(look) if record.question.structure == question.structure]
    return [record for record in same_ops if record.question != question]


def used(question: Question) -> None:
    """Mark an answer as used now, so that it is kept longer."""
    with contextlib.suppress(OSError), files.rows(TABLE, write=True) as rows:
        rows.note_use(question.key)


def store(record: Record) -> None:
    """Keep an answer, merged with the better parts of the known one; a warning says if that fails."""
    key = record.question.key
    try:
        with files.rows(TABLE, write=True) as rows:
            with contextlib.suppress(InvalidProblem, KeyError):  # replace a damaged record
                previous = from_document(rows.get([key])[key], "The plan on disk")
                if previous.question == record.question:
                    best = record if record.cost <= previous.cost else previous
                    bound = max((b for b in (previous.bound, record.bound) if b <= best.cost), default=record.bound)
                    record = replace(best, bound=bound, time_limit=max(previous.time_limit, record.time_limit))
            rows.put({key: as_document(record)})
            rows.prune(MOST_PLANS, MOST_BYTES)
    except OSError as error:
        log.warning("The plan is not kept for the next time: %s", error)


def _read(look: Callable[[files.Rows], dict[str, Any]]) -> Iterator[Record]:
    """The records of some rows; a warning names unreadable ones."""
    try:
        with files.rows(TABLE) as rows:
            documents = look(rows)
    except OSError as error:
        log.warning("Plans on disk cannot be read: %s", error)
        return
    for key, document in documents.items():
        try:
            yield from_document(document, f"The record {key}")
        except InvalidProblem as error:
            log.warning("A plan on disk is refused: %s", error)


def from_document(document: dict[str, Any], origin: str) -> Record:
    """Make a record from `as_document`'s output, from disk or another process; ``origin`` names it in errors.

    Raises:
        InvalidProblem: if it is no plan of checkmate.
    """
    try:
        record = Record(**{**document, "question": Question(**document["question"])})
        record = replace(record, again=tuple((t, k) for t, k in record.again), steps=tuple(map(tuple, record.steps)))
        # What is computed with before the plan is certified.
        figures = (record.time_limit, record.cost, record.bound, record.question.resident, record.question.budget)
        in_range = all(0 <= figure < inf for figure in figures) and record.keep_all_peak > 0
        if not in_range or contradicts(record.bound, record.cost):
            raise ValueError("a figure is out of range")
        if not all(0 <= k < t < record.ops for t, k in record.again):
            raise ValueError("what runs again is out of range")
        Plan.from_lists(record.steps, record.boundary)  # raises for what is none
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidProblem(f"{origin} is no valid plan: {error}") from None
    return record


def as_document(record: Record) -> dict[str, Any]:
    """The record as a JSON document."""
    return json.loads(json.dumps(asdict(record)))
