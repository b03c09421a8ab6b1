"""A captured step as a problem, and the same step with ops in parts, for budgets that no plan of the whole fits.

That is found out only when it is asked for: each further split is captured, tried and measured when a solver has no
plan for the one before, so that a step whose budget needs none pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.provenance import where
from checkmate.capture.splits import equal_bits
from checkmate.capture.splits.find_loss import Loss, losses
from checkmate.capture.splits.further import Need, regions_of, split_further
from checkmate.capture.splits.trial import inputs_of, same_bits_in_parts
from checkmate.capture.splits.write_loss import Split, in_parts, splits_of
from checkmate.codegen.emit import Begin, emit
from checkmate.codegen.transfers import no_second_memory
from checkmate.codegen.writing_over import Positions
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported

log = logging.getLogger("checkmate.backends.in_parts")

MOST_TIMES = 6  # that regions are split until that gains
GAIN = 0.01  # of the bytes that no plan goes below: a split that saves less is none


@dataclass(frozen=True, eq=False)
class Write:
    """Writes the modules of a plan of a captured step."""

    joint: Joint
    over: Positions  # which argument an op writes over that writes over a value
    begin: Begin = no_second_memory  # what a forward calls that sends values

    def __call__(self, plan: Plan) -> Any:
        """The two modules."""
        return emit(self.joint, plan, self.over, begin=self.begin)


def joint_of(problem: Problem) -> Joint:
    """The captured step that a problem is of."""
    assert isinstance(problem.emit, Write)
    return problem.emit.joint


@dataclass(frozen=True, eq=False)
class _Step:
    """A step that may be split."""

    read: Callable[[fx.GraphModule], Joint]
    pose: Callable[[Joint], Problem]
    tried: bool

    def further(
        self,
        problem: Problem,
        module: fx.GraphModule,
        whole: fx.GraphModule,
        *,
        place: int,
        below: int,
        of_regions: bool = False,
        anew: bool = True,
    ) -> Problem:
        """A problem from which the same step split further can be had.

        Args:
            problem: of the module.
            module: the joint graph, prepared.
            whole: the joint graph without any split.
            place: how many splits of the loss, from cheap to small, are not asked for any more.
            below: bytes that no plan without kept logits goes below so far.
            of_regions: some regions are split.
            anew: regions may be found anew, with the loss split further; not within such a search.
        """

        @cache
        def smaller() -> Problem | None:
            if of_regions:
                found = self._regions(problem, module, whole, place, anew)
                return found or (self._loss_and_regions(problem, whole, place) if anew else None)
            return self._loss(problem, whole, place, below, anew) or self._regions(problem, module, whole, place, anew)

        return replace(problem, smaller=smaller)

    def _loss(self, problem: Problem, whole: fx.GraphModule, place: int, below: int, anew: bool) -> Problem | None:
        """The step with its loss split further, if that gains."""
        for after, how, module, split in self._with_loss_split(problem, whole, place):
            least = int(split.unavoidable_bytes.max())
            if least <= (1 - GAIN) * (problem.unavoidable_bytes.max() if how.kept else below):
                # kept logits are beside other ops too: no op alone shows that
                return self.further(split, module, whole, place=after, below=below if how.kept else least, anew=anew)
        return None

    def _loss_and_regions(self, problem: Problem, whole: fx.GraphModule, place: int) -> Problem | None:
        """A step with split regions, its loss split further, if that gains: the regions are found anew."""
        for after, _, module, split in self._with_loss_split(problem, whole, place, near=GAIN):
            below = int(split.unavoidable_bytes.max())
            as_before = self.further(split, module, whole, place=after, below=below, anew=False)
            if (gained := next((one for one in as_before.and_smaller() if _gains(one, problem)), None)) is not None:
                return gained
        return None

    def _with_loss_split(
        self, problem: Problem, whole: fx.GraphModule, place: int, *, near: float = 0.0
    ) -> Iterator[tuple[int, Split, fx.GraphModule, Problem]]:
        """The step without regions, its loss split further and further, where it needs the most; none elsewhere.

        Args:
            near: by this share of the most less is also enough.

        Yields:
            The place behind it, how the loss is split, the module, and the problem of that.
        """
        found = losses(whole.graph)
        hows = splits_of(found)
        if not found or not self._is_at_loss(problem, whole, hows, place, near=near):
            return
        for after, how in enumerate(hows[place:], place + 1):
            if self._holds(how, found):
                module = in_parts(whole, how)
                split = self._posed(module)
                if split is None:
                    return
                yield after, how, module, replace(split, splits=(self._said_of_loss(how, found),))

    def _holds(self, how: Split, found: Sequence[Loss]) -> bool:
        """Whether losses split like this have the bits of the whole, as far as that is tried."""
        if self.tried and not all(same_bits_in_parts(loss, how) for loss in found):
            log.info("%s: not the bits of the whole", how)
            return False
        return True

    def _is_at_loss(
        self, problem: Problem, whole: fx.GraphModule, hows: Sequence[Split], place: int, *, near: float = 0.0
    ) -> bool:
        """Whether the op that needs the most goes, or came, as the loss is split; kept logits are beside all ops.

        Args:
            near: by this share of the most less is also enough.
        """
        if place and hows[place - 1].kept:
            return True
        split = in_parts(whole, hows[place - 1])  # the last is the smallest
        graphs = (split.graph, whole.graph) if place else (whole.graph, split.graph)
        here, other = ({n.name for n in graph.nodes} for graph in graphs)
        bytes_at = problem.unavoidable_bytes
        high = {problem.graph.ops[k].name for k in (bytes_at >= (1 - near) * bytes_at.max()).nonzero()[0]}
        return not high.isdisjoint(here - other)

    def _regions(
        self, problem: Problem, module: fx.GraphModule, whole: fx.GraphModule, place: int, anew: bool
    ) -> Problem | None:
        """The step with the regions about the ops that need the most in more parts, if that gains."""
        least = int(GAIN * problem.unavoidable_bytes.max())
        tried = equal_bits.same_bits if self.tried else lambda parts: True
        of_loss = tuple(text for text in problem.splits if text.startswith("loss in "))
        at = problem
        for _ in range(MOST_TIMES):  # what an op works in is known once it is measured: it may take more parts
            made = split_further(module, joint_of(at), [*_needs(at)], tried=tried, least_gain=least)
            split = None if made is None else self._posed(made)
            if made is None or split is None:
                return None
            module, at = made, split
            if _gains(split, problem):
                split = replace(split, splits=(*of_loss, *self._said(made)))
                below = int(split.unavoidable_bytes.max())
                return self.further(split, made, whole, place=place, below=below, of_regions=True, anew=anew)
        return None

    def _posed(self, module: fx.GraphModule) -> Problem | None:
        """The problem of a split step; None: there is none."""
        try:
            return self.pose(self.read(module))
        except Unsupported as error:
            log.info("in parts: %s", error)
            return None

    def _said_of_loss(self, how: Split, found: Sequence[Loss]) -> str:
        """How losses run in parts, in words."""
        return f"{how}: {self._certificate(min(map(inputs_of, found)))}"

    def _said(self, module: fx.GraphModule) -> Iterator[str]:
        """What runs in parts, in words."""
        for node, parts, count in regions_of(module).values():
            alike = f" and {count - 1} alike" if count > 1 else ""
            certificate = self._certificate(equal_bits.inputs_of(parts))
            yield f"{node.meta['first']} of {where(node)}{alike} in {parts.parts} parts: {certificate}"

    def _certificate(self, inputs: int) -> str:
        return f"bits equal on {inputs} inputs, {_threads()}" if self.tried else "not tried here"


def _gains(split: Problem, before: Problem) -> bool:
    return bool(split.unavoidable_bytes.max() <= (1 - GAIN) * before.unavoidable_bytes.max())


def _needs(problem: Problem) -> Iterator[Need]:
    for k, op in enumerate(problem.graph.ops):
        saved = max((saved for _, saved in problem.savings[k]), default=0)
        own = int(problem.sizes[[*op.inputs, *op.outputs]].sum() + problem.workspace[k]) - saved
        yield Need(op.name, int(problem.unavoidable_bytes[k]), own)


def with_parts(
    problem: Problem,
    module: fx.GraphModule,
    read: Callable[[fx.GraphModule], Joint],
    pose: Callable[[Joint], Problem],
    *,
    tried: bool,
) -> Problem:
    """The problem of a step, from which the same step with its loss, then other ops, in more parts can be had.

    Args:
        problem: of the step as it is.
        module: the joint graph, prepared and whole.
        read: makes a captured step of such a graph.
        pose: makes a problem of a captured step.
        tried: the bits of a split are tried before it is offered. Without data nothing can be.
    """
    least = int(problem.unavoidable_bytes.max())
    return _Step(read, pose, tried).further(problem, module, module, place=0, below=least)


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} threads" if count > 1 else "1 thread"
