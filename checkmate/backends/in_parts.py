"""A captured step as a problem, and the same step with its loss in parts, for budgets that no plan of the whole fits.

That is found out only when it is asked for: each further split is captured, tried and measured when a solver has no
plan for the one before, so that a step whose budget needs none pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.splits.find_loss import losses
from checkmate.capture.splits.trial import inputs_of, same_bits_in_parts
from checkmate.capture.splits.write_loss import in_parts, splits_of
from checkmate.codegen.emit import emit
from checkmate.codegen.writing_over import Positions
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported

log = logging.getLogger("checkmate.backends.in_parts")

GAIN = 0.01  # of the bytes that no plan goes below: a split that saves less is none


@dataclass(frozen=True, eq=False)
class Write:
    """Writes the modules of a plan of a captured step."""

    joint: Joint
    over: Positions  # which argument an op writes over that writes over a value

    def __call__(self, plan: Plan) -> Any:
        """The two modules."""
        return emit(self.joint, plan, self.over)


def joint_of(problem: Problem) -> Joint:
    """The captured step that a problem is of."""
    assert isinstance(problem.emit, Write)
    return problem.emit.joint


def with_parts(
    problem: Problem,
    module: fx.GraphModule,
    read: Callable[[fx.GraphModule], Joint],
    pose: Callable[[Joint], Problem],
    *,
    tried: bool,
    tried_before: int = 0,
    below: int | None = None,
) -> Problem:
    """The problem of a step, from which the same step with its loss in more parts can be had.

    Args:
        problem: of the step, or of one of these.
        module: the joint graph, prepared and whole.
        read: makes a captured step of such a graph.
        pose: makes a problem of a captured step.
        tried: the bits of a split are tried before it is offered. Without data nothing can be.
        tried_before: how many splits, from cheap to small, are not asked for any more.
        below: bytes that no plan without kept logits goes below so far; None: those of the problem.
    """
    whole = int(problem.unavoidable_bytes.max()) if below is None else below

    @cache
    def smaller() -> Problem | None:
        found = losses(module.graph)
        for place, how in enumerate(splits_of(found)[tried_before:], tried_before + 1):
            if tried and not all(same_bits_in_parts(loss, how) for loss in found):
                log.info("%s: not the bits of the whole", how)
                continue
            try:
                split = pose(read(in_parts(module, how)))
            except Unsupported as error:
                log.info("%s: %s", how, error)
                return None
            least = split.unavoidable_bytes.max()
            if least > (1 - GAIN) * (problem.unavoidable_bytes.max() if how.kept else whole):
                continue
            inputs = min(map(inputs_of, found))
            certificate = f"bits equal on {inputs} inputs, {_threads()}" if tried else "not tried here"
            split = replace(split, splits=(f"{how}: {certificate}",))
            after = whole if how.kept else int(least)  # kept logits are beside other ops too: no op alone shows that
            return with_parts(split, module, read, pose, tried=tried, tried_before=place, below=after)
        return None

    return replace(problem, smaller=smaller)


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} threads" if count > 1 else "1 thread"
