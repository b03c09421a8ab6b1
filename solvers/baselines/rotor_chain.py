"""A training step as a chain of segments: what `checkmate.solvers.baselines.rotor` plans with, read off the graph.

The forward is cut where all its data flows through one value: after the cut no op of the forward reads anything older
but that value, and what is at hand anyway (results of the step, what pinned ops make, what is there before the step).
An op of the backward belongs to the segment whose values it reads; in the order of the graph the backward must go from
the last segment to the first. The bytes of a segment come from running it on paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem

MOST_SEGMENTS = 100  # longer chains are thinned evenly: the dynamic program grows with the cube of the length


class NotAChain(Exception):
    """Why the step has no chain of segments."""


@dataclass(frozen=True)
class Segment:
    """Ops of the forward that follow on one value and end in one, and the ops of the backward that belong to them."""

    forward: range  # ops
    backward: range  # ops
    enters: int | None  # the value it follows on; None: nothing but what is at hand anyway
    leaves: int | None  # the value it ends in; None likewise
    saved: frozenset[int]  # the values it makes that its backward reads, and what leaves
    runs_to_pass: tuple[int, ...]  # the ops that run again to make only what leaves
    runs_to_keep: tuple[int, ...]  # the ops that run again to make all that is saved


@dataclass(frozen=True)
class Chain:
    """Bytes and seconds of L segments, each an array (L,); in brackets the letters of Beaumont et al.

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
        fine: cut also where the backward never reads the value that flows across. To hold it costs its bytes even
            where all is kept; but shorter segments can take less memory.

    Raises:
        NotAChain: if the forward has fewer, or the backward does not go through them in order.
    """
    graph = problem.graph
    if graph.forward_length == len(graph.ops):
        raise NotAChain("the step has no backward")
    anyway = at_hand_anyway(graph)
    cuts = _cuts(graph, anyway, fine)
    cuts = cuts[:: -(-len(cuts) // (MOST_SEGMENTS - 1)) or 1]
    starts = _backward_starts(graph, anyway, cuts)
    own = [i for i in range(len(cuts) + 1) if starts[i] < starts[i - 1]]  # segments with a backward of their own
    if len(own) < 2:
        raise NotAChain("all data of the forward flows through one value nowhere, or only before what needs a backward")
    begins = [0, *(cuts[i][0] for i in own[:-1])]  # what has none joins the next segment that has one
    values = [None, *(cuts[i][1] for i in own[:-1]), None]
    ends = [*begins[1:], graph.forward_length]
    return [
        _segment(graph, anyway, range(begins[r], ends[r]), range(starts[i], starts[i - 1]), values[r], values[r + 1])
        for r, i in enumerate(own)
    ]


def at_hand_anyway(graph: Graph) -> frozenset[int]:
    """The values that are at hand from their first execution on, whatever is kept."""
    given = (v for v, value in enumerate(graph.values) if value.producer is None)
    pinned = (v for op in graph.ops if op.pinned is not None for v in op.outputs)
    return frozenset([*graph.outputs, *given, *pinned])


def _cuts(graph: Graph, anyway: frozenset[int], fine: bool) -> list[tuple[int, int | None]]:
    """Where the forward can be cut: the op that follows, and the one value that flows across, or None."""
    last_read = [max((j for j in users if j < graph.forward_length), default=-1) for users in graph.users]
    cuts: list[tuple[int, int | None]] = []
    across: set[int] = set()
    for p in range(1, graph.forward_length):
        across.update(v for v in graph.ops[p - 1].outputs if v not in anyway)
        across = {v for v in across if last_read[v] >= p}
        if len(across) <= 1:
            value = next(iter(across), None)
            read_late = value is None or graph.users[value][-1] >= graph.forward_length
            if (fine or read_late) and (not cuts or cuts[-1][1] != value):
                cuts.append((p, value))
    return cuts


def _backward_starts(graph: Graph, anyway: frozenset[int], cuts: list[tuple[int, int | None]]) -> list[int]:
    """(L + 1,) the op with which the backward of each segment begins, and at index -1 the end of the backward.

    An op that reads what flows across a cut may belong to either side: it goes to the later segment if it can.
    """
    first, L = graph.forward_length, len(cuts) + 1
    segment_of = np.searchsorted([p for p, _ in cuts], np.arange(first), side="right")
    across = {value for _, value in cuts}
    belongs, now = [], L - 1
    for op in graph.ops[first:]:
        read = [(v, p) for v in op.inputs if v not in anyway and (p := graph.values[v].producer or 0) < first]
        now = min([now, *(int(segment_of[p]) + (v in across) for v, p in read)])
        for v, p in read:
            if segment_of[p] > now:
                raise NotAChain(f"{op.name} of the backward reads {graph.values[v].name} out of the order of a chain")
        belongs.append(now)
    return [first + sum(i < now for now in belongs) for i in range(L)] + [len(graph.ops)]


def _segment(
    graph: Graph, anyway: frozenset[int], forward: range, backward: range, enters: int | None, leaves: int | None
) -> Segment:
    flows = set() if leaves is None else {leaves}
    made = {v for k in forward for v in graph.ops[k].outputs} - anyway
    saved = frozenset(made.intersection(v for k in backward for v in graph.ops[k].inputs) | flows)
    return Segment(
        forward,
        backward,
        enters,
        leaves,
        saved,
        _runs_for(graph, forward, flows, anyway),
        _runs_for(graph, forward, saved, anyway),
    )


def _runs_for(graph: Graph, forward: range, values: Iterable[int], anyway: frozenset[int]) -> tuple[int, ...]:
    """The ops of a segment that make these values from what enters and what is at hand anyway, ascending."""
    needed, runs = set(values), []
    for k in reversed(forward):
        if not needed.isdisjoint(graph.ops[k].outputs):
            runs.append(k)
            needed.update(v for v in graph.ops[k].inputs if v not in anyway)
    return tuple(reversed(runs))


def measure(problem: Problem, segments: list[Segment]) -> Chain:
    """What the segments cost."""
    graph, sizes, anyway = problem.graph, problem.sizes, at_hand_anyway(problem.graph)
    flows = [frozenset() if segment.leaves is None else frozenset([segment.leaves]) for segment in segments]
    results = set(graph.outputs)
    replay, lasting = _pinned_bytes(problem, segments)
    late = [{v for k in s.backward for v in graph.ops[k].outputs} & results for s in segments]
    late_bytes = np.array([sizes[list(values)].sum() for values in late])
    early_bytes = int(sizes[list(results.difference(*late))].sum())
    return Chain(
        pass_seconds=np.array([problem.seconds[list(s.runs_to_pass)].sum() for s in segments]),
        keep_seconds=np.array([problem.seconds[list(s.runs_to_keep)].sum() for s in segments]),
        output=np.array([sizes[list(values)].sum() for values in flows]),
        kept=np.array([sizes[list(s.saved)].sum() for s in segments]),
        gradient=np.array([sizes[list(_gradients(graph, s.backward.start))].sum() for s in segments]),
        pass_peak=np.array([_peak(problem, s.forward, (), v, anyway) for s, v in zip(segments, flows, strict=True)]),
        keep_peak=np.array([_peak(problem, s.forward, (), s.saved, anyway) for s in segments]),
        backward_peak=np.array([_backward_peak(problem, s) for s in segments]),
        replay=replay,
        always=problem.resident + early_bytes + np.cumsum(lasting) + late_bytes[::-1].cumsum()[::-1] - late_bytes,
    )


def _pinned_bytes(problem: Problem, segments: list[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that pinned ops make in each segment (L,): those that only it needs to run again, and those that last.

    The others are read by the backward, or run other segments again, and are counted from their segment on.
    """
    graph, results = problem.graph, set(problem.graph.outputs)
    replay, lasting = np.zeros(len(segments), dtype=np.int64), np.zeros(len(segments), dtype=np.int64)
    again = {k for segment in segments for k in segment.runs_to_keep}
    for i, segment in enumerate(segments):
        own = set(segment.runs_to_keep)
        for k in segment.forward:
            for v in graph.ops[k].outputs if graph.ops[k].pinned is not None else ():
                users = set(graph.users[v])
                if v in results:
                    continue
                if any(j >= graph.forward_length for j in users) or users & again - own:
                    lasting[i] += problem.sizes[v]
                elif users & own:
                    replay[i] += problem.sizes[v]
    return replay, lasting


