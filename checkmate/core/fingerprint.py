"""Hashes of a problem's graph, bytes and seconds, by which plans of the same or a similar step are found."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from weakref import WeakKeyDictionary

from checkmate.core.problem import Problem

_fingerprints: WeakKeyDictionary[Problem, Fingerprints] = WeakKeyDictionary()


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 of the parts of a problem, in hexadecimal."""

    structure: str  # the ops, what they read, make and overwrite, what rules forbid, homes; not their names
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
    if problem not in _fingerprints:
        graph = problem.graph
        ops = [(op.target, op.inputs, op.outputs, op.pinned is not None, op.phase) for op in graph.ops]
        structure = ops, [value.producer for value in graph.values], graph.outputs
        if limits := problem.limits:
            structure = *structure, [*limits.max_runs.items()], sorted(limits.recomputed)  # type: ignore[assignment]
        if graph.overwritten_by:
            structure = *structure, [*graph.overwritten_by.items()]  # type: ignore[assignment]
        if problem.homes:
            structure = *structure, sorted(problem.homes), sorted(problem.kept)  # type: ignore[assignment]
        sizes = problem.sizes.tolist(), problem.workspace.tolist()
        if problem.profile.ways:
            ways = [(way.op, way.makes, way.over, way.workspace) for way in problem.profile.ways]
            sizes = *sizes, ways  # type: ignore[assignment]
        costs = problem.seconds.tolist()
        if problem.host is not None:
            costs = [*costs, *astuple(problem.host)]
        if graph.links:
            costs = [*costs, *graph.links.items()]
        _fingerprints[problem] = Fingerprints(_hash(structure), _hash(sizes), _hash(costs))
    return _fingerprints[problem]


def same_ops(a: Problem, b: Problem) -> bool:
    """Tell whether two problems have the same ops on the same values in one order; bytes and seconds may differ."""
    return fingerprints(a).structure == fingerprints(b).structure


def renumbered(problem: Problem, like: Problem) -> tuple[list[int], list[int]] | None:
    """The ops and the values of a step, in the order of the same step at another size; None if that has other ops.

    The order may change with the size: which gradients come last depends on their bytes. Names stay.

    >>> step = Problem.from_dag([[], [], [0, 1]], seconds=[1, 2, 3], sizes=[4, 4, 4])
    >>> other = Problem(step.graph.in_order([1, 0, 2]), step.profile)
    >>> same_ops(other, step), renumbered(other, step)
    (False, ([1, 0, 2], [0, 1, 2]))
    """
    if same_ops(problem, like):
        return [*range(len(like.graph.ops))], [*range(len(like.graph.values))]
    if len(problem.graph.ops) != len(like.graph.ops) or _by_name(problem) != _by_name(like):
        return None
    ops = {op.name: k for k, op in enumerate(problem.graph.ops)}
    values = {value.name: v for v, value in enumerate(problem.graph.values)}
    return [ops[op.name] for op in like.graph.ops], [values[value.name] for value in like.graph.values]


def _by_name(problem: Problem) -> tuple[object, ...]:
    """The graph with names in place of numbers, and which values are at home elsewhere."""
    graph = problem.graph
    names = [value.name for value in graph.values]
    ops = {
        op.name: (op.target, op.phase, op.pinned is None, *([names[v] for v in vs] for vs in (op.inputs, op.outputs)))
        for op in graph.ops
    }
    overwritten = {names[v]: graph.ops[k].name for v, k in graph.overwritten_by.items()}
    homes = ({names[v] for v in vs} for vs in (problem.homes, problem.kept))
    return ops, overwritten, {names[v] for v in graph.outputs}, sorted(names), *homes


def _hash(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()
