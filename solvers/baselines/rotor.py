"""Optimal checkpointing of chains whose segments differ, by dynamic programming over segments and memory.

O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", 2019 (the tool is called rotor). `rotor_chain` reads the chain off the
graph; where there is none, the method does not apply, and says so.

The optimum is one among persistent schedules: what is kept at a cut stays until the backward of the segment after it,
and a segment whose inner values are kept does not run again. Others can be better, so this is no bound. Where we differ
from the paper: a segment that has run before costs only what makes the wanted values again, seconds are those beyond
running each op once, and the bytes of pinned ops and of the step's results are counted. Memory is counted in slots and
rounded up, so that the plan may take less memory than the program thinks, or, where segments are not quite alike, more;
the memory that the program is told is searched for by simulating its plans.

Paper: https://arxiv.org/abs/1911.13214
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.solvers.baselines.rotor_chain import Chain, NotAChain, Segment, measure, segments_of
from checkmate.solvers.common.certify import certify
from checkmate.solvers.common.runs import cost_of, peak_of, without_useless
from checkmate.units import format_bytes

METHOD = "rotor"
SLOTS = 500  # into which memory is divided
MOST_TOLD = 1.25  # times the budget: the most memory that the program is told

Action = tuple[str, int]  # "pass", "keep" or "backward", and the segment


def rotor(problem: Problem, budget: int, *, time_limit: float = 20.0) -> Solution:
    """The cheapest persistent schedule of a chain of segments that fits, simulated.

    Cuts are tried where the backward reads what flows across, then everywhere, the latter only if half of the time
    limit (seconds) is left; each takes a few seconds at most. NOT_FOUND where none fits, or the step is no chain; the
    message says which.

    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> rotor(chain, 4).cost
    5.0
    """
    began = time.perf_counter()
    if budget >= problem.keep_all_peak:
        return certify(problem, budget, np.eye(len(problem.graph.ops), dtype=bool), method=METHOD)
    search, reasons = ChainSearch(problem, budget), []
    chains: list[list[Segment]] = []
    for fine in (False, True):
        try:
            segments = segments_of(problem, fine=fine)
        except NotAChain as reason:
            reasons.append(str(reason))
            continue
        if segments not in chains and (not chains or time.perf_counter() - began < time_limit / 2):
            search.run(segments)
            chains.append(segments)
    seconds = time.perf_counter() - began
    if search.R is not None:
        details = {"segments": search.segments, "told": search.told}
        return certify(problem, budget, search.R, method=METHOD, seconds=seconds, details=details)
    message = f"does not apply: {reasons[-1]}" if len(reasons) == 2 else search.message
    return Solution(Status.NOT_FOUND, problem, budget, METHOD, seconds=seconds, message=message)


class ChainSearch:
    """The cheapest plan so far that fits, over chains and the memory that the program is told."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.R: np.ndarray | None = None
        self.cost = math.inf
        self.segments = 0  # of the best plan's chain
        self.told = 0  # bytes, for the best plan
        self.least_peak: int | None = None  # of plans that do not fit

    @property
    def message(self) -> str:
        """What was found instead of a plan that fits."""
        least = f"; that of least memory takes {format_bytes(self.least_peak)}" if self.least_peak is not None else ""
        return f"no persistent schedule of the chain fits{least}"

    def run(self, segments: list[Segment]) -> None:
        """Bisect on the memory that is told, over the amounts at which the optimum changes."""
        table = Table.of(measure(self.problem, segments), -(-int(self.budget * MOST_TOLD) // SLOTS), SLOTS)
        costs = table.seconds[0, len(segments) - 1]
        told = [m for m in range(len(costs)) if np.isfinite(costs[m]) and (m == 0 or costs[m] < costs[m - 1])]
        low, high = 0, len(told) - 1
        while low <= high:
            middle = (low + high) // 2
            R = runs_of(self.problem, segments, table.actions(told[middle]))
            peak, cost = peak_of(self.problem, R), cost_of(self.problem, R)
            if peak > self.budget:
                high = middle - 1
                self.least_peak = min(peak, self.least_peak or peak)
                continue
            low = middle + 1
            if cost < self.cost:
                self.R, self.cost, self.segments, self.told = R, cost, len(segments), told[middle] * table.unit


def runs_of(problem: Problem, segments: list[Segment], actions: list[Action]) -> np.ndarray:
    """R (T, T) bool: forwards that are repeated run in the stage of the next backward's first op."""
    R = np.eye(len(problem.graph.ops), dtype=bool)
    seen: set[int] = set()
    waiting: list[int] = []
    for what, i in actions:
        if what == "backward":
            R[segments[i].backward.start, waiting] = True
            waiting = []
        elif i in seen:
            waiting += segments[i].runs_to_keep if what == "keep" else segments[i].runs_to_pass
        seen.add(i)
    return without_useless(problem.graph, R)


class Option(NamedTuple):
    """A way to begin: keep the first segment, or pass up to a cut and come back when what follows on it is done."""

    cut: int | None  # None: keep
    follows: int  # the segment with which the rest begins
    seconds: float  # spent passing
    gone: int  # slots that the rest does without
    least: int  # slots that it takes


@dataclass(frozen=True, eq=False)
class Table:
    """The least seconds, beyond running each op once, for segments s to t within m slots of memory.

    ``seconds[s, t]`` (slots + 1,) float64, infinite where m is too little. What enters s is at hand and not counted in
    m; unless t is the last segment, all of them have run before.
    """

    chain: Chain
    unit: int  # bytes of a slot
    slots: int
    seconds: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, chain: Chain, unit: int, slots: int) -> Table:
        """Fill the table, from short to long stretches that end in the same segment.

        C(s, t, m) = min(keep s:   C(s+1, t, m - ā_s)                                   if s fits while it keeps
                         cut at r: Σ_{s≤k<r} u_k + C(r, t, m - a_{r-1}) + C(s, r-1, m)  if s..r-1 fit passing)
        """
        table = cls(chain, max(1, unit), slots)
        for t in range(len(chain)):
            for s in reversed(range(t + 1)):
                best = table.seconds[s, t] = np.full(slots + 1, math.inf)
                for option in table.options(s, t):
                    start, rest = option.least, slice(option.least - option.gone, slots + 1 - option.gone)
                    if start <= slots:
                        after = table.after(option, t)[rest] + option.seconds
                        if option.cut is not None:
                            after += table.seconds[s, option.cut - 1][start:]
                        np.minimum(best[start:], after, out=best[start:])
        return table

    def after(self, option: Option, t: int) -> np.ndarray:
        """(slots + 1,) the seconds of what follows on an option, up to segment t."""
        return np.zeros(self.slots + 1) if option.follows > t else self.seconds[option.follows, t]

    def options(self, s: int, t: int) -> Iterator[Option]:
        """What can be done first, for segments s to t."""
        chain, first_time = self.chain, t == len(self.chain) - 1
        around = chain.always[t] + chain.gradient[t]
        price = chain.keep_seconds if first_time else chain.pass_seconds
        replay = chain.replay[s : t + 1].cumsum().tolist()
        waits = replay[0] if first_time else replay[-1]
        least = max(around + chain.keep_peak[s] + waits, chain.always[s] + chain.backward_peak[s])
        yield self._option(None, s + 1, 0.0, chain.kept[s] if s < t else 0, least)
        before = np.concatenate([[0], chain.output[s:t]])[: t - s]  # what enters s is not counted
        peaks = (chain.pass_peak[s:t] + before + (replay[:-1] if first_time else waits)).tolist()
        seconds, output, peak = price[s:t].cumsum().tolist(), chain.output[s:t].tolist(), 0
        for i in range(t - s):
            peak = max(peak, peaks[i])
            yield self._option(s + i + 1, s + i + 1, seconds[i], output[i] + replay[i], around + peak)

    def _option(self, cut: int | None, follows: int, seconds: float, gone: int, least: int) -> Option:
        gone, least = self._slots(gone), self._slots(least)
        return Option(cut, follows, seconds, gone, max(gone, least))

    def _slots(self, size: int) -> int:
        return -(-int(size) // self.unit)

    def actions(self, m: int) -> list[Action]:
        """What an optimal schedule within m slots does."""
        return self._actions(0, len(self.chain) - 1, m)

    def _actions(self, s: int, t: int, m: int) -> list[Action]:
        def seconds(option: Option) -> float:
            if m < option.least:
                return math.inf
            again = 0.0 if option.cut is None else float(self.seconds[s, option.cut - 1][m])
            return option.seconds + float(self.after(option, t)[m - option.gone]) + again

        chosen = min(self.options(s, t), key=seconds)
        inner = self._actions(chosen.follows, t, m - chosen.gone) if chosen.follows <= t else []
        if chosen.cut is None:
            return [("keep", s), *inner, ("backward", s)]
        return [*(("pass", k) for k in range(s, chosen.cut)), *inner, *self._actions(s, chosen.cut - 1, m)]
