"""Look at a step before training: `trace` captures it, `explain` says what a plan can do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.fx as fx

from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.compilation import Backend
from checkmate.backends.error_messages import explained, quietly
from checkmate.backends.other_sizes import SizedCall
from checkmate.backends.planner import OF_EXPLAIN, OF_TRACE, Options
from checkmate.backends.tensor_state import drawing_nothing, tensors_within, unchanged
from checkmate.capture.meta_tensors import is_fake, meta_as
from checkmate.capture.number_inputs import NotFree
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.capture.provenance import is_users
from checkmate.capture.without_device.cuda import as_on_cuda
from checkmate.codegen.boxed import takes_one_list
from checkmate.core.problem import Problem
from checkmate.core.rules import with_rules
from checkmate.core.solution import Solution
from checkmate.errors import CheckmateError, Unsupported
from checkmate.look.costs import Break, Explanation, pinned_ops
from checkmate.memory import CPU
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.measure import Measure
from checkmate.solvers.search.min_budget import min_budget
from checkmate.training import TrainingStep

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keywords


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Problem:
    """Capture a step and the costs of its ops without running it: parameters, buffers and random state stay.

    Args:
        fn: a module or function, or a `checkmate.training_step`, whose updates are part of the problem then; args,
            kwargs: an example batch for it, and the options that follow.
        profile: ``"measure"``, the default, runs each distinct op on its own, on this machine. ``"roofline:NAME"`` runs
            nothing and estimates for a device, such as ``"roofline:h100"``; model and batch may then be on the meta
            device. The page docs/fit.md says more of each, and of files of costs. A `Profile` of this very
            step is taken as it is.
        others: as for `checkmate.compile`. `Problem.with_host` takes a second memory of another machine.

    Raises:
        Unsupported: if the step cannot be captured as one graph, needs no gradients, or has ops that a file lacks.
        InvalidProblem: if a file is no file of measured ops.
        OSError: if it cannot be read.
        ValueError: if there is no such profile, or device.
        HostError: if there is no such second memory.

    >>> import torch
    >>> problem = trace(torch.nn.Linear(8, 4), torch.ones(2, 8))
    >>> [op.target for op in problem.graph.ops][0]
    'aten.addmm.default'
    >>> with torch.device("meta"):
    ...     huge, batch = torch.nn.Linear(50_000, 50_000), torch.ones(2, 50_000)
    >>> trace(huge, batch, profile="roofline:h100").resident  # bytes, none of them allocated
    10000600576
    """
    options = Options.among(OF_TRACE, kwargs)
    return traced(fn, args, kwargs, options)


def traced(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Problem:
    """Trace a step for a batch, as `trace` does."""
    problems: list[Problem] = []

    # A planner that takes the first problem and ends the capture.
    def taken(problem: Problem) -> Solution:
        problems.append(problem)
        raise _Captured

    try:
        with _tracing(fn, args, kwargs, options):
            args, kwargs = fn.batch((args, kwargs)) if isinstance(fn, TrainingStep) else (args, kwargs)
            _cache_of(fn, options, taken)(*args, **kwargs)
    except Exception as error:
        if not problems and not isinstance(error, _Captured):  # with a problem, it is `_Captured` explained by Dynamo
            reason = explained(error, fn)
            if reason is error:
                raise
            raise reason.with_traceback(None) from reason.__cause__
    if not problems:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise Unsupported(
            f"{name} computes nothing that needs a gradient, so there is no backward to plan. "
            "Is it called under torch.no_grad(), or are all its parameters frozen?"
        )
    return problems[0]


class OpenTrace:
    """A step, captured for batches of many sizes.

    Args:
        fn, options: as for `traced`.
        batch: arguments and keywords for which it is captured.
        other: those of another size; sizes that differ are open.

    Raises:
        NotFree: if they cannot be.
    """

    def __init__(self, fn: Callable[..., Any], batch: Batch, other: Batch, options: Options) -> None:
        self.fn, self._options = fn, options
        self._cache = _cache_of(fn, options, _not_asked)
        try:
            with _tracing(fn, *batch, options):
                self._cache.open(batch, other)
        except SizedCall:  # captured, as all calls that it is for will be
            self._cache.before = _not_asked
        except Exception as error:
            cause = getattr(error, "inner_exception", None) or error
            raise NotFree(str(cause).partition("\n\n")[0].rpartition("\n")[2]) from error

    def problem(self, batch: Batch) -> Problem | None:
        """The problem that `traced` gives for this batch; None if the step is to be captured anew for it.

        Raises:
            NotFree: if its sizes cannot be put in.
        """
        args, kwargs = batch
        with _tracing(self.fn, args, kwargs, self._options):
            try:
                self._cache(*args, **kwargs)
            except SizedCall as call:
                return call.problem((self.fn, args, kwargs))
            except _Captured:
                return None
        return None  # there is nothing to plan


def _not_asked(*arguments: Any) -> NoReturn:
    raise _Captured


def _cache_of(fn: Callable[..., Any], options: Options, planner: Callable[[Problem], Solution]) -> CaptureCache:
    """A cache that captures a step by a planner which ends the capture, and runs nothing."""
    fn, updates = (fn.loss_fn, fn.inserts) if isinstance(fn, TrainingStep) else (fn, None)
    stop = takes_one_list(_not_asked)
    keywords: dict[str, Any] = {"second_memories": options.second_memories, "overlap": options.overlap}
    keywords["kernels"] = options.kernels
    return CaptureCache(fn, Backend(planner, lambda module, inputs: stop, options.costs, updates=updates, **keywords))


@contextmanager
def _tracing(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Iterator[None]:
    """Trace for the device of the cost source within the block, and change no state of the step.

    Meta tensors are taken for tensors on that device; with measured costs they are refused. Fake tensors on the CPU
    stay there. What differentiates while it is traced, as `flex_attention` does, stays in this thread: autograd has
    none for a device that is not here, and asserts that there is one.
    """
    costs, fakes = options.costs, [*filter(is_fake, tensors_within((fn, args, kwargs)))]
    with ExitStack() as stack:
        stack.enter_context(quietly())
        stack.enter_context(drawing_nothing())
        if isinstance(fn, TrainingStep):
            stack.enter_context(fn.as_captured())
            stack.enter_context(fn.on_device())
        if not isinstance(costs, Measure) and any(t.device.type != "cpu" for t in fakes):
            capability = costs.capability if isinstance(costs, Device) else None
            on_cuda = capability is not None and stack.enter_context(as_on_cuda(capability))
            stack.enter_context(meta_as(torch.device("cuda", 0) if on_cuda else CPU))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def explain(fn: Callable[..., Any], *args: Any, top: int = 10, **kwargs: Any) -> Explanation:
    """Say before training what a plan can and cannot do with a step. The model's state does not change.

    A step that cannot be captured as one graph raises nothing: the explanation says why. To find all the places where
    it breaks, and not only the first, its forward then runs once, in pieces.

    Args:
        fn: a module, a function or a `checkmate.training_step`; args, kwargs: an example batch for it,
            and the options that follow.
        top: how many of the pinned ops are printed.
        others: as for `checkmate.trace`, and ``rules``: it says which ops each is for, and which cannot obey it.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.5))
    >>> [(row.why, row.output_bytes) for row in explain(model, torch.ones(2, 8)).pinned]
    [('is handed in by autograd', 32), ('draws random numbers', 8)]
    >>> explain(lambda x: model(x).sum().backward(), torch.ones(2, 8)).can_be_planned
    False
    """
    options = Options.among(OF_EXPLAIN, kwargs)
    _ = options.costs  # a profile that there is none of is no fault of the step
    try:
        problem = traced(fn, args, kwargs, options)
    except CheckmateError as error:
        return Explanation((), tuple(_breaks(fn, args, kwargs)), str(error), None, None, top)
    except Exception as error:  # noqa: BLE001  # plain PyTorch fails on this batch as well
        return Explanation((), (), f"{type(error).__name__}: {error}", None, None, top)
    problem = problem if options.rules is None else with_rules(problem, options.rules)
    return Explanation(pinned_ops(problem), (), "", problem, min_budget(problem), top)


class _Captured(Exception):
    """Raised in place of planning a captured graph, or of running one without gradients."""


def _breaks(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Break]:
    """The places where `torch.compile` would split the step, in the order of the code."""
    breaks: dict[Break, None] = {}
    as_captured = fn.as_captured if isinstance(fn, TrainingStep) else nullcontext
    fn = fn.loss_fn if isinstance(fn, TrainingStep) else fn
    if any(map(is_fake, tensors_within((fn, args, kwargs)))):
        return []  # nothing can run

    # A backend that notes where each graph ends, and runs it plainly.
    def note(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            frames = [f for f in reason.user_stack if is_users(f.filename)] or list(reason.user_stack)
            at = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-1:]]
            breaks[Break("".join(at), reason.reason.strip().splitlines()[0])] = None
        return module.forward

    note.answer = Answer()  # type: ignore[attr-defined]  # captured as a step is

    def step(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # Run the step once, and leave no trace.
    try:
        with unchanged((fn, args, kwargs)), as_captured():
            torch.compile(step, backend=note, dynamic=False)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # the reason is known already; what fails here, fails in plain PyTorch
        breaks[Break("", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")] = None
    return list(breaks)
