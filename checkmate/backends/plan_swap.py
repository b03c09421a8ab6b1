"""Swap in a better plan between two steps of training.

Planning goes on in another process (`checkmate.solvers.background_search`). What it finds is verified and simulated
here like any plan, and is swapped in before a forward: not while a graph of the step waits for its backward, and not
while gradients are accumulated, which shows in parameters that have gradients and were not written to since the last
forward.

All plans of a step give the same bits. AOTAutograd compiles once, and takes as saved tensors whatever the forward
returns after the results, however many these are; the backward gets them back. Here a token goes before them, whose
length says by which plan the forward ran (`checkmate.codegen.call_token`): so a backward runs the code of its own
forward, whenever it comes. While it lives, the graph of that call may still be differentiated.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from checkmate.backends.step_problem import with_guards
from checkmate.capture.around import Around
from checkmate.capture.joint import Joint
from checkmate.codegen.boxed import Boxed, takes_one_list
from checkmate.codegen.call_token import call_token
from checkmate.codegen.emit import is_unchecked
from checkmate.core.problem import Problem
from checkmate.core.solution import OPTIMAL_GAP, Query, Solution, Status, format_gap
from checkmate.errors import SolverError
from checkmate.solvers.background_search import Search
from checkmate.solvers.common.incumbent import certify, contradicts
from checkmate.statusline import showing
from checkmate.torch_internals import capturing
from checkmate.torch_internals.capturing import TracingContext
from checkmate.units import format_seconds

log = logging.getLogger("checkmate.solve")
Write = Callable[[Solution], tuple[Any, Any] | None]
_OF_SEVERAL = capturing.SubclassGetAttrAOTInput, capturing.SubclassGetAttrAOTOutput
_TOKENS = capturing.ForwardTokenAOTInput, capturing.BackwardTokenAOTInput


@dataclass(frozen=True)
class Planning:
    """The state of the plan of one captured graph."""

    cost: float  # seconds of the step, of the best plan that is known; it may not have taken over yet
    bound: float  # seconds that every schedule takes, proven
    seconds: float  # spent on planning so far
    goes_on: bool  # a better plan may still come
    swaps: int  # how often a plan has taken over
    failure: str = ""  # why planning has ended early, if it failed

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: the largest share of the step that could still be saved."""
        return max(0.0, 1 - self.bound / self.cost) if self.cost > 0 else 0.0

    def __str__(self) -> str:
        ends = "goes on" if self.goes_on else self.failure or "has ended"
        return (
            f"step {format_seconds(self.cost)}, gap {format_gap(self.gap)} after {format_seconds(self.seconds)}; {ends}"
        )


