"""Split the loss of a captured step into more and more parts, up to 64, while no plan fits the budget.

Each rung of the ladder is captured, tried and posed only when a solver has no plan for the one before, so that a step
whose budget needs none pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch
import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.loss.equal_bits import equal_inputs
from checkmate.capture.loss.find import Loss, losses
from checkmate.capture.loss.write import LossSplit, in_parts, loss_splits_of
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported
from checkmate.torch_internals.running import outside_tracing

log = logging.getLogger("checkmate.capture.loss")

GAIN = 0.01  # of the bytes that no plan goes below: a split that saves less is none


def with_loss_in_parts(
    problem: Problem,
    module: fx.GraphModule,
    read: Callable[[fx.GraphModule], Joint],
    pose: Callable[[Joint], Problem],
    *,
    tried: bool,
    known: Collection[str] = (),
) -> Problem:
    """The problem of a step; its `Problem.next_split` is the same step with its loss in more parts.

    Args:
        problem: of the step as it was captured.
        module: its joint graph, prepared.
        read: makes a captured step of such a graph.
        pose: makes a problem of a captured step.
        tried: whether bits of a split are compared before it is offered, which takes data.
        known: splits of other sizes, as `Problem.splits` names them: the first of these is the first one here.
    """
    return _Ladder(module, read, pose, tried, known).linked(problem)


def with_split(module: fx.GraphModule, splits: Sequence[str]) -> fx.GraphModule:
    """A joint graph whose loss is split as `Problem.splits` names it."""
    ways = loss_splits_of(losses(module.graph))
    return in_parts(module, next(way for way in ways if splits[0].startswith(f"{way}:")))


@dataclass(frozen=True, eq=False)
class _Ladder:
    """The splits of a step's loss, from cheap to small."""

    whole: fx.GraphModule  # the joint graph without any split
    read: Callable[[fx.GraphModule], Joint]
    pose: Callable[[Joint], Problem]
    tried: bool
    known: Collection[str]
    names: dict[LossSplit | None, set[str]] = field(default_factory=dict)  # of the nodes, by how the loss is split

    @cached_property
    def losses(self) -> list[Loss]:
        return losses(self.whole.graph)

    @cached_property
    def rungs(self) -> tuple[LossSplit, ...]:
        rungs = loss_splits_of(self.losses)
        begin = next((i for i, rung in enumerate(rungs) if any(name.startswith(f"{rung}:") for name in self.known)), 0)
        return rungs[begin:]

    def linked(self, problem: Problem, rung: int = 0, below: int | None = None) -> Problem:
        """Link a problem to its next split after ``rung``.

        Without kept logits a plan has ``below`` bytes or more; None: those that this problem's plans have.
        """
        return replace(problem, next_split=cache(partial(self.next, problem, rung, below)))

    def next(self, problem: Problem, rung: int, below: int | None) -> Problem | None:
        """The step with its loss in more parts, if that saves bytes; None if nothing more can be gained."""
        with outside_tracing():
            return self._next(problem, rung, int(problem.unavoidable_bytes.max()) if below is None else below)

    def _next(self, problem: Problem, rung: int, below: int) -> Problem | None:
        if not self.losses or not self.is_at_loss(problem, rung):
            return None
        for after, way in enumerate(self.rungs[rung:], rung + 1):
            inputs = min(equal_inputs(loss, way) for loss in self.losses) if self.tried else 0
            if self.tried and not inputs:
                log.info("%s: not the bits of the whole", way)
                continue
            try:
                split = self.pose(self.read(self.split(way)))
            except Unsupported as error:
                log.info("%s: %s", way, error)
                return None
            least = int(split.unavoidable_bytes.max())
            # kept logits are beside other ops too: no op alone shows what they cost
            if least <= (1 - GAIN) * (problem.unavoidable_bytes.max() if way.kept else below):
                # The certificate says why bits are known to be equal.
                certificate = "if the device keeps the bits: not tried here"
                if self.tried:
                    count = torch.get_num_threads()
                    threads = f"{count} threads" if count > 1 else "1 thread"
                    certificate = f"bits equal on {inputs} input{'s' * (inputs > 1)}, {threads}"
                certified = replace(split, splits=(f"{way}: {certificate}",))
                return self.linked(certified, after, below if way.kept else least)
            if not self.is_at_loss(split, after):
                return None
        return None

    def is_at_loss(self, problem: Problem, rung: int) -> bool:
        """Tell whether the op that needs most bytes belongs to the loss; kept logits are beside all ops."""
        if rung and self.rungs[rung - 1].kept:
            return True
        # ops that the split so far has made, or that the smallest split will take away
        now, other = (self.rungs[rung - 1], None) if rung else (None, self.rungs[-1])
        for way in (now, other):
            if way not in self.names:
                self.split(way)
        bytes_at = problem.unavoidable_bytes
        high = {problem.graph.ops[k].name for k in (bytes_at == bytes_at.max()).nonzero()[0]}
        return not high.isdisjoint(self.names[now] - self.names[other])

    def split(self, way: LossSplit | None) -> fx.GraphModule:
        """The step whose loss is split; None for the step as it is."""
        module = self.whole if way is None else in_parts(self.whole, way)
        self.names[way] = {node.name for node in module.graph.nodes}
        return module
