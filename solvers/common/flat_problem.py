"""A problem as plain lists, for loops that touch single values millions of times; reads and writes also as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from checkmate.core.inplace import Saving
from checkmate.core.problem import Problem
from checkmate.solvers.common.schedules import Stages


@dataclass(frozen=True)
class Tables:
    """Per op and value, plain lists. Values that no op makes are not in ``inputs``: they are always in memory."""

    inputs: list[tuple[int, ...]]  # per op
    outputs: list[tuple[int, ...]]  # per op
    users: list[tuple[int, ...]]  # per value, the ops that read it, ascending
    producer: list[int]  # per value, -1: given
    size: list[int]  # per value, bytes
    result: list[bool]  # per value: an output of the step
    seconds: list[float]  # per op
    workspace: list[int]  # per op, bytes
    savings: tuple[tuple[Saving, ...], ...]  # per op, the most first: what goes with its run, and the bytes less then
    pinned: list[bool]  # per op: it must run exactly once
    resident: int  # bytes
    max_runs: Mapping[int, int]  # per op under such a rule, how often it may run
    recomputed: frozenset[int]  # values that are not at hand when the backward begins, by a rule
    last_stage: list[int]  # per op, the last stage in which it may run
    closing: Mapping[int, tuple[int, ...]]  # per stage, what cannot be made again after it and may be missed then
    boundary: int  # the stage in which the backward begins

    @classmethod
    def of(cls, problem: Problem) -> Tables:
        """The tables of a problem."""
        graph, limits = problem.graph, problem.limits
        last = len(graph.ops) - 1
        results = set(graph.outputs)
        producer = [-1 if value.producer is None else value.producer for value in graph.values]
        return cls(
            inputs=[tuple(v for v in op.inputs if producer[v] >= 0) for op in graph.ops],
            outputs=[op.outputs for op in graph.ops],
            users=list(graph.users),
            producer=producer,
            size=problem.sizes.tolist(),
            result=[v in results and producer[v] >= 0 for v in range(len(producer))],
            seconds=problem.seconds.tolist(),
            workspace=problem.workspace.tolist(),
            savings=problem.savings,
            pinned=[op.pinned is not None for op in graph.ops],
            resident=problem.resident,
            max_runs=limits.max_runs,
            recomputed=limits.recomputed,
            last_stage=[limits.last_stage.get(k, last) if op.pinned is None else k for k, op in enumerate(graph.ops)],
            closing=limits.closing,
            boundary=graph.forward_length,
        )

    def touches(self, ops: Iterable[int]) -> list[list[tuple[int, bool]]]:
        """For each value, the positions in a sequence of ops that read or make it, ascending, with "makes it" flags."""
        touches: list[list[tuple[int, bool]]] = [[] for _ in self.producer]
        for p, k in enumerate(ops):
            for v in self.inputs[k]:
                touches[v].append((p, False))
            for v in self.outputs[k]:
                touches[v].append((p, True))
        return touches

    def seconds_of(self, stages: Stages) -> float:
        """Seconds of the ops that run in the stages."""
        return sum(self.seconds[k] for ops in stages for k in ops)


@dataclass(frozen=True, eq=False)
class Touches:
    """Readers and makers of the values that a schedule may keep: made by an op, read by others, and no results.

    A touch is a pair of a value and an op that makes or reads it. The touches of a value stand together, its producer's
    first and then its users' in order.
    """

    value: np.ndarray  # (E,) int
    op: np.ndarray  # (E,) int
    made_by: np.ndarray  # (E,) int: the producer of the value
    saved: np.ndarray  # (E,) int64: bytes less while the op runs if it writes over the value; 0 where it cannot
    earlier: tuple[np.ndarray, np.ndarray]  # pairs (e, i) of touches of one value, i before e

    @classmethod
    def of(cls, problem: Problem) -> Touches:
        """The touches of a problem."""
        graph = problem.graph
        pairs: list[tuple[int, int, int]] = []
        earlier: list[tuple[int, int]] = []
        for v, value in enumerate(graph.values):
            if value.producer is None or v in graph.outputs or not graph.users[v]:
                continue
            first = len(pairs)
            pairs += [(v, k, value.producer) for k in (value.producer, *graph.users[v])]
            earlier += [(e, i) for e in range(first, len(pairs)) for i in range(first, e)]
        savings = [dict(ways) for ways in problem.savings]
        saved = np.array([savings[k].get(v, 0) for v, k, _ in pairs], dtype=np.int64)
        value_, op, made_by = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
        late, early = np.array(earlier, dtype=np.int64).reshape(-1, 2).T
        return cls(value_, op, made_by, saved, (late, early))

    @property
    def reads(self) -> np.ndarray:
        """(E,) bool: the op reads the value; else it makes it."""
        return self.op != self.made_by

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """The values that may be kept, ascending, and their producers."""
        v, first = np.unique(self.value, return_index=True)
        return v, self.made_by[first]
