"""The user's step at any size, for `checkmate.max_batch_size`: made, traced, run with a plan and measured."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
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
from checkmate.compiler import CompiledStep
from checkmate.core.fingerprint import same_ops
from checkmate.core.graph import MAX_BYTES
from checkmate.core.host import Host
from checkmate.core.problem import Problem
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
