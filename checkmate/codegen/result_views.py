"""Refuse results that are views of one value whose gradients plain PyTorch would add in another order.

A step may return ``features`` and ``features.flatten(1)`` and go on from both. AOTAutograd returns their common base
and makes the views after the step, so that what comes through them from outside is added before all that comes from
within. Plain PyTorch adds it where the view was made. From three contributions on that may round differently: it is
refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.nodes import ancestors
from checkmate.codegen.arrival_order import arrivals
from checkmate.codegen.result_hooks import tokens_of
from checkmate.codegen.undefined_gradients import DEPTH, compiled_functions
from checkmate.errors import Unsupported
from checkmate.torch_internals.aot import _is_tangent

aten = torch.ops.aten


def added_within(graph: fx.Graph, count: int) -> dict[int, list[set[int]]]:
    """What a joint graph adds to the gradients that come from outside, by the position of the result.

    Each contribution is told by the positions of the results whose gradients it depends on. Results to whose gradients
    nothing is added are left out. ``count``: how many of the graph's outputs belong to the forward.
    """
    output: Any = graph.output_node()
    position = {desc: i for i, desc in enumerate(output.meta["desc"][tokens_of(output, count) : count])}
    results = {n: position.get(getattr(n.meta.get("desc"), "output", None)) for n in graph.nodes if _is_tangent(n)}
    found: dict[int, list[set[int]]] = {}
    for tangent, result in results.items():
        total, terms = tangent, []
        while len(total.users) == 1 and _adds_to(total, user := next(iter(total.users))):
            total = user
            terms.append({i for n in ancestors([user.args[1]]) if (i := results.get(n)) is not None})
        if terms and result is not None:
            found[result] = terms
    return found


def _adds_to(total: fx.Node, user: fx.Node) -> bool:
    if user.target is not aten.add.Tensor or user.kwargs:
        return False
    return user.args[0] is total and isinstance(user.args[1], fx.Node)


def refuse_views(run: Callable[..., Any], within: Mapping[int, Sequence[set[int]]]) -> Callable[..., Any]:
    """Have the backward refuse gradients of results that are views, where the order of additions is not known.

    Args:
        run: a compiled function.
        within: what `added_within` found of it.
    """
    if not within:
        return run

    @wraps(run)
    def refusing(*args: Any) -> Any:
        results = run(*args)
        functions = [*compiled_functions(results, args)]
        views: dict[Any, dict[int, set[int]]] = {}
        for tensor in results:
            node = getattr(tensor, "grad_fn", None)
            for _ in range(DEPTH):
                if node is None or node in functions or not node.next_functions:
                    break
                following, position = node.next_functions[0]
                if following in functions and position in within:
                    views.setdefault(following, {}).setdefault(position, set()).add(node._sequence_nr())
                node = following
        for function, numbers in views.items():
            function.register_prehook(_check(weakref.ref(function), numbers, within))
        return results

    return refusing


def _check(
    function: weakref.ref[Any], numbers: Mapping[int, set[int]], within: Mapping[int, Sequence[set[int]]]
) -> Callable[[Any], None]:
    """``numbers``: the sequence numbers of the views of each result, as autograd counts its nodes."""

    def check(grads: Any) -> None:
        defined = {position for position, grad in enumerate(grads) if grad is not None}
        arrived = arrivals(function()) if defined.intersection(numbers) else {}
        for position in defined.intersection(numbers):
            come = arrived.get(position, []) if arrived is not None else [*numbers[position], 0]
            terms = sum(not term.isdisjoint(defined) for term in within[position])
            if terms and numbers[position].intersection(come) and len(come) + terms > 2:
                raise Unsupported(
                    "Results of the compiled step are views of one value, of shape "
                    f"{tuple(grads[position].shape)}, which the step goes on from too, and gradients come to them from "
                    "outside. Plain PyTorch adds them between those from within the step; here they come first, which "
                    "rounds differently. Return one of these results, and make the view of it outside."
                )

    return check
