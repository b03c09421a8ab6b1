"""The costs of a step, op by op: `costs`. PyTorch is loaded only to trace a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkmate.core.problem import Problem
from checkmate.look.costs import Costs, costs_of


def costs(fn: Problem | Callable[..., Any], *args: Any, top: int = 10, **kwargs: Any) -> Costs:
    """List the costs of each op of a step, as a table.

    Args:
        fn: a `Problem`, as `checkmate.trace` or `Problem.from_json` give it: then nothing runs and PyTorch is not
            needed. Or a module or function, with an example batch as args and kwargs; ``profile`` and ``cache`` are
            options of `checkmate.trace`.
        top: how many ops each of the three printed tables shows.

    Raises:
        TypeError: if a problem comes with arguments.
        Unsupported: if the step cannot be captured as one graph, or needs no gradients.

    >>> problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1.0, 2.0, 4.0], sizes=[10, 20, 5])
    >>> [(row.name, row.byte_seconds) for row in costs(problem).by_lifetime()]
    [('op1', 120.0), ('op0', 70.0), ('op2', 20.0)]
    """
    if isinstance(fn, Problem):
        if args or kwargs:
            raise TypeError("A problem is already traced: costs(problem) takes no batch and no options beside top.")
        return costs_of(fn, top)
    from checkmate.tracing import trace

    return costs_of(trace(fn, *args, **kwargs), top)
