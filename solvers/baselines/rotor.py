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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.baselines.rotor_chain import Chain, NotAChain, Segment, measure, segments_of
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.runs import without_forbidden, without_useless
from checkmate.solvers.common.task import Task
from checkmate.units import format_bytes

METHOD = "rotor"
SLOTS = 500  # into which memory is divided
MOST_TOLD = 1.25  # times the budget: the most memory that the program is told

Action = tuple[str, int]  # "pass", "keep" or "backward", and the segment


def rotor(task: Task, incumbent: Incumbent) -> Remarks:
    """The cheapest persistent schedule of a chain of segments that fits, simulated.

    Cuts are tried where the backward reads what flows across, then everywhere, the latter only if half of the time is
    left; each takes a few seconds at most. No plan where none fits, or the step is no chain; the message says which.

    >>> from checkmate import solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> solve(chain, 4, method="rotor").cost
    5.0
    """
    problem = task.problem
    if task.budget >= problem.keep_all_peak:
        incumbent.offer(np.eye(len(problem.graph.ops), dtype=bool), METHOD)
        return Remarks()
    details: dict[str, int] = {}
    reasons, chains = [], list[list[Segment]]()
    for fine in (False, True):
        try:
            segments = segments_of(problem, fine=fine)
        except NotAChain as reason:
            reasons.append(str(reason))
            continue
        if segments not in chains and (not chains or task.clock.elapsed < task.clock.limit / 2):
            details = _search(task, incumbent, segments) or details
            chains.append(segments)
    if len(reasons) == 2:
        return Remarks(f"does not apply: {reasons[-1]}")
    least = incumbent.least_peak
    taken = "" if least is None else f"; that of least memory takes {format_bytes(least)}"
    return Remarks("" if details else f"no persistent schedule of the chain fits{taken}", details)


def _search(task: Task, incumbent: Incumbent, segments: list[Segment]) -> dict[str, int]:
    """Bisect on the memory that the program is told, over the amounts at which its optimum changes.

    What there is to say of the plan that became the best; nothing where none did.
    """
    table = Table.of(measure(task.problem, segments), -(-int(task.budget * MOST_TOLD) // SLOTS), SLOTS)
    costs = table.seconds[0, len(segments) - 1]
    told = [m for m in range(len(costs)) if np.isfinite(costs[m]) and (m == 0 or costs[m] < costs[m - 1])]
    low, high, details = 0, len(told) - 1, dict[str, int]()
    while low <= high:
        middle = (low + high) // 2
        R = runs_of(task.problem, segments, table.actions(told[middle]))
        if not incumbent.fits(R):
            high = middle - 1
            continue
        low = middle + 1
        if incumbent.offer(R, METHOD):
            details = {"segments": len(segments), "told": told[middle] * table.unit}
    return details


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
    return without_useless(problem.graph, without_forbidden(problem, R))


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
