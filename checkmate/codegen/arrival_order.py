"""The order in which the gradients of a compiled step arrive, and whether anything else adds to one before it.

Plain PyTorch completes the gradients of a step one after the other; a compiled step returns all at once. Who listens to
single gradients (hooks that draw, `DistributedDataParallel`) is called in plain PyTorch's order (`hand_over_in_order`).

A compiled step's backward asks of its own node of autograd what comes before: to hand over its contributions one by one
then (`checkmate.codegen.contributions`), or to refuse what it cannot add in that order (`refused_backwards`).

Autograd runs a backward in the order of descending sequence numbers: what was computed last comes first. So the
question is whether a node of a higher number leads to the same gradient and is a part of this backward. From a node
only what follows can be reached, not what leads to it; what leads to it is found from where the backward began, and
that is found on the stack, in the call of PyTorch that runs the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch.autograd import graph

from checkmate.torch_internals.running import (
    AccumulateGrad,
    _current_graph_task_id,
    _engine_run_backward,
    _will_engine_execute_node,
)

Edge = tuple[Any, int]  # a node of autograd, and which of its inputs
FIRST = float("inf")  # sequence number of the beginning of a backward
LAST = 2**64 - 1  # autograd's highest sequence number, that of each node that accumulates a gradient


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
    return max(numbers.get(edge, ()), default=-1) > created(node)


def created(node: Any) -> int:
    """The sequence number with which a node was created; `hand_over_in_order` changes those of ours."""
    number: int = getattr(node, "created", None) or node._sequence_nr()
    return number


def hand_over_in_order(edges: Sequence[Edge], places: Sequence[int | None]) -> None:
    """Have autograd accumulate the gradients that a node is about to return in the order of their places.

    The engine runs what is ready in the order of descending sequence numbers. Nodes that accumulate a gradient all have
    the highest one, and leave the engine's heap in no useful order: here each gets a number of its own. Nodes of ours
    on the way there (``created``, ``counts``) run before all of them.

    Args:
        edges: of the node, one for each tensor that its forward was called with.
        places: of their gradients, None without one; or of only those edges that lead anywhere.
    """
    if len(places) != len(edges):
        edges = [edge for edge in edges if edge[0] is not None]
    for (node, slot), place in zip(edges, places, strict=True):
        if place is None or node is None:
            continue
        if hasattr(node, "created"):
            node._set_sequence_nr(LAST)
            node, _ = node.next_functions[sum(node.counts[:slot])]
        if isinstance(node, AccumulateGrad):
            node._set_sequence_nr(LAST - 1 - place)


def arrivals(node: Any) -> tuple[dict[Edge, list[float]], dict[Any, None]] | None:
    """The contributions to each edge in the backward that reaches a node, and its nodes; None if unknown.

    Contributions are told by the sequence numbers of the nodes that they come from, or `FIRST`.
    """
    for roots in _beginnings():
        nodes = reachable(root for root, _ in roots)
        if node in nodes:
            numbers: dict[Edge, list[float]] = {edge: [FIRST] for edge in roots}
            for source in nodes:
                edges = [edge for edge in source.next_functions if edge[0] is not None]
                if edges and _will_engine_execute_node(source):
                    for edge in edges:
                        numbers.setdefault(edge, []).append(created(source))
            return numbers, nodes
    return None


def reachable(roots: Iterable[Any]) -> dict[Any, None]:
    """Nodes of autograd's graph: these, and all that a backward from them can reach."""
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
    for innermost in (sys._getframe(), *sys._current_frames().values()):
        for frame, _ in walk_stack(innermost):
            if frame.f_code is _engine_run_backward.__code__:
                roots = frame.f_locals["t_outputs"]
                edges = (graph.get_gradient_edge(root) if isinstance(root, torch.Tensor) else root for root in roots)
                yield [(edge.node, edge.output_nr) for edge in edges]
