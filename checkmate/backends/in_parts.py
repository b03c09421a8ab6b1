"""Where no plan fits the budget: split the captured step further and further, so that its large ops run in parts.

That is found out only when it is asked for: each further split is captured, tried and measured when a solver has no
plan for the one before, so that a step whose budget needs none pays nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, takewhile
from math import inf
from typing import Any

import torch
import torch.fx as fx

from checkmate.backends.step_problem import joint_of
from checkmate.capture.joint import Joint
from checkmate.capture.provenance import where
from checkmate.capture.splits import equal_bits
from checkmate.capture.splits.find_loss import Loss, losses
from checkmate.capture.splits.parts import InParts
from checkmate.capture.splits.split_largest import OpNeeds, StaysWhole, regions_of, split_further
from checkmate.capture.splits.write_loss import LossSplit, in_parts, loss_splits_of
from checkmate.capture.ways.batch_norm import gradient_of_input
from checkmate.core.problem import Problem
from checkmate.errors import Unsupported

log = logging.getLogger("checkmate.backends.in_parts")

MOST_TIMES = 8  # that regions are split until that gains
IN_VAIN = 2  # times that a region is split without gain: then there is to be another one in its place
GAIN = 0.01  # of the bytes that no plan goes below: a split that saves less is none


def with_parts(
    problem: Problem,
    module: fx.GraphModule,
    read: Callable[[fx.GraphModule], Joint],
    pose: Callable[[Joint], Problem],
    *,
    tried: bool,
    rounding: bool = False,
) -> Problem:
    """The problem of a step, from which the same step with its loss, then other ops, in more parts can be had.

    ``module``: its joint graph, prepared; ``read`` makes a captured step of such a graph, and ``pose`` a problem of
    that. Bits of a split are ``tried`` before it is offered: without data nothing can be. With ``rounding`` regions may
    sum over parts, where nothing with the bits of the whole gains any more.
    """
    step = _Step(module, read, pose, tried, rounding)
    return _Chain(partial(step.splits, problem, module)).linked(problem, 0)


class _Chain:
    """Problems each of which has the next: of an iterator, and where that was interrupted of a new one."""

    def __init__(self, begin: Callable[[], Iterator[Problem]]) -> None:
        self._begin = begin
        self._more: Iterator[Problem] | None = None
        self._made: list[Problem | None] = []

    def linked(self, problem: Problem, place: int) -> Problem:
        return replace(problem, smaller=partial(self._after, place))

    def _after(self, place: int) -> Problem | None:
        while len(self._made) <= place:
            more, self._more = self._more or islice(self._begin(), len(self._made), None), None
            found = next(more, None)
            self._more = more
            self._made.append(None if found is None else self.linked(found, len(self._made) + 1))
        return self._made[place]


@dataclass(frozen=True, eq=False)
class _Step:
    """A step that may be split."""

    whole: fx.GraphModule  # the joint graph without any split
    read: Callable[[fx.GraphModule], Joint]
    pose: Callable[[Joint], Problem]
    tried: bool
    rounding: bool  # where no split has the bits of the whole, sums over parts are taken
    names: dict[LossSplit | None, set[str]] = field(default_factory=dict)  # of the nodes, by how the loss is split

    @cached_property
    def losses(self) -> list[Loss]:
        """That can be split."""
        return losses(self.whole.graph)

    @cached_property
    def hows(self) -> tuple[LossSplit, ...]:
        """In which they can be split, from cheap to small."""
        return loss_splits_of(self.losses)

    def splits(
        self, problem: Problem, module: fx.GraphModule, losses: int = 0, *, anew: bool = True
    ) -> Iterator[Problem]:
        """The step split further and further, as long as that gains: its loss, then regions, then regions that sum.

        Args:
            problem: what is to be gained on.
            module: the joint graph of that; no region is split.
            losses: how many splits of the loss, from cheap to small, are not asked for any more.
            anew: where regions gain nothing any more they may be found anew, with the loss split further.
        """
        below = int(problem.unavoidable_bytes.max())  # bytes that no plan without kept logits goes below so far
        while (by_loss := self._loss(problem, below, losses)) is not None:
            problem, module, below, losses = by_loss
            yield problem
        early: tuple[str, ...] = ()  # ops that could not be split any more when others were: now before these
        unsplit = problem
        for found in self._regions(problem, problem, module, early, sums=False):
            problem, early = found
            yield problem
        if anew and problem is not unsplit:
            for after, _, other, split in self._with_loss_split(problem, losses, near=GAIN):
                further = chain([split], self.splits(split, other, after, anew=False))
                for one in takewhile(lambda one: not one.rounding, further):
                    if _gains(one, problem):
                        yield one
                        yield from further
                        return
        if self.rounding and (begin := self._posed(module)) is not None:
            for one, _ in self._regions(problem, begin, module, early, sums=True):
                yield one

    def _loss(self, problem: Problem, below: int, losses: int) -> tuple[Problem, fx.GraphModule, int, int] | None:
        """The step with its loss split further, if that gains; its module, and ``below`` and ``losses`` of that."""
        for after, how, module, split in self._with_loss_split(problem, losses):
            least = int(split.unavoidable_bytes.max())
            if least <= (1 - GAIN) * (problem.unavoidable_bytes.max() if how.kept else below):
                # kept logits are beside other ops too: no op alone shows that
                return split, module, below if how.kept else least, after
            if not self._is_at_loss(split, after):
                break
        return None

    def _with_loss_split(
        self, problem: Problem, place: int, *, near: float = 0.0
    ) -> Iterator[tuple[int, LossSplit, fx.GraphModule, Problem]]:
        """The step without regions, its loss split further and further, where it needs the most; none elsewhere.

        Of each the place behind it, how the loss is split, the module, and the problem. ``near``: by this share of the
        most less is also enough.
        """
        found, hows = self.losses, self.hows
        if not found or not self._is_at_loss(problem, place, near=near):
            return
        for after, how in enumerate(hows[place:], place + 1):
            if not self.tried or all(equal_bits.loss_keeps_bits(loss, how) for loss in found):
                module = self._with_loss(how)
                split = self._posed(module)
                if split is None:
                    return
                yield after, how, module, replace(split, splits=(self._said_of_loss(how, found),))
            else:
                log.info("%s: not the bits of the whole", how)

    def _is_at_loss(self, problem: Problem, place: int, *, near: float = 0.0) -> bool:
        """Whether the op that needs the most goes, or came, as the loss is split; kept logits are beside all ops."""
        hows = self.hows
        if place and hows[place - 1].kept:
            return True
        if hows[place - 1] not in self.names:  # the last is the smallest
            self._with_loss(hows[place - 1])
        here, other = (self.names[how] for how in ((hows[place - 1], None) if place else (None, hows[-1])))
        bytes_at = problem.unavoidable_bytes
        high = {problem.graph.ops[k].name for k in (bytes_at >= (1 - near) * bytes_at.max()).nonzero()[0]}
        return not high.isdisjoint(here - other)

    def _with_loss(self, how: LossSplit) -> fx.GraphModule:
        """The step whose loss is split."""
        module = in_parts(self.whole, how)
        self.names[None], self.names[how] = ({n.name for n in one.graph.nodes} for one in (self.whole, module))
        return module

    def _regions(
        self, problem: Problem, begin: Problem, unsplit: fx.GraphModule, early: tuple[str, ...], *, sums: bool
    ) -> Iterator[tuple[Problem, tuple[str, ...]]]:
        """The step with the regions about the ops that need the most in more and more parts, while that gains.

        What an op works in is known once it is measured. Where a region turns out to need as much as before, it takes
        more parts, and then gives way to another one. ``begin`` is the problem of the module, in which no region is
        split, ``problem`` what is to be gained on; ops in ``early`` are split before others. Yields these, too.
        """
        begin_module, gained = unsplit, True
        while gained:
            goal = int((1 - GAIN) * problem.unavoidable_bytes.max())
            at, module, gained = begin, begin_module, False
            known = {parts.text for _, parts, _ in regions_of(module).values()}
            in_vain: Counter[str] = Counter()
            for _ in range(MOST_TIMES):
                most = int(at.unavoidable_bytes.max())
                tried = partial(self._may_be, avoided=in_vain, sums=sums)
                about: dict[str, Any] = {"least_gain": max(int(GAIN * most), most - goal), "sums": sums}
                try:
                    made = split_further(module, joint_of(at), [*_needs(at)], tried=tried, before=early, **about)
                except StaysWhole as whole:
                    again = None if module is unsplit or str(whole) in early else self._posed(unsplit)
                    if again is None:
                        return
                    early = (*early, str(whole))
                    at, module = begin, begin_module = again, unsplit
                    known = set()
                    continue
                if (split := self._posed(made)) is None:
                    return
                if _gains(split, problem):
                    if (rounding := self._rounding_of(made)) == inf:  # of halves, which are not tried before
                        return
                    of_loss = tuple(text for text in problem.splits if text.startswith("loss in "))
                    split = replace(split, splits=(*of_loss, *self._said(made)), rounding=rounding)
                    problem, begin, begin_module, gained = split, split, made, True
                    yield split, early
                    break
                high = {
                    op.name for op, need in zip(split.graph.ops, split.unavoidable_bytes, strict=True) if need > goal
                }
                new = {n.target.text for n in made.graph.nodes if n.name in high and isinstance(n.target, InParts)}
                in_vain.update(new - known)
                vain = any(in_vain[text] == IN_VAIN for text in new - known)
                at, module = (begin, begin_module) if vain else (split, made)

    def _may_be(self, parts: InParts, *, avoided: Mapping[str, int], sums: bool) -> bool:
        """Whether a region may run in parts: with the bits of the whole, or sums that are off by rounding."""
        if avoided.get(parts.text, 0) >= IN_VAIN:
            return False
        if not self.tried:
            return equal_bits.is_argued(parts)
        return equal_bits.off_in_parts(parts) < inf if sums else equal_bits.same_bits(parts)

    def _rounding_of(self, module: fx.GraphModule) -> float:
        """The most that sums over parts are off by, as tried; where nothing is tried, the most that they may be.

        What batch norms in halves are off by flows on to the layers before them, and adds up.
        """
        regions = [(parts, count) for _, parts, count in regions_of(module).values()]
        if not self.tried:
            return max((equal_bits.most_off(parts) for parts, _ in regions), default=0.0)
        flows = sum(count * sum(map(equal_bits.off_of, parts.whole.nodes)) for parts, count in regions)
        flows += sum(map(equal_bits.off_of, module.graph.nodes))
        return flows + max((equal_bits.off_in_parts(parts) for parts, _ in regions), default=0.0)

    def _posed(self, module: fx.GraphModule) -> Problem | None:
        """The problem of a split step; None: there is none."""
        try:
            return self.pose(self.read(module))
        except Unsupported as error:
            log.info("in parts: %s", error)
            return None

    def _said_of_loss(self, how: LossSplit, found: Sequence[Loss]) -> str:
        """How losses run in parts, in words."""
        return f"{how}: {self._certificate(f'bits equal on {min(map(equal_bits.inputs_of_loss, found))} inputs')}"

    def _said(self, module: fx.GraphModule) -> Iterator[str]:
        """What runs in parts, in words."""
        for node, parts, count in regions_of(module).values():
            alike = f" and {count - 1} alike" if count > 1 else ""
            off = equal_bits.off_in_parts(parts) if self.tried else 0.0
            at_once = not self.tried or equal_bits.is_tried(parts)
            how = equal_bits.said_of(parts) + ("" if at_once else " (op by op: too large to be tried at once)")
            certificate = self._certificate(f"bits equal by {how}", off)
            summed = " with sums over them" if any(parts.summed) else ""
            yield f"{node.meta['first']} of {where(node)}{alike} in {parts.parts} parts{summed}: {certificate}"
        for node in module.graph.find_nodes(op="call_function", target=gradient_of_input):
            off = equal_bits.off_of(node) if self.tried else 0.0
            yield f"{node.name} of {where(node)} after its sums: {self._certificate('bits equal', off)}"

    def _certificate(self, equal: str, off: float = 0.0) -> str:
        """How bits are known to be equal, or by what share of their largest element sums were ``off``."""
        if not self.tried:
            return "if the device keeps the bits: not tried here"
        count = torch.get_num_threads()
        threads = f"{count} threads" if count > 1 else "1 thread"
        return f"{f'off by {off:.1e} of the largest at most' if off else equal}, {threads}"


def _gains(split: Problem, before: Problem) -> bool:
    return bool(split.unavoidable_bytes.max() <= (1 - GAIN) * before.unavoidable_bytes.max())


def _needs(problem: Problem) -> Iterator[OpNeeds]:
    for k, op in enumerate(problem.graph.ops):
        saved = max((saved for _, saved in problem.savings[k]), default=0)
        own = int(problem.sizes[[*op.inputs, *op.outputs]].sum() + problem.workspace[k]) - saved
        yield OpNeeds(op.name, int(problem.unavoidable_bytes[k]), own)
