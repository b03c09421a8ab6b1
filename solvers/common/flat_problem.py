"""A problem as plain lists, for loops that touch single values millions of times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkmate.core.problem import Problem
from checkmate.core.ways import Saving


@dataclass(frozen=True)
class Tables:
    """Who reads and makes what. Values that no op makes are left out of ``inputs``: they are always at hand."""

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
    most_runs: Mapping[int, int]  # per op under such a rule, how often it may run
    gone: frozenset[int]  # values that are not at hand when the backward begins, by a rule
    until: list[int]  # per op, the last stage in which it may run
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
            most_runs=limits.most_runs,
            gone=limits.gone,
            until=[limits.until.get(k, last) if op.pinned is None else k for k, op in enumerate(graph.ops)],
            closing=limits.closing,
            boundary=graph.forward_length,
        )

    def seconds_of(self, stages: list[list[int]]) -> float:
        """Seconds of the ops that run in each stage."""
        return sum(self.seconds[k] for ops in stages for k in ops)
