"""The user's step at any batch size: made, traced, run with a plan and measured.

Tracing takes seconds, and there are many sizes to try. Once a size is traced, the next is traced with its size open,
and others are put in: each problem is the one that its own trace would give, which is tried at one size. Where sizes
cannot be open, as where the step itself is made for each size, each is traced by itself.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from checkmate.backends.compilation import Backend
from checkmate.backends.planner import Options
from checkmate.backends.tensor_state import tensors_within, unchanged
from checkmate.capture.device import main_device
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.number_inputs import NotFree
from checkmate.compiler import CompiledStep
from checkmate.core.fingerprint import fingerprints, same_ops
from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import CheckmateError, HostError, Unsupported
from checkmate.memory import measure_peak
from checkmate.solvers.common.incumbent import again
from checkmate.statusline import showing
from checkmate.torch_internals.running import tree_leaves
from checkmate.tracing import Batch, OpenTrace, traced
from checkmate.training import TrainingStep

log = logging.getLogger("checkmate.sizes")
TRIES = 2  # to have sizes open: some are special, such as a multiple of eight
LEAST_SIZE = 2  # that is open: a dimension of 1 is broadcast, by other ops


def maker_of(make_step: Callable[..., Any] | nn.Module) -> Callable[[int], Any]:
    """The function that makes the step of a size."""
    if isinstance(make_step, nn.Module):
        return lambda size: make_step
    if not callable(make_step):
        raise TypeError(f"make_step is a function that gives the step, or a module, not {type(make_step).__name__}.")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = [p for p in inspect.signature(make_step).parameters.values() if p.kind in kinds and p.default is p.empty]
    if len(params) > 1:
        names = ", ".join(p.name for p in params)
        raise TypeError(f"make_step takes no argument or the size, but this one takes {names}. {_STEP_ITSELF}")
    make_once = cache(make_step)
    return make_step if params else lambda size: make_once()


def arguments_of(batch: Any) -> Batch:
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
    make_batch: Callable[[int], Batch]
    options: Options
    host: Host | None = None  # a second memory that is not measured
    advice: str = ""  # where a size fails

    def make(self, size: int) -> tuple[Any, Batch]:
        """Make the step and its arguments; an error names the size if the user's functions fail."""
        name = "make_step"
        try:
            step = self.make_step(size)
            name = "make_batch"
            batch = self.make_batch(size)
        except CheckmateError:
            raise
        except Exception as error:  # any error of the user's function: name the size
            advice = self.advice if name == "make_batch" else f"{self.advice} {_STEP_ITSELF}"
            raise Unsupported(f"{name}, for size {size}, failed: {_message(error)} {advice}".rstrip()) from error
        if not callable(step):
            raise TypeError(f"make_step gave no step but {type(step).__name__}. {_STEP_ITSELF}")
        return step, batch

    def traced(self, size: int) -> Problem:
        """Trace the step of a size."""
        step, (args, kwargs) = self.make(size)
        with self._tracing(size):
            return traced(step, args, kwargs, self.options)

    def opened(self, size: int, other_size: int) -> OpenTrace:
        """Trace the step of a size, open to others; NotFree if it cannot be."""
        other_step, other_batch = self.make(other_size)
        step, batch = self.make(size)
        if step is not other_step:
            raise NotFree("each size has a step of its own")
        with self._tracing(size):
            return OpenTrace(step, batch, other_batch, self.options)

    def put_in(self, open_trace: OpenTrace, size: int) -> Problem | None:
        """The problem of a size by an open trace; None if that is not for it."""
        step, batch = self.make(size)
        try:
            with self._tracing(size):
                return open_trace.problem(batch) if step is open_trace.fn else None
        except NotFree as error:
            log.info("size %d cannot be put in: %s", size, error)
            return None

    @contextmanager
    def _tracing(self, size: int) -> Iterator[None]:
        """Errors within the block name the size."""
        began = time.perf_counter()
        try:
            with showing("tracing", name=f"size {size}"):
                yield
        except HostError:  # no fault of the size
            raise
        except (CheckmateError, RuntimeError, ValueError) as error:
            text = f"The step of size {size} cannot be traced: {_message(error)} {self.advice}"
            raise Unsupported(text.rstrip()) from error
        log.info("size %d traced in %.1f s", size, time.perf_counter() - began)

    def measured_peak(self, size: int, solution: Solution) -> int:
        """Run a plan on real tensors and give the peak in bytes. Parameters, buffers and random states are restored."""
        # The step on real tensors, with this plan.
        step, (args, kwargs) = self.make(size)
        if isinstance(step, TrainingStep):
            raise Unsupported("measure=True runs no updates: call the training step itself, and measure that.")
        reached = real_tensors((step, args, kwargs))
        leaves = [t for t in reached if t.is_leaf and t.requires_grad]

        def planned(problem: Problem) -> Solution:
            """The plan, for the problem that is captured for the run."""
            if solution.schedule is None or not same_ops(problem, solution.problem):
                raise Unsupported("The step has other ops as it runs than as it was traced: nothing can be measured.")
            return again(solution, problem, solution.budget + problem.resident - solution.problem.resident)

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


