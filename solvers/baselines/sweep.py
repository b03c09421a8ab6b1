"""Try many settings of a heuristic, and answer with the cheapest schedule that fits the budget.

Which setting is best is seen only by simulating: neither cost nor peak need be monotone in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkmate.solvers.baselines.checkpoint_places import why_no_chain
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Task
from checkmate.units import exact_bytes

COARSE = 0.5  # the share of the trials that spreads over all settings; the others go to where the best was


@dataclass
class Sweep:
    """Which settings were tried so far."""

    task: Task
    incumbent: Incumbent
    method: str
    tried: int = 0
    best: int | None = None  # the setting of the best schedule
    closest: int | None = None  # the setting of the smallest peak

    def offer(self, setting: int, R: np.ndarray) -> None:
        """Offer the schedule of a setting."""
        least = self.incumbent.least_peak
        self.tried += 1
        if self.incumbent.offer(R, self.method):
            self.best = setting
        if self.incumbent.least_peak != least:
            self.closest = setting

    def remarks(self, details: dict[str, Any], *, remedy: str = "") -> Remarks:
        """What there is to say: how many settings were tried and, where none fits, the smallest peak and the remedy."""
        details = {**details, "tried": self.tried}
        if self.best is not None:
            return Remarks(details=details)
        peak = self.incumbent.least_peak
        assert peak is not None
        return Remarks(f"the smallest peak it reaches is {exact_bytes(peak)}{remedy}", {**details, "peak": peak})


def cheapest(
    task: Task, incumbent: Incumbent, method: str, settings: int, runs: Callable[[int], np.ndarray], *, tries: int
) -> Sweep:
    """Offer the schedules of settings 0, …, settings - 1, of which ``runs`` gives R (T, T): all, if the tries suffice.

    Else half of the tries spread evenly, and the others halve the gaps between settings tried, first those beside the
    best so far: the cheapest that fits, or where none does the one with the smallest peak. One at least is tried.
    """
    sweep = Sweep(task, incumbent, method)
    coarse = settings if settings <= tries else max(2, int(COARSE * tries))
    done = sorted({round(i) for i in np.linspace(0, settings - 1, coarse).tolist()})
    for count, setting in enumerate(done):
        if count and task.clock.is_over:
            return sweep
        sweep.offer(setting, runs(setting))
    while sweep.tried < tries and not task.clock.is_over:
        setting = _between(done, sweep.closest if sweep.best is None else sweep.best)
        if setting is None:
            break
        done = sorted([*done, setting])
        sweep.offer(setting, runs(setting))
    return sweep


def _between(done: Sequence[int], centre: int | None) -> int | None:
    """The middle of the widest gap beside a setting that was tried, else of the widest at all; None without a gap."""
    gaps = [(centre in (a, b), b - a, (a + b) // 2) for a, b in itertools.pairwise(done) if b - a > 1]
    return max(gaps)[2] if gaps else None


def does_not_apply(task: Task, instead: str) -> Remarks | None:
    """What to say where the forward is no chain, with what else can be asked for; None where it is one."""
    reason = why_no_chain(task.problem)
    if reason is None:
        return None
    return Remarks(f"it is for chains, and this forward is none ({reason}); {instead} apply to any graph")
