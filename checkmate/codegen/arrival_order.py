"""Tell, while a backward runs, whether another part of it adds to a gradient before a given node of autograd does.

Autograd runs a backward in the order of descending sequence numbers: what was computed last comes first. So the
question is whether a node of a higher number leads to the same gradient and is a part of this backward. From a node
only what follows can be reached, not what leads to it; what leads to it is found from where the backward began, and
that is found on the stack, in the call of PyTorch that runs the engine.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import graph

from checkmate.torch_internals.engine import _current_graph_task_id, _engine_run_backward, _will_engine_execute_node

Edge = tuple[Any, int]  # a node of autograd, and which of its inputs
_FIRST = float("inf")  # sequence number of the beginning of a backward


def verdicts(fan: Any) -> tuple[int, ...]:
    """The slots of a `Fan` to which something else contributes before it; all where that cannot be found out.

    One walk through what is differentiated decides for all of them in it, and is kept for this backward.
    """
    task = _current_graph_task_id()
    if getattr(fan, "verdict", (None,))[0] != task:
        fan.verdict = task, tuple(range(len(fan.counts)))
        for roots in _beginnings():
            nodes = reachable(node for node, _ in roots)
            if fan in nodes:
                fans = [node for node in nodes if type(node) is type(fan)]
                edges = [[f.next_functions[sum(f.counts[:slot])] for slot in range(len(f.counts))] for f in fans]
                for f, before in zip(fans, _before(roots, nodes, fans, edges), strict=True):
                    f.verdict = task, tuple(slot for slot, yes in enumerate(before) if yes)
                break
    slots: tuple[int, ...] = fan.verdict[1]
    return slots if slots and _will_engine_execute_node(fan) else ()


def contributed_before(node: Any, edges: Sequence[Edge]) -> list[bool]:
    """For each of these edges of a node: whether another node contributes there before it, as far as can be known."""
    for roots in _beginnings():
        nodes = reachable(node for node, _ in roots)
        if node in nodes:
            return _before(roots, nodes, [node], [edges])[0]
    return [True] * len(edges)


def arrivals(node: Any) -> dict[int, list[int]] | None:
    """The sequence numbers of the nodes of this backward that contribute to each input of a node; None if unknown."""
    for roots in _beginnings():
        nodes = reachable(node for node, _ in roots)
        if node in nodes:
            found: dict[int, list[int]] = {}
            for other in nodes:
                for following, position in other.next_functions:
                    if following is node and _will_engine_execute_node(other):
                        found.setdefault(position, []).append(other._sequence_nr())
            return found
    return None


def _before(
    roots: Iterable[Edge], nodes: Iterable[Any], ours: Sequence[Any], edges: Sequence[Sequence[Edge]]
) -> list[list[bool]]:
    latest: dict[Edge, float] = {edge: -1 for found in edges for edge in found}
    for edge in roots:
        if edge in latest:
            latest[edge] = _FIRST
    for node in nodes:
        for edge in node.next_functions:
            number = latest.get(edge)
            if number is None or node._sequence_nr() <= number:
                continue
            if _will_engine_execute_node(node):
                latest[edge] = node._sequence_nr()
    return [[latest[edge] > node._sequence_nr() for edge in found] for node, found in zip(ours, edges, strict=True)]


def reachable(roots: Iterable[Any]) -> dict[Any, None]:
    """The nodes of autograd's graph that a backward from these nodes can reach, with them."""
    stack = list(roots)
    seen: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack += [following for following, _ in node.next_functions]
    return seen


def _beginnings() -> Iterator[list[Edge]]:
    """Where the backwards that now run began, the innermost of this thread first: the engine has threads of its own."""
    yield from map(_roots, _engine_frames(sys._getframe()))
    for frame in sys._current_frames().values():
        yield from map(_roots, _engine_frames(frame))


def _engine_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            yield frame
        frame = frame.f_back


def _roots(frame: types.FrameType) -> list[Edge]:
    roots: list[Edge] = []
    for given in frame.f_locals["t_outputs"]:
        edge = graph.get_gradient_edge(given) if isinstance(given, torch.Tensor) else given
        roots.append((edge.node, edge.output_nr))
    return roots
