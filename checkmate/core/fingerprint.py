"""Hashes of a problem's graph, bytes and seconds, by which plans of the same or a similar step are found."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from weakref import WeakKeyDictionary

from checkmate.core.problem import Problem

_known: WeakKeyDictionary[Problem, Fingerprints] = WeakKeyDictionary()


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 of the parts of a problem, in hexadecimal."""

    structure: str  # the ops, what they read, make and overwrite, and what rules forbid; not their names
    sizes: str  # bytes of each value, workspace and ways of each op; what is resident is not among them
    costs: str  # seconds of each op, what links carry, and the second memory with its links


def fingerprints(problem: Problem) -> Fingerprints:
    """The hashes of a problem.

    >>> small = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> large = Problem.from_dag([[], [0]], seconds=[2, 2], sizes=[8, 8])
    >>> fingerprints(small).structure == fingerprints(large).structure
    True
    >>> fingerprints(small).sizes == fingerprints(large).sizes
    False
    """
    if problem not in _known:
        graph = problem.graph
        ops = [(op.target, op.inputs, op.outputs, op.pinned is not None, op.phase) for op in graph.ops]
        structure = ops, [value.producer for value in graph.values], graph.outputs
        if limits := problem.limits:
            structure = *structure, [*limits.max_runs.items()], sorted(limits.recomputed)  # type: ignore[assignment]
        if graph.overwritten_by:
            structure = *structure, [*graph.overwritten_by.items()]  # type: ignore[assignment]
        sizes = problem.sizes.tolist(), problem.workspace.tolist()
        if problem.profile.ways:
            ways = [(way.op, way.makes, way.over, way.workspace) for way in problem.profile.ways]
            sizes = *sizes, ways  # type: ignore[assignment]
        costs = problem.seconds.tolist()
        if problem.host is not None:
            costs = [*costs, *astuple(problem.host)]
        if graph.links:
            costs = [*costs, *graph.links.items()]
        _known[problem] = Fingerprints(_hash(structure), _hash(sizes), _hash(costs))
    return _known[problem]


def same_ops(a: Problem, b: Problem) -> bool:
    """Tell whether two problems have the same ops on the same values; bytes and seconds may differ."""
    return fingerprints(a).structure == fingerprints(b).structure


def _hash(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()
