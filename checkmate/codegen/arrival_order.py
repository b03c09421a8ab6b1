"""Find out whether anything else in the running backward adds to a gradient before a compiled step does.

A compiled step's backward asks this of its own node of autograd: to hand over its contributions one by one then
(`checkmate.codegen.contributions`), or to refuse what it cannot add in that order (`refused_backwards`).

Autograd runs a backward in the order of descending sequence numbers: what was computed last comes first. So the
question is whether a node of a higher number leads to the same gradient and is a part of this backward. From a node
only what follows can be reached, not what leads to it; what leads to it is found from where the backward began, and
that is found on the stack, in the call of PyTorch that runs the engine.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
from traceback import walk_stack
from typing import Any

import torch
from torch.autograd import graph

from checkmate.torch_internals.engine import _current_graph_task_id, _engine_run_backward, _will_engine_execute_node

Edge = tuple[Any, int]  # a node of autograd, and which of its inputs
FIRST = float("inf")  # sequence number of the beginning of a backward


def verdicts(fan: Any) -> tuple[int, ...]:
    """The slots of a `Fan` to which something else contributes first; all slots if unknown."""
    task = _current_graph_task_id()
    # One walk through what is differentiated decides for all of them in it, and is kept for this backward.
    if getattr(fan, "verdict", (None,))[0] != task:
        fan.verdict = task, tuple(range(len(fan.counts)))
        numbers, nodes = arrivals(fan) or ({}, ())
        for f in nodes:
            if type(f) is type(fan):
                edges = [f.next_functions[sum(f.counts[:slot])] for slot in range(len(f.counts))]
                f.verdict = task, tuple(slot for slot, edge in enumerate(edges) if is_before(numbers, edge, f))
    slots: tuple[int, ...] = fan.verdict[1]
    return slots if slots and _will_engine_execute_node(fan) else ()


def is_before(numbers: dict[Edge, list[float]], edge: Edge, node: Any) -> bool:
    """Tell whether another node contributes to an edge before this one."""
    return max(numbers.get(edge, ()), default=-1) > node._sequence_nr()


def arrivals(node: Any) -> tuple[dict[Edge, list[float]], dict[Any, None]] | None:
    """The contributions to each edge in the backward that reaches a node, and its nodes; None if unknown.

    Contributions are told by the sequence numbers of the nodes that they come from, or `FIRST`.
    """
    for roots in _beginnings():
        nodes = reachable(root for root, _ in roots)
        if node in nodes:
            numbers: dict[Edge, list[float]] = {edge: [FIRST] for edge in roots}
            for other in nodes:
                edges = [edge for edge in other.next_functions if edge[0] is not None]
                if edges and _will_engine_execute_node(other):
                    for edge in edges:
                        numbers.setdefault(edge, []).append(other._sequence_nr())
            return numbers, nodes
    return None


def reachable(roots: Iterable[Any]) -> dict[Any, None]:
    """These nodes of autograd's graph, and all nodes that a backward from them can reach."""
    stack = list(roots)
    seen: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack += [following for following, _ in node.next_functions]
    return seen


def _beginnings() -> Iterator[list[Edge]]:
    """The roots of the running backwards, this thread's innermost first; the engine has more threads."""
    yield from map(_roots, _engine_frames(sys._getframe()))
    for frame in sys._current_frames().values():
        yield from map(_roots, _engine_frames(frame))


def _engine_frames(frame: types.FrameType) -> Iterator[types.FrameType]:
    return (caller for caller, _ in walk_stack(frame) if caller.f_code is _engine_run_backward.__code__)


def _roots(frame: types.FrameType) -> list[Edge]:
    given = frame.f_locals["t_outputs"]
    edges = [graph.get_gradient_edge(one) if isinstance(one, torch.Tensor) else one for one in given]
    return [(edge.node, edge.output_nr) for edge in edges]
