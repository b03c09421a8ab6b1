"""The largest batch that fits a budget: `max_batch_size`. Any other integer that shapes the step works too.

Jain et al. (MLSys 2020, Section 6.4) scale all memory by the size, in one quadratic program. Memory is not quite affine
in the size, so here each size that is tried has a problem of its own.

Paper: https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from checkmate.backends.planner import Bytes, Options
from checkmate.capture.fusion.kernels import Kernels
from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, infeasible
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.profiling.source import Choice
from checkmate.sizes import LARGEST, TIME_LIMIT
from checkmate.sizes.batches import tokens_of
from checkmate.sizes.largest_batch import LargestBatch, SizePoint
from checkmate.sizes.search import (
    AUTO,
    KEEP_ALL,
    ONE_FORWARD,
    REACH,
    Attempt,
    Overhead,
    SizeSearch,
    check_overhead,
    is_within,
    most_seconds,
    plan_within,
    spread_sizes,
)
from checkmate.sizes.sized_steps import SizedProblems, SizedSteps, arguments_of, maker_of, real_tensors
from checkmate.solvers.search.adapt import as_start
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import check_limits, check_method, solve
from checkmate.statusline import showing
from checkmate.tracing import Batch
from checkmate.units import format_bytes, parse_budget

log = logging.getLogger("checkmate.sizes")

BASELINES = (KEEP_ALL, "chen-sqrt", "chen-greedy", "ap-sqrt", "ap-greedy")
GAP = 1e-3  # of the plans of the curve
ATTEMPTS = 30  # sizes that the time is made for
SHARES = {"keep all": 0.4, "largest": 0.7, "plan": 0.75, "baselines": 0.9}  # of the time, by when each ends
POINTS = 4  # of the curve, above the largest size that keeps all
ROUNDS = 4  # of measuring and making room for what was above the prediction


def max_batch_size(
    make_step: Callable[..., Any] | nn.Module,
    make_batch: Callable[[int], Any],
    budget: Bytes,
    *,
    max_overhead: Overhead = ONE_FORWARD,
    baselines: bool | Sequence[str] = False,
    measure: bool = False,
    profile: Choice = "measure",
    cache: bool = True,
    smallest: int = 1,
    largest: int = LARGEST,
    time_limit: float = TIME_LIMIT,
    host_budget: Bytes | None = None,
    host: Host | str | None = None,
    kernels: Kernels = "eager",
) -> LargestBatch:
    """The largest size whose step fits a budget, its plan, and the predicted throughput of smaller sizes.

    Ctrl-C, or the end of the time, gives the largest size found so far. The page docs/fit.md shows the answer, and
    docs/options.md what each option means.

    Args:
        make_step: gives the step: a module or function such as `checkmate.compile` takes. It is called once, or with
            each size, if it has one argument that must be given. A module is a step itself.
        make_batch: gives the example batch of a size, an integer of any meaning: a tuple of positional arguments, a
            dict of named ones, or one tensor. Batch and model may be on the meta device if the profile is an estimate.
        max_overhead: "one-forward" is two forwards and a backward at most; a number is as `Solution.overhead`.
        host: as for `checkmate.compile`; or a `checkmate.Host` alone, with its bytes and rates, of another machine.

    Raises:
        InfeasibleBudget: if the smallest size does not fit, or not under the cap; it names the smallest budget known.
        Unsupported: if a step cannot be made or captured; it names the size.
        HostError: if there is no such second memory, or no room in it.
        BudgetError, TypeError, ValueError: for arguments that make no sense.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to("meta")
    >>> found = max_batch_size(
    ...     model, lambda n: torch.ones(n, 64, device="meta"), budget="100 kB", profile="roofline:h100", time_limit=20
    ... )
    >>> found.size >= found.keep_all, found.solution.peak <= 100_000
    (True, True)
    """
    # Check the options before anything is traced.
    for name, size in (("smallest", smallest), ("largest", largest)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is a size, an integer of at least 1, not {size!r}.")
    if smallest > largest:
        raise ValueError(f"There is no size from {smallest} to {largest}.")
    check_limits(time_limit, 0.0)
    methods = (baselines,) if isinstance(baselines, str) else baselines
    names = BASELINES if methods is True else () if methods is False else tuple(methods)
    for name in names:
        check_method(name)
    check_overhead(max_overhead)
    total = parse_budget(budget)
    memory, place = (host, None) if isinstance(host, Host) else (None, host)
    if memory is not None and host_budget is not None:
        raise ValueError(f"A checkmate.Host has a budget, here {format_bytes(memory.budget)}: leave host_budget out.")
    options = Options(profile=profile, cache=cache, host=place, host_budget=host_budget, kernels=kernels)
    if measure and (host is not None or host_budget is not None):
        raise ValueError("measure=True runs plans without a second memory: compile the step of the answer to run it.")
    # Search, compare with other methods, draw the curve.
    advice = "smallest= and largest= say between which sizes to look."
    counted = list[float | None]()  # tokens of a sample, of each batch that is made

    def batch_of(size: int) -> Batch:
        batch = arguments_of(make_batch(size))
        tokens = tokens_of(batch)
        counted.append(None if tokens is None else tokens / size)
        return batch

    steps = SizedSteps(maker_of(make_step), batch_of, options, memory, advice)
    search = _Search(SizedProblems(steps, smallest=smallest), total, max_overhead, smallest, largest, time_limit)
    if measure:
        real_tensors(steps.make(smallest))
    with showing(search.text, share=lambda: search.seconds / time_limit):
        search.find(steps if measure else None)
        search.compare(names)
        search.draw()
    return replace(search.result(), tokens=counted[-1])


@dataclass
class _Search:
    """The state of a search, which `find`, `compare` and `draw` fill in this order, and the time left."""

    problems: Callable[[int], Problem]
    total: int  # bytes
    max_overhead: Overhead
    smallest: int
    largest: int
    time_limit: float
    began: float = field(default_factory=lambda: time.perf_counter())
    above: int = 0  # bytes that were measured above the prediction
    measured: int | None = None  # bytes of the answer as it ran
    kept: Attempt | None = None  # the largest size that keeps all
    kept_in_time: bool = True  # its search came to its end
    has_homes: bool = False  # parameters are at home in a second memory, and no plan keeps all here
    best: Attempt | None = None
    beyond: Attempt | None = None  # the smallest size that does not fit
    baselines: dict[str, SizePoint | None] = field(default_factory=dict)
    cut_short: list[str] = field(default_factory=list)  # of the baselines
    points: dict[int, SizePoint] = field(default_factory=dict)  # of the curve
    interrupted: bool = False
    last: str = "looking for the largest size"  # shown on the status line

    @property
    def budget(self) -> int:
        """Bytes to plan for."""
        return self.total - self.above

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def answer(self) -> Attempt:
        """The largest size that fits."""
        assert self.best is not None
        return self.best

    def text(self) -> str:
        return f"{self.last}, {self.seconds:.0f} of {self.time_limit:g} s"

    def note(self, attempt: Attempt) -> None:
        verdict = "fits" if attempt.fits else "does not fit" if attempt.refuted else "no plan found"
        again = f", {attempt.solution.recomputation:.1%} recomputed" if attempt.solution.plan else ""
        again += f", {attempt.point.throughput:.4g} samples/s" if attempt.fits else ""
        self.last = f"size {attempt.size} {verdict}"
        log.info("size %d: %s%s", attempt.size, verdict, again)

    def find(self, steps: SizedSteps | None) -> None:
        """Find the largest size; if steps can be measured, one whose measured peak is within the budget.

        Raises:
            InfeasibleBudget: if the smallest size does not fit.
            Unsupported: if measured peaks stay above the budget.
        """
        for _ in range(ROUNDS):
            # The largest size that keeps all is where the search with recomputation begins.
            keep_all = self._search_sizes(KEEP_ALL, SHARES["keep all"])
            self.kept, self.kept_in_time = keep_all.low, keep_all.low is None or not keep_all.is_open
            if self.interrupted:
                self.best = self.kept
                return
            self.has_homes = keep_all.has_homes
            search = self._search_sizes(AUTO, SHARES["largest"], low=None if self.has_homes else self.kept)
            if search.low is None:
                assert search.high is not None
                raise self._refusal(search.high)
            self.best, self.beyond = search.low, search.high
            # So far the first plan under the cap was taken: look for a better one.
            first, seconds = search.low.solution, self._until(SHARES["plan"]) - time.perf_counter()
            if not self.interrupted and first.gap > GAP and seconds > 0:
                better = solve(first.problem, self.budget, time_limit=seconds, gap=GAP, start=first, progress=False)
                if better.plan is not None and better.cost <= first.cost:
                    self.best = replace(search.low, solution=better)
            if steps is None or self.interrupted:
                return
            answer = self.answer
            measured = steps.measured_peak(answer.size, answer.solution)
            if measured <= self.total:
                self.measured = measured
                return
            # Plan for less, by what was measured above the prediction; the time for it begins anew.
            log.info("size %d took %s, not within the budget", answer.size, format_bytes(measured))
            self.began = time.perf_counter()
            self.above += max(1, measured - (answer.solution.peak or 0))
            if self.budget <= 0:
                taken = format_bytes(measured)
                raise Unsupported(f"The step took {taken}, which leaves nothing of the budget to plan.")
        raise Unsupported(
            f"Size {answer.size} was predicted to stay within {format_bytes(self.budget)} and took "
            f"{format_bytes(measured)} when it ran. Measure the costs of ops on this machine (profile='measure')."
        )

    def _until(self, share: float) -> float:
        return self.began + share * self.time_limit

    def _search_sizes(self, method: str, share: float, low: Attempt | None = None) -> SizeSearch:
        """Run the search of a method for a share of the time; Ctrl-C ends it early if it has an answer."""
        budgets = self.budget, self.max_overhead, self._until(share), self.time_limit / ATTEMPTS
        search = SizeSearch(self.problems, *budgets, method, self.smallest, self.largest, self.note, low)
        first = min(REACH * self.smallest, self.largest) if method == KEEP_ALL else None  # of which a line goes on well
        search.hint = first or (None if self.kept is None else self.kept.size)
        try:
            search.run()
        except KeyboardInterrupt:
            if search.low is None and self.best is None:
                raise
            search.interrupted = True
        self.interrupted |= search.interrupted
        return search

    def _refusal(self, attempt: Attempt) -> InfeasibleBudget:
        """The reason why the smallest size does not fit, and a budget that would."""
        solution, size = attempt.solution, attempt.size
        problem = solution.problem
        # Bisect for the smallest budget that works under the cap.
        least = min_budget(problem).peak
        high = problem.keep_all_peak if self.max_overhead is not None else least
        low, seconds = max(self.budget, least - 1), self.time_limit / ATTEMPTS
        while high - low > max(1, high // 1000) and time.perf_counter() < self._until(1.0):
            middle = (low + high) // 2
            trial = plan_within(problem, middle, attempt.cap, time_limit=seconds)
            low, high = (low, trial.peak or middle) if is_within(trial, attempt.cap) else (middle, high)
        # Say what stands in the way.
        largest = problem.graph.ops[int(problem.unavoidable_bytes.argmax())].name
        op = largest if solution.refusal is None else solution.refusal.op
        why = f"its best plan runs {solution.overhead:.1%} of the step again, above the cap" if solution.plan else ""
        why = why or f"{op} stands in the way" + (" (proven)" if attempt.refuted else "")
        refusal = f"Not even size {size} fits {format_bytes(self.budget)}: {why}."
        return infeasible(refusal, self.total, high + self.above, op, " for it")

    def compare(self, names: Sequence[str]) -> None:
        """Find the largest sizes of other methods, under the same cap."""
        for i, name in enumerate(names):
            if self.interrupted:
                return
            share = SHARES["plan"] + (SHARES["baselines"] - SHARES["plan"]) * (i + 1) / len(names)
            if name == KEEP_ALL:
                self.baselines[name] = None if self.kept is None else self.kept.point
                continue
            search = self._search_sizes(name, share)
            self.baselines[name] = None if search.low is None else search.low.point
            larger = None if self.has_homes else search.low  # which may have had time that ours had not
            if larger is not None and larger.size > self.answer.size:
                self.best = larger
                if self.beyond is not None and self.beyond.size <= larger.size:
                    self.beyond = None
            if search.interrupted or not search.in_time:
                self.cut_short.append(name)

    def draw(self) -> None:
        """Plan sizes up to the answer, each from the plan of the next larger one."""
        kept_plan = None if self.has_homes else self.kept
        self.points = {attempt.size: attempt.point for attempt in (self.answer, kept_plan) if attempt is not None}
        keep_all_size = 0 if self.kept is None else self.kept.size
        try:
            for size in reversed(spread_sizes(self.smallest, keep_all_size, self.answer.size, POINTS)):
                if not self.interrupted and time.perf_counter() < self._until(1.0) and size not in self.points:
                    self._plan(size, self.points[min(n for n in self.points if n > size)].solution)
        except KeyboardInterrupt:
            self.interrupted = True

    def _plan(self, size: int, start: Solution) -> None:
        """Plan a size for the curve, starting from a known plan."""
        problem = self.problems(size)
        seconds = max(0.1, min(self.time_limit / ATTEMPTS, self._until(1.0) - time.perf_counter()))
        plan = solve(problem, self.budget, time_limit=seconds, gap=GAP, progress=False, start=as_start(start, problem))
        attempt = Attempt(size, plan, most_seconds(problem, self.max_overhead))
        self.note(attempt)
        if attempt.fits:
            self.points[size] = attempt.point

    def result(self) -> LargestBatch:
        # What is known of the next larger size.
        answer, beyond = self.answer, self.beyond
        if answer.size == self.largest:
            next_size = "asked for no more"
        elif beyond is None or beyond.size > answer.size + 1:
            next_size = "not looked at"
        else:
            next_size = "proven" if beyond.refuted and not self.above else "not found"
        late = next_size == "not looked at" or time.perf_counter() > self._until(1.0)
        return LargestBatch(
            size=answer.size,
            solution=answer.solution,
            budget=self.total,
            max_overhead=self.max_overhead,
            points=tuple(self.points[size] for size in sorted(self.points)),
            keep_all=None if self.kept is None else self.kept.size,
            fastest=max(self.points.values(), key=lambda point: point.throughput),
            next_size=next_size,
            baselines=self.baselines,
            cut_short=(*self.cut_short, *([] if self.kept_in_time else [KEEP_ALL])),
            measured_peak=self.measured,
            seconds=self.seconds,
            ended="interrupted" if self.interrupted else "time limit" if late else "",
        )