def _gradients(graph: Graph, b: int) -> set[int]:
    """The values, no results, that the backward makes before op b for b or later ops."""
    made = (v for op in graph.ops[graph.forward_length : b] for v in op.outputs)
    return {v for v in made if graph.users[v] and graph.users[v][-1] >= b}.difference(graph.outputs)


def _backward_peak(problem: Problem, segment: Segment) -> int:
    """Bytes while the backward of a segment runs, from what is saved for it and the gradients so far."""
    graph, ops = problem.graph, segment.backward
    read = {v for k in ops for v in graph.ops[k].inputs}
    stays = _gradients(graph, ops.stop).union(graph.outputs)
    return _peak(problem, ops, (segment.saved & read) | _gradients(graph, ops.start), stays, frozenset())


def _peak(problem: Problem, ops: range, start: Iterable[int], stays: Iterable[int], uncounted: frozenset[int]) -> int:
    """Bytes while these ops run, from the values that are here on; all but those that stay go after their last use."""
    graph, sizes, here, stays = problem.graph, problem.sizes, set(start), set(stays)
    live = peak = int(sum(sizes[v] for v in here))
    for k in ops:
        made = set(graph.ops[k].outputs) - uncounted
        here |= made
        live += int(sum(sizes[v] for v in made))
        peak = max(peak, live + int(problem.workspace[k]))
        touched = here.intersection((*graph.ops[k].inputs, *graph.ops[k].outputs)) - stays
        gone = {v for v in touched if not any(j in ops and j > k for j in graph.users[v])}
        here -= gone
        live -= int(sum(sizes[v] for v in gone))
    return peak
