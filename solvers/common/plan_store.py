"""Plans kept on disk, so that the second start of a script need not plan again.

One JSON file for each question: the graph's structure, its sizes, the costs and where they come from, the bytes that
are resident, the budget, the method, and the version of checkmate that planned. A file holds what runs again as a list
of (stage, op), what it was proven for, and how long was allowed to look for it. Nothing in it is believed: the plan
passes the verifier and the simulator for today's problem before it is used, and the bound counts only for the very
costs, sizes and bytes that it was proven for. A file that is damaged, or not the one it claims to be, is refused with a
warning. The folder holds so many plans at most; those go first that were not used for longest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkmate.core import files, simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.graph import MAX_BYTES
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution
from checkmate.errors import InvalidProblem, SolverError
from checkmate.solvers.common.incumbent import certify, contradicts
from checkmate.version import __version__

log = logging.getLogger("checkmate.solve")

FORMAT, VERSION = "checkmate-plan", 1
MOST_PLANS, MOST_BYTES = 1000, 2**27  # on disk
MOST_READ = 8  # files that are looked through for a plan to begin with, the last used first
ABANDONED_SECONDS = 3600.0  # a half-written file of that age is of a process that died


@dataclass(frozen=True)
class Question:
    """What a plan answers. Equal questions have equal answers, but for luck and time."""

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
        """The question that a solve answers."""
        prints = fingerprints(problem)
        source, resident = problem.profile.source, problem.resident
        return cls(prints.structure, prints.sizes, prints.costs, source, resident, budget, method)

    @property
    def room(self) -> int:
        """Bytes for what the step itself makes."""
        return self.budget - self.resident

    @property
    def path(self) -> Path:
        """The file of the answer. Those of one structure, and of one structure and sizes, begin alike."""
        rest = files.hash_of([value for name, value in asdict(self).items() if name not in ("structure", "sizes")])
        return folder() / f"{self.structure[:16]}-{self.sizes[:16]}-{rest[:16]}.json"


@dataclass(frozen=True)
class Record:
    """An answer as it is kept."""

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
        """What to keep of a solution that has a plan."""
        assert solution.schedule is not None
        assert solution.plan is not None
        problem, again = solution.problem, np.argwhere(np.tril(solution.schedule.R, -1)).tolist()
        said = solution.plan.is_a_schedule
        steps, boundary = ((), 0) if said else (solution.plan.as_lists(), solution.plan.boundary)
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

    def runs(self) -> np.ndarray:
        """R, (T, T) bool."""
        R = np.eye(self.ops, dtype=bool)
        if self.again:
            R[tuple(np.array(self.again).T)] = True
        return R

    def answers(self, question: Question) -> bool:
        """Whether its bound holds there: for the same costs and sizes, and no more room than it was proven for."""
        names = ("structure", "sizes", "costs", "checkmate")
        same = all(getattr(self.question, name) == getattr(question, name) for name in names)
        return same and question.room <= self.question.room

    def schedule(self, problem: Problem) -> Schedule | None:
        """The schedule, if it is one of this problem, whatever the budget."""
        if len(problem.graph.ops) != self.ops:
            return None
        schedule = Schedule.from_runs(problem.graph, self.runs())
        return None if simulator.verify(simulator.lower(problem, schedule), problem) else schedule

    def certified(self, problem: Problem, budget: int) -> Solution | None:
        """The plan for a problem of the same structure, verified and simulated; None if it does not fit the budget."""
        if len(problem.graph.ops) != self.ops:
            return None
        bound = self.bound if self.answers(Question.of(problem, budget, self.question.method)) else 0.0
        about: dict[str, Any] = {"method": self.by, "bound": bound, "origin": "plan cache"}
        try:
            found = Plan.from_lists(self.steps, self.boundary) if self.steps else self.runs()
            return certify(problem, budget, found, **about)
        except (SolverError, IndexError):
            return None


def folder() -> Path:
    """Where the plans are."""
    return files.folder() / "plans"


def lookup(question: Question) -> Record | None:
    """The answer to this very question; None, with a warning where there is reason for one, if there is none."""
    record = _read_or_warn(question.path)
    if record is not None and record.question != question:
        log.warning("%s answers another question than its name says; planned anew.", question.path)
        return None
    return record


def relatives(question: Question) -> list[Record]:
    """Plans of the same ops: those with the same sizes first, then others, in each the last used first."""
    patterns = (f"{question.structure[:16]}-{question.sizes[:16]}-*.json", f"{question.structure[:16]}-*.json")
    latest = [path for pattern in patterns for _, _, path in _by_age(pattern)[:MOST_READ]]
    found = [_read_or_warn(path) for path in dict.fromkeys(latest) if path != question.path]
    return [record for record in found if record is not None and record.question.structure == question.structure]


def used(question: Question) -> None:
    """Note that an answer was used, so that it stays."""
    with contextlib.suppress(OSError):
        os.utime(question.path)


def store(record: Record) -> None:
    """Keep an answer, together with the better parts of what is known already; a warning says if that fails."""
    path = record.question.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(folder() / "plans"):
            with contextlib.suppress(InvalidProblem, OSError):  # what is damaged is replaced
                known = read(path)
                if known.question == record.question:
                    record = _merged(known, record)
            files.write_json(path, as_document(record))
            _prune()
    except OSError as error:
        log.warning("The plan is not kept for the next time: %s", error)


def read(path: str | os.PathLike[str]) -> Record:
    """Read a file.

    Raises:
        InvalidProblem: if it is no plan of checkmate, or was changed.
        OSError: if it cannot be read.
    """
    return from_document(files.read_json(Path(path), format=FORMAT, version=VERSION, what="plan"), str(path))


def from_document(document: dict[str, Any], origin: str) -> Record:
    """Take back what `as_document` made, and a file or another process kept; ``origin``: what to call that.

    Raises:
        InvalidProblem: if it is no plan of checkmate, or was changed.
    """
    rest = files.without_checksum(document, origin)
    try:
        fields = {name: value for name, value in rest.items() if name not in ("format", "version", "question")}
        record = Record(Question(**rest["question"]), **fields)
        _check(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidProblem(f"{origin} is no valid plan: {error}") from None
    return replace(record, again=tuple((t, k) for t, k in record.again), steps=tuple(map(tuple, record.steps)))


def as_document(record: Record) -> dict[str, Any]:
    """The record as JSON holds it."""
    document = {"format": FORMAT, "version": VERSION, **asdict(record)}
    if not record.steps:
        del document["steps"], document["boundary"]
    return files.with_checksum(document)


def _check(record: Record) -> None:
    """Raise a ValueError or TypeError for what is of the wrong kind or out of range."""
    asked = record.question
    texts = [*(getattr(asked, field.name) for field in fields(Question) if field.type == "str"), record.by]
    wrong = [text for text in texts if not isinstance(text, str)]
    counts = (asked.resident, asked.budget, record.keep_all_peak, record.ops)
    wrong += [count for count in counts if type(count) is not int or not 0 <= count <= MAX_BYTES]
    figures = (record.time_limit, record.cost, record.bound)
    wrong += [figure for figure in figures if not isinstance(figure, float) or not 0 <= figure < math.inf]
    if wrong or not record.keep_all_peak or not record.ops or contradicts(record.bound, record.cost):
        raise ValueError(f"{wrong[0] if wrong else 'a figure'!r:.100} is out of range")
    Plan.from_lists(record.steps, record.boundary)  # raises for what is none
    if not isinstance(record.again, list):
        raise TypeError(f"again is {type(record.again)}")
    for t, k in record.again:
        if type(t) is not int or type(k) is not int or not 0 <= k < t < record.ops:
            raise ValueError(f"again has {(t, k)!r:.100}")


def _read_or_warn(path: Path) -> Record | None:
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (InvalidProblem, OSError) as error:
        log.warning("A plan on disk is refused: %s", error)
        return None


def _merged(known: Record, new: Record) -> Record:
    """The cheaper plan, the better bound, the longer time."""
    best = new if new.cost <= known.cost else known
    bound = max((b for b in (known.bound, new.bound) if b <= best.cost), default=new.bound)
    return replace(best, bound=bound, time_limit=max(known.time_limit, new.time_limit))


def _by_age(pattern: str) -> list[tuple[float, int, Path]]:
    """Seconds since the epoch at which files were last used, and their bytes; the last used first."""
    found = []
    for path in folder().glob(pattern):
        with contextlib.suppress(OSError):  # taken away just now
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    return sorted(found, reverse=True)


def _prune() -> None:
    """Drop what was not used for longest, beyond so many plans and bytes, and what processes that died left behind."""
    total = 0
    for i, (_, size, path) in enumerate(_by_age("*.json")):
        total += size
        if i >= MOST_PLANS or total > MOST_BYTES:
            path.unlink(missing_ok=True)
    for written, _, path in _by_age(".*.tmp"):
        if time.time() - written > ABANDONED_SECONDS:
            path.unlink(missing_ok=True)