def real_tensors(reach: Any) -> list[torch.Tensor]:
    """The tensors that a step with its batch reaches, each once; raise if one of them has no data."""
    reached = tensors_within(reach)
    if any(map(is_fake, reached)):
        raise Unsupported("measure=True runs the step: its model and its batch cannot be fake or on the meta device.")
    return reached


_STEP_ITSELF = "If make_step is the step itself, give a function that gives it: lambda: step."


def _message(error: Exception) -> str:
    text = str(error).strip()
    text = text if isinstance(error, CheckmateError) else f"{type(error).__name__}: {text}"
    return text if text.endswith(".") else f"{text}."


class SizedProblems:
    """The problems of a step at any size from the smallest on, each as its own trace gives it."""

    def __init__(self, steps: SizedSteps, problems: Mapping[int, Problem] | None = None, smallest: int = 1) -> None:
        self._steps, self._problems, self._least = steps, dict(problems or {}), max(LEAST_SIZE, smallest)
        self._open = list[OpenTrace]()
        self._tries = TRIES

    def __call__(self, size: int) -> Problem:
        """The problem of a size."""
        if size not in self._problems:
            problems = (self._steps.put_in(open_trace, size) for open_trace in self._open)
            problem = next(filter(None, problems), None) or self._opened(size) or self._steps.traced(size)
            host = self._steps.host
            self._problems[size] = problem if host is None else problem.with_host(host)
        return self._problems[size]

    def _opened(self, size: int) -> Problem | None:
        """Open the sizes, if they can be; give the problem of this one."""
        other_size = max(self._least, size // 2)
        if not self._problems or other_size >= size or not self._tries:
            return None
        self._tries -= 1
        traced: Problem | None = None
        try:
            open_trace = self._steps.opened(size, other_size)
            # It has to be the step that it is with a fixed size: one that is known, else this one.
            pairs = ((self._steps.put_in(open_trace, n), problem) for n, problem in self._problems.items())
            put_in, fixed = next((pair for pair in pairs if pair[0] is not None), (None, None))
            if fixed is None:
                put_in, fixed = self._steps.put_in(open_trace, size), (traced := self._steps.traced(size))
            if put_in is None or not _same(put_in, fixed):
                raise NotFree("with open sizes, the step is another one than with fixed ones")
        except NotFree as error:
            log.info("sizes are no inputs of the step, and each is traced by itself: %s", error)
            return traced
        self._open.append(open_trace)
        return traced or self._steps.put_in(open_trace, size)


def _same(a: Problem, b: Problem) -> bool:
    """Tell whether two problems have the same ops and bytes; seconds may be measured."""
    first, second = fingerprints(a), fingerprints(b)
    return (first.structure, first.sizes, a.resident) == (second.structure, second.sizes, b.resident)
