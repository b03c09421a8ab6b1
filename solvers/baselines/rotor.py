"""Optimal checkpointing of chains whose segments differ, by dynamic programming over segments and memory.

O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", 2019 (the tool is called rotor).

The chain of segments is read off the graph. The forward is cut where all its data flows through one value: after the
cut no op of the forward reads anything older but that value, and what is at hand anyway (results of the step, what
pinned ops make, what is there before the step). An op of the backward belongs to the segment whose values it reads; in
the order of the graph the backward must go from the last segment to the first. The bytes of a segment come from running
it on paper. Where there is no chain the method does not apply, and says so.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import ops_for, without_forbidden, without_useless
from checkmate.units import format_bytes

METHOD = "rotor"
SLOTS = 500  # into which memory is divided
MOST_SEGMENTS = 100  # longer chains are thinned evenly: the dynamic program grows with the cube of the length
MOST_TOLD = 1.25  # times the budget: the most memory that the program is told

Action = tuple[str, int]  # "pass", "keep" or "backward", and the segment


class NotAChain(Exception):
    """The reason why the step is no chain of segments."""


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
    reasons, tried = [], list[list[Segment]]()
    for fine in (False, True):
        try:
            segments = segments_of(problem, fine=fine)
        except NotAChain as reason:
            reasons.append(str(reason))
            continue
        if segments in tried or (tried and task.clock.elapsed >= task.clock.seconds / 2):
            continue
        tried.append(segments)
        table = CostTable.of(measure(problem, segments), -(-int(task.budget * MOST_TOLD) // SLOTS), SLOTS)
        # bisect on the memory that the program is told, over the amounts at which its optimum changes
        last = len(segments) - 1
        costs = table.seconds[0, last]
        told = [m for m in range(len(costs)) if np.isfinite(costs[m]) and (m == 0 or costs[m] < costs[m - 1])]
        low, high = 0, len(told) - 1
        while low <= high:
            middle = (low + high) // 2
            R = runs_of(problem, segments, table.actions(0, last, told[middle]))
            if not incumbent.fits(R):
                high = middle - 1
                continue
            low = middle + 1
            if incumbent.offer(R, METHOD):
                details = {"segments": len(segments), "told": told[middle] * table.unit}
    if len(reasons) == 2:
        return Remarks(f"does not apply: {reasons[-1]}")
    least = incumbent.least_peak
    note = "" if least is None else f"; that of least memory takes {format_bytes(least)}"
    return Remarks("" if details else f"no persistent schedule of the chain fits{note}", details)


class Option(NamedTuple):
    """A way to begin: keep the first segment, or run ahead to a cut and come back when all that follows it is done."""

    cut: int | None  # the segment after the cut; None: keep
    follows: int  # the segment with which the rest begins
    seconds: float  # spent passing
    gone: int  # slots that the rest does without
    least: int  # slots that it takes


@dataclass(frozen=True, eq=False)
class CostTable:
    """The fewest seconds, beyond one run of each op, for segments s to t within m slots of memory.

    ``seconds[s, t]`` (slots + 1,) float64, infinite where m is too little. What enters s is at hand and not counted in
    m; unless t is the last segment, all of them have run before.
    """

    chain: Chain
    unit: int  # bytes of a slot
    slots: int
    seconds: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, chain: Chain, unit: int, slots: int) -> CostTable:
        """Fill the table, from few segments to many, grouped by the last one.

        C(s, t, m) = min(keep s:   C(s+1, t, m - ā_s)                                   if s fits while it keeps
                         cut at r: Σ_{s≤k<r} u_k + C(r, t, m - a_{r-1}) + C(s, r-1, m)  if s..r-1 fit passing)
        """
        table = cls(chain, max(1, unit), slots)
        for t in range(len(chain)):
            for s in reversed(range(t + 1)):
                best = table.seconds[s, t] = np.full(slots + 1, math.inf)
                for option in table.options(s, t):
                    if option.least <= slots:
                        np.minimum(best[option.least :], table.costs(option, s, t), out=best[option.least :])
        return table

    def options(self, s: int, t: int) -> Iterator[Option]:
        """The ways to begin with segments s to t."""
        chain, first_time = self.chain, t == len(self.chain) - 1
        around = chain.always[t] + chain.gradient[t]
        replay = chain.replay[s : t + 1].cumsum().tolist()

        def option(cut: int | None, seconds: float, gone: int, least: int) -> Option:
            gone, least = -(-int(gone) // self.unit), -(-int(least) // self.unit)
            return Option(cut, s + 1 if cut is None else cut, seconds, gone, max(gone, least))

        waits = replay[0] if first_time else replay[-1]
        least = max(around + chain.keep_peak[s] + waits, chain.always[s] + chain.backward_peak[s])
        yield option(None, 0.0, chain.kept[s] if s < t else 0, least)
        price = chain.keep_seconds if first_time else chain.pass_seconds
        before = np.concatenate([[0], chain.output[s:t]])[: t - s]  # the input of s is not counted
        peaks = np.maximum.accumulate(chain.pass_peak[s:t] + before + (replay[:-1] if first_time else waits)).tolist()
        seconds, output = price[s:t].cumsum().tolist(), chain.output[s:t].tolist()
        for i in range(t - s):
            yield option(s + i + 1, seconds[i], output[i] + replay[i], around + max(0, peaks[i]))

    def costs(self, option: Option, s: int, t: int) -> np.ndarray:
        """(slots + 1 - least,) seconds of segments s to t if they begin with this option, from its fewest slots on."""
        end = self.slots + 1 - option.gone
        rest = self.seconds[option.follows, t] if option.follows <= t else np.zeros(self.slots + 1)
        costs = rest[option.least - option.gone : end] + option.seconds
        return costs if option.cut is None else costs + self.seconds[s, option.cut - 1][option.least :]

    def actions(self, s: int, t: int, m: int) -> list[Action]:
        """The actions of an optimal schedule of segments s to t within m slots."""
        able = [option for option in self.options(s, t) if option.least <= m]
        chosen = min(able, key=lambda option: self.costs(option, s, t)[m - option.least])
        inner = self.actions(chosen.follows, t, m - chosen.gone) if chosen.follows <= t else []
        if chosen.cut is None:
            return [("keep", s), *inner, ("backward", s)]
        return [*(("pass", k) for k in range(s, chosen.cut)), *inner, *self.actions(s, chosen.cut - 1, m)]


@dataclass(frozen=True)
class Segment:
    """Forward ops between two single values, and the backward ops that belong to them."""

    forward: range  # ops
    backward: range  # ops
    leaves: int | None  # the value it ends in; None: nothing but what is at hand anyway
    saved: frozenset[int]  # the values it makes that its backward reads, and what leaves
    runs_to_pass: tuple[int, ...]  # the ops that run again to make only what leaves
    runs_to_keep: tuple[int, ...]  # the ops that run again to make all that is saved


@dataclass(frozen=True)
class Chain:
    """Bytes and seconds of L segments, each an array (L,); letters in brackets are those of Beaumont et al.

    A segment passes where it runs and only what leaves it stays; it keeps where all that is saved stays. Bytes of peaks
    are counted without the value that enters the segment.
    """

    pass_seconds: np.ndarray  # float64, of passing again (u_f)
    keep_seconds: np.ndarray  # float64, of keeping, when it has run before
    output: np.ndarray  # int64, bytes of what leaves (a)
    kept: np.ndarray  # bytes of all that is saved (ā)
    gradient: np.ndarray  # bytes at hand for the backwards from this segment on, made by those before (δ)
    pass_peak: np.ndarray  # bytes while it passes (a + o_f)
    keep_peak: np.ndarray  # bytes while it keeps (ā + o_f)
    backward_peak: np.ndarray  # bytes while its backward runs (δ + ā + o_b)
    replay: np.ndarray  # bytes made by its pinned ops that wait for it to keep, once it has passed
    always: np.ndarray  # bytes that are there in any case while segments up to this one are worked on

    def __len__(self) -> int:
        return len(self.output)


def segments_of(problem: Problem, *, fine: bool = False) -> list[Segment]:
    """The segments of a step, at least two.

    Args:
        fine: cut also where the backward never reads what flows across, which costs its bytes; segments are shorter.

    Raises:
        NotAChain: if the forward has fewer, or the backward does not go through them in order.
    """
    graph, first = problem.graph, problem.graph.forward_length
    if first == len(graph.ops):
        raise NotAChain("the step has no backward")
    anyway = at_hand_anyway(graph)
    # cuts: the op that follows, and the one value that flows across, or None
    last_read = [max((j for j in users if j < first), default=-1) for users in graph.users]
    cuts: list[tuple[int, int | None]] = []
    flowing: set[int] = set()
    for p in range(1, first):
        flowing.update(v for v in graph.ops[p - 1].outputs if v not in anyway)
        flowing = {v for v in flowing if last_read[v] >= p}
        if len(flowing) <= 1:
            value = next(iter(flowing), None)
            read_late = value is None or graph.users[value][-1] >= first
            if (fine or read_late) and (not cuts or cuts[-1][1] != value):
                cuts.append((p, value))
    cuts = cuts[:: -(-len(cuts) // (MOST_SEGMENTS - 1)) or 1]
    # belongs: the segment of each op of the backward; if it reads what flows across a cut, the later one if it can
    segment_of = np.searchsorted([p for p, _ in cuts], np.arange(first), side="right")
    across = {value for _, value in cuts}
    belongs, segment = [], len(cuts)
    for op in graph.ops[first:]:
        read = [(v, p) for v in op.inputs if v not in anyway and (p := graph.values[v].producer or 0) < first]
        segment = min([segment, *(int(segment_of[p]) + (v in across) for v, p in read)])
        for v, p in read:
            if segment_of[p] > segment:
                raise NotAChain(f"{op.name} of the backward reads {graph.values[v].name} out of the order of a chain")
        belongs.append(segment)
    starts = [first + sum(i < segment for segment in belongs) for i in range(len(cuts) + 1)] + [len(graph.ops)]
    own = [i for i in range(len(cuts) + 1) if starts[i] < starts[i - 1]]  # segments with a backward of their own
    if len(own) < 2:
        raise NotAChain("all data of the forward flows through one value nowhere, or only before what needs a backward")
    segments, begin = [], 0
    for i in own:  # a segment without a backward joins the next that has one
        end, leaves = (first, None) if i == own[-1] else cuts[i]
        forward, backward = range(begin, end), range(starts[i], starts[i - 1])
        flows = set() if leaves is None else {leaves}
        outputs = {v for k in forward for v in graph.ops[k].outputs} - anyway
        saved = frozenset(outputs.intersection(v for k in backward for v in graph.ops[k].inputs) | flows)
        runs_to_pass, runs_to_keep = (ops_for(graph, forward, values, anyway) for values in (flows, saved))
        segments.append(Segment(forward, backward, leaves, saved, runs_to_pass, runs_to_keep))
        begin = end
    return segments


def at_hand_anyway(graph: Graph) -> frozenset[int]:
    """The values that stay in memory from their first execution on under every choice."""
    inputs = (v for v, value in enumerate(graph.values) if value.producer is None)
    pinned = (v for op in graph.ops if op.pinned is not None for v in op.outputs)
    return frozenset([*graph.outputs, *inputs, *pinned])


def measure(problem: Problem, segments: list[Segment]) -> Chain:
    """The bytes and seconds of the segments."""
    graph, anyway, results = problem.graph, at_hand_anyway(problem.graph), set(problem.graph.outputs)
    again = {k for segment in segments for k in segment.runs_to_keep}

    def size(values: Iterable[int]) -> int:
        return sum(int(problem.sizes[v]) for v in values)

    def gradients(b: int) -> set[int]:
        """The values, no results, that the backward makes before op b and reads at b or later."""
        values = (v for op in graph.ops[graph.forward_length : b] for v in op.outputs)
        return {v for v in values if graph.users[v] and graph.users[v][-1] >= b} - results

    rows, lasting, late = [], [], []
    for s in segments:
        flows = set() if s.leaves is None else {s.leaves}
        # bytes that pinned ops make: those that only this segment needs to run again are its replay; those that the
        # backward reads, or that run other segments again, last from this segment on
        own, replays, lasts = set(s.runs_to_keep), 0, 0
        pinned = (graph.ops[k].outputs for k in s.forward if graph.ops[k].pinned is not None)
        for v in {v for outputs in pinned for v in outputs} - results:
            users = set(graph.users[v])
            if any(j >= graph.forward_length for j in users) or users & again - own:
                lasts += size([v])
            elif users & own:
                replays += size([v])
        lasting.append(lasts)
        late.append(results.intersection(v for k in s.backward for v in graph.ops[k].outputs))
        read = {v for k in s.backward for v in graph.ops[k].inputs}
        before, after = gradients(s.backward.start), gradients(s.backward.stop)
        rows.append(
            {
                "pass_seconds": problem.seconds[list(s.runs_to_pass)].sum(),
                "keep_seconds": problem.seconds[list(s.runs_to_keep)].sum(),
                "output": size(flows),
                "kept": size(s.saved),
                "gradient": size(before),
                "pass_peak": _peak(problem, s.forward, (), flows, anyway),
                "keep_peak": _peak(problem, s.forward, (), s.saved, anyway),
                "backward_peak": _peak(problem, s.backward, (s.saved & read) | before, after | results, frozenset()),
                "replay": replays,
            }
        )
    late_bytes = np.array([size(values) for values in late])
    always = problem.resident + size(results.difference(*late)) + np.cumsum(lasting)
    always += late_bytes[::-1].cumsum()[::-1] - late_bytes
    return Chain(**{name: np.array([row[name] for row in rows]) for name in rows[0]}, always=always)


def _peak(problem: Problem, ops: range, start: Iterable[int], stays: Iterable[int], uncounted: frozenset[int]) -> int:
    """The peak of these ops, from the values in memory before; all values but ``stays`` go after their last use."""
    graph, sizes, at_hand, stays = problem.graph, problem.sizes, set(start), set(stays)
    live = peak = int(sum(sizes[v] for v in at_hand))
    for k in ops:
        outputs = set(graph.ops[k].outputs) - uncounted
        at_hand |= outputs
        live += int(sum(sizes[v] for v in outputs))
        peak = max(peak, live + int(problem.workspace[k]))
        touched = at_hand.intersection((*graph.ops[k].inputs, *graph.ops[k].outputs)) - stays
        gone = {v for v in touched if not any(j in ops and j > k for j in graph.users[v])}
        at_hand -= gone
        live -= int(sum(sizes[v] for v in gone))
    return peak


def runs_of(problem: Problem, segments: list[Segment], actions: list[Action]) -> np.ndarray:
    """R (T, T) bool: repeated forward ops run in the stage of the first op of the backward that follows."""
    R = np.eye(len(problem.graph.ops), dtype=bool)
    seen: set[int] = set()
    waiting: list[int] = []
    for kind, i in actions:
        if kind == "backward":
            R[segments[i].backward.start, waiting] = True
            waiting = []
        elif i in seen:
            waiting += segments[i].runs_to_keep if kind == "keep" else segments[i].runs_to_pass
        seen.add(i)
    return without_useless(problem.graph, without_forbidden(problem, R))
