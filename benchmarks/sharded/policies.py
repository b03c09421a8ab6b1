"""Choices that trainers of sharded models make by switches, as schedules of one step, to hold plans against.

Gathering: "once" holds each gathered parameter from its forward to its backward (FSDP's
``reshard_after_forward=False``); "twice" lets it go after the forward's last use and gathers it again for the backward,
FSDP's default. Checkpointing, by layer of the transformer: no; "selective", which keeps what layers make, and within
them the results of products and of attention; "full", which keeps what layers make. What is outside the layers is kept.

Each is the leanest step of its kind, and at most as dear as what libraries run: of a layer only what its backward
misses runs again, just before that; a parameter is gathered just before its use, alone, and let go of right after the
last one, where FSDP has the parameters of a layer or two.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.sharded.graph import ALL_GATHER, PRODUCTS, layers
from checkmate.core.problem import Problem
from checkmate.solvers.common.schedules import kept_by_the_forward

GATHERINGS = ("once", "twice")
CHECKPOINTS = ("no", "selective", "full")
POLICIES = {f"gather {times}, {what} checkpointing": (times, what) for times in GATHERINGS for what in CHECKPOINTS}


def runs_of(problem: Problem, policy: str) -> np.ndarray:
    """R (T, T) bool of a policy.

    Raises:
        KeyError: if there is no such policy.
    """
    return kept_by_the_forward(problem, _kept(problem, *POLICIES[policy]))


def _kept(problem: Problem, gathering: str, checkpointing: str) -> Iterator[int]:
    """The values of the forward that the backward finds."""
    graph = problem.graph
    between, of_layers = layers(problem)
    of_parameters = {*_of_parameters(problem)}
    for k in range(graph.forward_length):
        op = graph.ops[k]
        if k in of_parameters:
            yield from op.outputs if gathering == "once" else ()
        elif checkpointing == "no" or k not in of_layers:
            yield from op.outputs
        else:
            keeps = checkpointing == "selective" and op.target in PRODUCTS
            yield from (v for v in op.outputs if keeps or v in between)


def _of_parameters(problem: Problem) -> Iterator[int]:
    """The all-gathers of parameters, and the casts before them."""
    graph = problem.graph
    for k in range(graph.forward_length):
        if ALL_GATHER in graph.ops[k].target and graph.ops[k].pinned is None:
            made_by: int | None = k
            while made_by is not None:
                yield made_by
                made_by = graph.values[graph.ops[made_by].inputs[0]].producer