class SwappablePlan(Around):
    """A captured graph with its present plan, which may change before a call until planning has ended.

    ``captured``: its problem, where the plan is for the step with its loss in parts.
    """

    def __init__(self, plan: Solution, captured: Problem | None = None) -> None:
        self.plan, self.swaps = plan, 0
        self.captured = captured or plan.problem
        self._search: Search | None = None  # None: nothing is open
        self._write: Write | None = None  # None: no plan can take over

    def go_on(
        self, query: Query, code: SwappableCode, write: Write, *, taken: int = 0, sizes: tuple[int, ...] = ()
    ) -> None:
        """Begin to search for better plans, whose code replaces the first one's ``code``, for calls of these sizes.

        ``write`` makes of a plan the functions of its forward and backward; None if these do not fit what AOTAutograd
        was told of the first. ``taken``: bytes of the guards before the step, beside resident ones.
        """
        self._began, self._code, self._write, self._guards = self.plan.seconds, code, write, taken
        self._sizes = sizes
        self._tried: Any = None  # the last news that were looked at
        self._versions = -1  # of all parameters together, at the last forward
        self._looking = threading.Lock()
        self._search = Search(query)
        weakref.finalize(self, self._search.end)
        self._search.start()

    def move(
        self, plan: Solution, captured: Problem, code: SwappableCode, write: Write, sizes: tuple[int, ...]
    ) -> None:
        """Go on as the same plan of another capture, which is for these sizes too."""
        self.plan, self.captured, self._code, self._sizes = plan, captured, code, sizes
        self._write = None if self._write is None else write

    def end(self) -> None:
        """End planning."""
        if self._search is not None:
            self._search.end()

    @property
    def plans(self) -> list[SwappablePlan]:
        """The plan, in a list."""
        return [self]

    @property
    def known(self) -> Planning:
        """The present state."""
        plan, search = self.plan, self._search
        if search is None:
            return Planning(plan.cost, plan.bound, plan.seconds, goes_on=False, swaps=0)
        news = search.news
        cost, bound = min(news.cost, plan.cost), max(news.bound, plan.bound)
        seconds = self._began + news.seconds
        return Planning(cost, min(bound, cost), seconds, search.goes_on, self.swaps, search.failure)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for planning to end; tell whether it has ended."""
        if self._search is None:
            return True
        with showing(lambda: f"planning: {self.known}"):
            return self._search.wait(timeout)

    def before(self, inputs: list[Any]) -> None:
        """Install a better plan before a forward, if no backward is pending and no gradient accumulates."""
        if self._write is None or self._search is None or not self._looking.acquire(blocking=False):
            return  # or another thread does
        try:
            over, news = not self._search.goes_on, self._search.better
            leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
            before, self._versions = self._versions, sum(t._version for t in leaves)
            if news is not None and news.plan is not None and news is not self._tried:
                accumulating = self._versions == before and any(t.grad is not None for t in leaves)
                if accumulating or self._code.alive:
                    return
                # Verify and simulate the plan that was found, write its code, and swap that in.
                self._tried = news
                problem, method, began = self.plan.problem, self.plan.method, time.perf_counter()
                keywords: dict[str, Any] = {"seconds": self._began + news.seconds, "origin": "beside the training"}
                try:
                    plan = certify(problem, self.plan.budget, news.plan, method=method, bound=news.bound, **keywords)
                    plan = with_guards(plan, self._guards)
                    code = self._write(plan)
                except SolverError as error:  # no reason to end a training
                    log.warning("A plan that was found beside the training cannot take over: %s", error)
                    return
                if code is None:
                    log.info("a plan that was found beside the training does not fit the captured graph")
                    return
                self._code.swap(*code, self._sizes)
                self.plan, self.swaps = plan, self.swaps + 1
                log.info("a better plan took over, within %s: %s", format_seconds(time.perf_counter() - began), plan)
            elif over:
                # Let go of the search, whose best plan has taken over.
                planning = self.known
                if not contradicts(planning.bound, self.plan.cost) and planning.bound > self.plan.bound:
                    closed = self.plan.cost - planning.bound <= OPTIMAL_GAP * self.plan.cost
                    status = Status.OPTIMAL if closed else self.plan.status
                    self.plan = replace(self.plan, bound=planning.bound, seconds=planning.seconds, status=status)
                self._write = None
        finally:
            self._looking.release()


def is_swappable(joint: Joint) -> bool:
    """Tell whether the forwards of all plans agree in what AOTAutograd counts of the first one.

    It counts the tensors that autograd does not check, of which every plan saves the inputs only
    (`checkmate.codegen.emit`); and more where subclasses are taken apart, or tokens order side effects.
    """
    step, nodes = joint.step, joint.module.graph.nodes
    descs = [*step.forward_descs, *step.backward_descs, *(node.meta.get("desc") for node in step.placeholders)]
    kinds = [node.meta.get("val") for node in step.placeholders if node not in step.numbers]
    return (
        not any(is_unchecked(node) and node.op != "placeholder" for node in nodes)
        and all(isinstance(kind, (torch.Tensor, int)) for kind in kinds)
        and not any(isinstance(desc, (*_OF_SEVERAL, *_TOKENS)) for desc in descs)
    )


class SwappableCode:
    """The forward and backward given to AOTAutograd, which run the present plan's code for the sizes of a call.

    Args:
        results: how many of the forward's outputs are not saved tensors.
        places: positions of the sizes among the forward's inputs.
        sizes: of the first plan.
        numbers: how many numbers are saved, which the backward is given before all else.
    """

    def __init__(self, results: int, places: Sequence[int] = (), sizes: tuple[int, ...] = (), numbers: int = 0) -> None:
        self._results, self._places, self.numbers = results, places, numbers
        self.make: Callable[[tuple[int, ...], list[Any]], tuple[Boxed, Boxed]] | None = None  # code for other sizes
        self._now = {sizes: 0}  # by sizes, the number of the plan by which the forward runs
        self._last: dict[tuple[int, ...], int] = {}  # by sizes, the last call of them
        self._runs: dict[str, dict[int, Boxed]] = {"forward": {}, "backward": {}}  # by that number
        self._numbers, self._calls = itertools.count(1), itertools.count()
        self.alive: dict[int, int] = {}  # calls whose saved tensors live, so that a backward may come; their plans

    def first(self, phase: Literal["forward", "backward"], run: Boxed) -> Boxed:
        """Take the first plan's functions, the backward last, and give AOTAutograd the ones to call."""
        # From PyTorch 2.14 on AOTAutograd notes by place which of the saved tensors are inputs, and saves the others
        # without the graph of their views. Of another plan the inputs are others: save all without.
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.saved_tensor_is_graph_input = defaultdict(bool)  # False at any place
        self._runs[phase][0] = run
        whole = self._forward if phase == "forward" else self._backward
        return takes_one_list(lambda inputs: whole(inputs))

    def swap(self, forward: Boxed, backward: Boxed, sizes: tuple[int, ...] = ()) -> None:
        """Run this code in all later forwards of these sizes and their backwards."""
        number = next(self._numbers)
        self._runs["backward"][number] = backward
        self._runs["forward"][number] = forward
        self._runs["forward"].pop(self._now.get(sizes, -1), None)
        self._now[sizes] = number

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The sizes that there is code for, the last used last."""
        return sorted(self._now, key=lambda sizes: self._last.get(sizes, -1))

    def forget(self, sizes: tuple[int, ...]) -> None:
        """Drop the code for these sizes, and what no backward can ask for any more."""
        self._runs["forward"].pop(self._now.pop(sizes, -1), None)
        self._last.pop(sizes, None)
        numbers = {*self._now.values(), *self.alive.values()}
        self._runs["backward"] = {number: run for number, run in self._runs["backward"].items() if number in numbers}

    def _forward(self, inputs: list[Any]) -> Any:
        sizes = tuple(inputs[i] for i in self._places)
        if sizes not in self._now and self.make is not None:
            self.swap(*self.make(sizes, inputs), sizes)
        number, call = self._now[sizes], next(self._calls)
        self._last[sizes] = call
        results = self._runs["forward"][number](inputs)
        self.alive[call] = number
        token = call_token(call, partial(self.alive.pop, call, None), length=number + 1)
        return [*results[: self._results], token, *results[self._results :]]

    def _backward(self, inputs: list[Any]) -> Any:
        number = len(inputs.pop(self.numbers)) - 1
        return self._runs["backward"][number](inputs)
