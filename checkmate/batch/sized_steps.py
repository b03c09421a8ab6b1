"""The user's step at any batch size: made, traced, run with a plan and measured; and its problem, interpolated.

Tracing takes seconds, and near the largest size that fits there are many sizes to try. Where traces have the same ops,
the bytes of every value are taken to lie on the polynomial through those of the traced sizes next to it,

    bytes_v(n) = sum_i bytes_v(n_i) · prod_{j != i} (n - n_j) / (n_i - n_j)

a parabola between traced sizes, and a line beyond them, where a parabola would blow rounding up; and so are seconds,
workspaces and resident bytes. This is a guess of where to look: no answer rests on it.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from checkmate.backends.compilation import Backend
from checkmate.backends.planner import Options
from checkmate.backends.tensor_state import tensors_within, unchanged
from checkmate.capture.device import main_device
from checkmate.capture.meta_tensors import is_fake
from checkmate.compiler import CompiledStep
from checkmate.core.fingerprint import renumbered, same_ops
from checkmate.core.graph import MAX_BYTES
from checkmate.core.host import Host
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Solution
from checkmate.errors import CheckmateError, HostError, Unsupported
from checkmate.memory import measure_peak
from checkmate.solvers.common.incumbent import again
from checkmate.statusline import showing
from checkmate.torch_internals.trees import tree_leaves
from checkmate.tracing import traced
from checkmate.training import TrainingStep

log = logging.getLogger("checkmate.batch")


def maker_of(make_step: Callable[..., Any] | nn.Module) -> Callable[[int], Any]:
    """The function that makes the step of a size."""
    if isinstance(make_step, nn.Module):
        return lambda size: make_step
    if not callable(make_step):
        raise TypeError(f"make_step is a function that gives the step, or a module, not {type(make_step).__name__}.")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in inspect.signature(make_step).parameters.values() if p.kind in kinds and p.default is p.empty]
    if len(given) > 1:
        names = ", ".join(p.name for p in given)
        raise TypeError(f"make_step takes no argument or the size, but this one takes {names}. {_STEP_ITSELF}")
    made = cache(make_step)
    return make_step if given else lambda size: made()


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and named arguments: tuples and lists are positional, dicts named, others one argument.

    >>> arguments_of((1, 2)), arguments_of({"x": 1}), arguments_of(3)
    (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


@dataclass(frozen=True)
class SizedSteps:
    """The user's step at any size."""

    make_step: Callable[[int], Any]
    make_batch: Callable[[int], Any]
    options: Options
    host: Host | None = None  # a second memory that is not measured

    def make(self, size: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Make the step and its arguments; an error names the size if the user's functions fail."""
        name = "make_step"
        try:
            step = self.make_step(size)
            name = "make_batch"
            args, kwargs = arguments_of(self.make_batch(size))
        except Exception as error:  # any error of the user's function: name the size
            advice = _OTHER_SIZES if name == "make_batch" else f"{_OTHER_SIZES} {_STEP_ITSELF}"
            raise Unsupported(f"{name}, for size {size}, failed: {_said(error)} {advice}") from error
        if not callable(step):
            raise TypeError(f"make_step gave no step but {type(step).__name__}. {_STEP_ITSELF}")
        return step, args, kwargs

    def problem(self, size: int) -> Problem:
        """Trace the step; an error names the size if that fails."""
        step, args, kwargs = self.make(size)
        began = time.perf_counter()
        try:
            with showing("tracing", name=f"size {size}"):
                problem = traced(step, args, kwargs, self.options)
                problem = problem if self.host is None else problem.with_host(self.host)
        except HostError:  # no fault of the size
            raise
        except (CheckmateError, RuntimeError, ValueError) as error:
            raise Unsupported(f"The step of size {size} cannot be traced: {_said(error)} {_OTHER_SIZES}") from error
        log.info("size %d traced in %.1f s: %r", size, time.perf_counter() - began, problem)
        return problem

    def measured_peak(self, size: int, solution: Solution) -> int:
        """Run a plan on real tensors and give the peak in bytes. Parameters, buffers and random states are restored."""
        # The step on real tensors, with this plan.
        step, args, kwargs = self.make(size)
        if isinstance(step, TrainingStep):
            raise Unsupported("measure=True runs no updates: call the training step itself, and measure that.")
        reached = real_tensors(step, args, kwargs)
        leaves = [t for t in reached if t.is_leaf and t.requires_grad]

        def planned(problem: Problem) -> Solution:
            """The plan, for the problem that is captured for the run."""
            if solution.schedule is None or not same_ops(problem, solution.problem):
                raise Unsupported("The step has other ops as it runs than as it was traced: nothing can be measured.")
            return again(solution, problem, MAX_BYTES)

        backend = Backend(planned, profile=solution.problem.profile)
        compiled = CompiledStep(step, Options(solution.budget, verify=False), backend)

        # Forward and backward, from ones.
        def run() -> Any:
            outputs = [t for t in tree_leaves(compiled(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            roots = [t for t in outputs if t.requires_grad]
            ones = [torch.ones_like(root) for root in roots]
            return outputs, torch.autograd.grad(roots, leaves, ones, allow_unused=True)

        # Measure the second run, and leave no trace.
        with unchanged((step, args, kwargs)):
            run()  # compiles, which is not to be measured
            use = measure_peak(run, main_device(reached))
        return (solution.problem.resident if use.before is None else use.before) + use.peak


def real_tensors(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a step reaches, each once; raise if one of them has no data."""
    reached = tensors_within((step, args, kwargs))
    if any(map(is_fake, reached)):
        raise Unsupported("measure=True runs the step: its model and its batch cannot be fake or on the meta device.")
    return reached


_OTHER_SIZES = "smallest= and largest= say between which sizes to look."
_STEP_ITSELF = "If make_step is the step itself, give a function that gives it: lambda: step."


def _said(error: Exception) -> str:
    text = str(error).strip()
    text = text if isinstance(error, CheckmateError) else f"{type(error).__name__}: {text}"
    return text if text.endswith(".") else f"{text}."


class SizedProblems:
    """The problems of one step at different sizes. ``trace`` gives the problem of a size.

    >>> def trace(n):
    ...     return Problem.from_dag([[], [0], [0, 1]], seconds=[n] * 3, sizes=[4 * n] * 3)
    >>> problems = SizedProblems(trace)
    >>> problems.at(1).keep_all_peak, problems.at(3).keep_all_peak, problems.estimate(7).keep_all_peak
    (12, 36, 84)
    >>> sorted(problems.traced)
    [1, 3]
    """

    def __init__(self, trace: Callable[[int], Problem], traced: Mapping[int, Problem] | None = None) -> None:
        self._trace = trace
        self.traced = dict(traced or {})

    def at(self, size: int) -> Problem:
        """The problem of a size, traced."""
        if size not in self.traced:
            self.traced[size] = self._trace(size)
        return self.traced[size]

    def estimate(self, size: int) -> Problem | None:
        """The problem of a size, interpolated from the traced sizes next to it; None if their graphs differ."""
        if size in self.traced:
            return self.traced[size]
        # Estimate from sizes on both sides and a third, or from two on one side, none near to another: a jump of a few
        # bytes, or seconds measured at a bad time, would be drawn out to the size asked for.
        below = sorted((n for n in self.traced if n < size), reverse=True)
        above = sorted(n for n in self.traced if n > size)
        nearest = sorted([*below, *above], key=lambda n: abs(n - size))
        if below and above:
            ends = [below[0], above[0]]
            apart = [n for n in nearest if 2 * min(abs(n - end) for end in ends) >= ends[1] - ends[0]]
            sizes = [*ends, *apart[:1]]
        else:
            apart = [n for n in nearest[1:] if 8 * abs(n - nearest[0]) >= abs(size - nearest[0])]
            sizes = [*nearest[:1], *(apart or nearest[1:])[:1]]
        alike = [n for n in sizes if renumbered(self.traced[n], self.traced[sizes[0]]) is not None]
        if len(alike) < 2 or sizes[1] not in alike:
            return None
        # Lagrange's polynomials of these sizes at the one asked for, which sum up to 1
        shares = [math.prod((size - other) / (own - other) for other in alike if other != own) for own in alike]
        return _mixed([self.traced[n] for n in alike], shares)


def _mixed(problems: list[Problem], shares: list[float]) -> Problem | None:
    """A problem with the first graph and weighted sums of all figures; None if the ops differ."""
    numbered = [numbers for p in problems if (numbers := renumbered(p, problems[0])) is not None]
    if len(numbered) < len(problems):
        return None

    def total(figures: Iterable[np.ndarray | int]) -> np.ndarray:
        return np.maximum(0.0, sum(share * f for share, f in zip(shares, figures, strict=True)))

    def whole(figures: Iterable[np.ndarray | int]) -> np.ndarray:
        return np.ceil(total(figures) - 1e-6).astype(np.int64)

    def key(problem: Problem, way: InPlace) -> tuple[str, ...]:
        values = [problem.graph.values[v].name for v in (way.over, way.makes) if v is not None]
        return problem.graph.ops[way.op].name, *values

    graph, in_order = problems[0].graph, [*zip(problems, numbered, strict=True)]
    sizes = whole(np.array([p.graph.values[v].size_bytes for v in values]) for p, (_, values) in in_order)
    # The ways that all problems have.
    workspaces, ways = [{key(p, way): way.workspace for way in p.profile.ways} for p in problems], []
    for way in problems[0].profile.ways:
        name = key(problems[0], way)
        if all(name in of for of in workspaces) and (way.makes is None or sizes[way.makes] == sizes[way.over]):
            ways.append(replace(way, workspace=int(whole(of[name] for of in workspaces))))
    profile = Profile(
        seconds=total(p.seconds[ops] for p, (ops, _) in in_order),
        workspace_bytes=whole(p.workspace[ops] for p, (ops, _) in in_order),
        resident_bytes=int(whole(p.resident for p in problems)),
        source=f"{problems[0].profile.source}; another size, estimated",
        estimated=tuple(range(len(graph.ops))),
        ways=tuple(ways),
        state_bytes=problems[0].profile.state_bytes,
    )

    def next_split() -> Problem | None:
        """The weighted sum of further splits, if all steps are split in the same way."""
        split = [one for p in problems if p.next_split is not None and (one := p.next_split()) is not None]
        return _mixed(split, shares) if len(split) == len(problems) else None

    values = tuple(replace(value, size_bytes=int(n)) for value, n in zip(graph.values, sizes, strict=True))
    further = next_split if all(p.next_split is not None for p in problems) else None
    return replace(problems[0], graph=replace(graph, values=values), profile=profile, codegen=None, next_split=further)
