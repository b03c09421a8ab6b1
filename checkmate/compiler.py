"""A step within a byte budget: `compile`, and `verify`, which compares one with plain PyTorch.

On the main path, 1 of 16: see docs/idea.md.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any, Generic, TypeVar, overload

import torch
from torch import nn
from typing_extensions import ParamSpec, Unpack

from checkmate.backends import ranks
from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.compilation import Backend
from checkmate.backends.error_messages import explained, refuse_lazy
from checkmate.backends.plan_swap import Planning, SwappablePlan
from checkmate.backends.planner import OF_VERIFY, Bytes, CompileOptions, Options, Planner
from checkmate.backends.static_memory import arenas
from checkmate.codegen.refused_backwards import watch_backward
from checkmate.codegen.second_memory import SecondMemories
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import Unsupported
from checkmate.memory.report import ArenaReport, report
from checkmate.solvers.solve import solve
from checkmate.torch_internals.versions import is_tried
from checkmate.updates.insert import Insert
from checkmate.verification.compare import Certificate, compare_with_plain

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("checkmate.verification.compare")


@overload
def compile(  # type: ignore[overload-overlap]  # a module is callable too, and stays what it is
    fn: M, budget: Bytes = "fit", **options: Unpack[CompileOptions]
) -> M: ...


@overload
def compile(fn: Callable[P, R], budget: Bytes = "fit", **options: Unpack[CompileOptions]) -> CompiledStep[P, R]: ...


def compile(fn: Any, budget: Bytes = "fit", **options: Unpack[CompileOptions]) -> Any:
    """Make a training step that stays within a budget of bytes, with the numbers of plain PyTorch, bit for bit.

    Nothing happens until the first call, which captures the step, measures its ops, plans and generates code. Another
    shape, or a change between training and evaluation, gets a plan of its own. Plans are kept on disk. Without
    gradients, under `torch.no_grad` or where nothing needs one, plain PyTorch runs.

    The page docs/options.md says what each option means, its default, and where to read on.

    Args:
        fn: a module, or any function of tensors; a loss that is computed inside it is within the plan too.
        budget: bytes at any moment of the step, such as ``"8 GB"``; ``"fit"`` and ``"70%"`` of what there then is.

    Returns:
        For a module the same module with a compiled forward: it shares parameters, buffers, mode and every attribute
        with the one given, which is left as it was. For a function a function. Both have ``plans``, ``planning``,
        ``wait`` and ``memory``, as docs/index.md lists them: a module where it has no attributes of these names itself.
        A copy, or one saved and loaded whole, is compiled with the same options.

    Raises:
        BudgetError: at once, if the budget is neither a positive number of bytes nor a share of what there is; at the
            first call, if the device does not say what there is.
        RuleError: at once, if a rule is none; at the first call, if it names nothing in the step, or cannot be obeyed.
        InfeasibleBudget: at the first call, if no plan fits; it names the op in the way and the smallest budget.
        Unsupported: at the first call, if the step cannot be captured as one graph, or runs on several devices; at a
            later call, if a number that changes from call to call has used up ``max_plans``.
        TypeError: at once, for another option; it names the nearest.
        VerificationError: at the first call, with ``verify``, if anything differs; at any that captures, without a
            choice, on a version of PyTorch that has not been tried.
        HostError: at a call, if there is no such second memory or no room in it, or it fails; the step has changed
            nothing then, and the next call begins anew.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> model = compile(model, budget="1 MB")
    >>> model(torch.ones(8, 64)).sum().backward()
    >>> print(model.plans[0].status)
    Status.OPTIMAL
    """
    refuse_what_is_no_step(fn)
    ranks.refuse_wrapped(fn)
    settings = Options.of(compile, CompileOptions.__optional_keys__, options, budget)
    return _compile_module(fn, settings) if isinstance(fn, nn.Module) else CompiledStep(fn, settings)


def verify(fn: Callable[..., Any], *args: Any, budget: Bytes = "fit", calls: int = 1, **kwargs: Any) -> Certificate:
    """Run a step plainly and compiled on your own batch, and certify that nothing differs.

    Compared bit by bit are what the step returns, the gradients of all it depends on, its parameters, buffers and
    inputs, and the random states of torch, Python and NumPy; and the measured peak with the predicted one, where the
    step returns one loss. All of this is as it was when the call returns. The page docs/train.md shows it.

    Args:
        fn: a module or function; args, kwargs: a batch for it.
        budget: as for `compile`, as are others of its options.
        calls: call the step so often before one backward through all its results, as a loss of two batches does. A plan
            is for one call: with more of them the peak is not compared.

    Raises:
        ValueError: if ``calls`` is no positive number.
        VerificationError: naming what differs, and the first op whose value does.
        InfeasibleBudget, Unsupported: as for `compile`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    >>> report = verify(model, torch.ones(8, 64), budget="1 MB")
    >>> report.outputs, report.gradients, report.repeats
    (1, 4, True)
    """
    refuse_what_is_no_step(fn)
    ranks.refuse_wrapped(fn)
    options = Options.among(OF_VERIFY, kwargs, budget=budget, verify=False, wait="best")
    return CompiledStep(fn, options)._compare(args, kwargs, calls)


def refuse_what_is_no_step(fn: Any, way_in: str = "checkmate.compile") -> None:
    """Raise a TypeError for a class, or for an object that cannot be called."""
    if not callable(fn) or isinstance(fn, type):
        kind = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise TypeError(f"{way_in} takes a module or a function, not {kind}.")


def new_backend(planner: Planner, second_memories: SecondMemories | None, updates: Insert | None = None) -> Backend:
    """Make the backend of a step, with its updates if they are part of it."""
    options = planner.options
    return Backend(
        planner,
        profile=options.costs,
        new_arena=arenas(options.memory, cache=options.cache),
        updates=updates,
        second_memories=second_memories,
        overlap=options.overlap,
        kernels=options.kernels,
    )


def _keeping_all(problem: Problem) -> Solution:
    return solve(problem, problem.keep_all_peak, method="checkpoint-all")


class Planned:
    """The plans of a step, captured for one kind of call or several."""

    _caches: Sequence[CaptureCache]

    @property
    def _plans(self) -> list[SwappablePlan]:
        return [plan for cache in self._caches for plan in cache.plans]

    @property
    def plans(self) -> list[Solution]:
        """The `Solution` of each captured graph that is kept, in the order of capture.

        With ``accumulate`` those of all calls but the last of an update come first.
        """
        return [plan.plan for plan in self._plans]

    @property
    def planning(self) -> list[Planning]:
        """The state of each plan in ``plans``: its cost and bound, and whether a better one may still come."""
        return [plan.known for plan in self._plans]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for planning to end; tell whether it has ended.

        What it has found takes over at the next call. Ctrl-C ends the waiting, not the planning.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(p.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) for p in self._plans)

    def memory(self) -> ArenaReport:
        """Report the arenas and the second memory of the last step; prints as a table."""
        second_memories = self._caches[0].backend.second_memories  # all of a step have one
        arenas = (step.arena for cache in self._caches for step in cache.steps if step.arena is not None)
        return report(arenas, () if second_memories is None else second_memories.uses())


class CompiledStep(Planned, Generic[P, R]):
    """A function with a plan for each graph captured from it. Made by `compile`."""

    def __init__(self, fn: Callable[P, R], options: Options, backend: Backend | None = None) -> None:
        self._fn, self._options = fn, options
        backend = new_backend(Planner(options), options.second_memories) if backend is None else backend
        self._run, self._verify = CaptureCache(fn, backend, options.max_plans), options.verify
        self._caches = [self._run]
        if self._verify is None and not is_tried():
            self._run.before = self._compare_if_it_fits
        self._ready = False
        functools.update_wrapper(self, fn, updated=())

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledStep, (self._fn, self._options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step; the first call for a kind of input plans it.

        Within another compiled step it is a part of that. Without gradients it is the plain one.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._fn(*args, **kwargs)
        # Before the first call, refuse what cannot be planned, and compare it with plain PyTorch if so wished.
        if not self._ready:
            refuse_lazy(self._fn, args)
            ranks.refuse_inner(self._fn, args)
            self._ready = True  # for the calls that are compared
            try:
                if self._verify:
                    log.info("%s", self._compare(args, kwargs))
            except BaseException:
                self._ready = False
                raise
        try:
            result: R = self._run(*args, **kwargs)
        except Exception as error:
            reason = explained(error, self._fn)
            if reason is error and not getattr(error, "from_kernel", False):
                raise
            raise reason.with_traceback(None) from reason.__cause__
        watch_backward(result)
        return result

    def _compare_if_it_fits(self, args: Any, kwargs: Any) -> None:
        try:
            log.info("%s", self._compare(args, kwargs))
        except torch.OutOfMemoryError:
            log.warning("There is no memory for a plain step: this one is not compared with it.")

    def _compare(self, args: Any, kwargs: Any, calls: int = 1) -> Certificate:
        capture, backend = functools.partial(CaptureCache, self._fn), self._run.backend
        if backend.kernels != "fused":
            return compare_with_plain(self._fn, self, self._run, args, kwargs, capture, calls)
        # Its bits are those of the fused step that keeps everything.
        reference = capture(Backend(_keeping_all, profile=backend.profile, kernels="fused", op_by_op=backend.op_by_op))
        against = "the fused step that keeps everything"
        return compare_with_plain(reference, self, self._run, args, kwargs, capture, calls, against)


class _OfItsStep:
    """An attribute of a compiled module that its step provides. A name that the module itself sets takes precedence."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return self if module is None else getattr(module._checkmate_step, self._name)


def _compile_module(model: Any, options: Options) -> Any:
    """Give the module a twin whose class has a compiled forward; both objects share one ``__dict__``.

    What is compiled goes with the module, and not with the class, which stays: Dynamo keeps those it has seen.
    """
    model = getattr(model, "_checkmate_model", model)  # of a compiled module the plain one, for another budget
    # The class's forward is compiled, so one on the object would be bypassed.
    if "forward" in vars(model):
        raise Unsupported(
            f"The forward of this {type(model).__name__} was replaced on the object. "
            "Compile a function that calls it: checkmate.compile(lambda x: model(x), budget=...)."
        )
    plain: Any = type(model)

    # A subclass whose forward runs the compiled step; copies and pickles are compiled anew.
    class Compiled(plain):
        __slots__ = ("_checkmate_model", "_checkmate_step")

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            run = getattr(self, "_checkmate_step", plain.forward)  # objects that the class itself makes run plainly
            return run(self, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _compile_module, (self._checkmate_model, options)  # it has the same __dict__

        def __copy__(self) -> Any:
            return _compile_module(copy(self._checkmate_model), options)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return _compile_module(deepcopy(self._checkmate_model, memo), options)

    for name in ("plans", "memory", "planning", "wait"):
        if not hasattr(model, name):  # keep the user's own attributes
            setattr(Compiled, name, _OfItsStep(name))
    functools.update_wrapper(Compiled.forward, plain.forward)
    Compiled.__name__, Compiled.__qualname__, Compiled.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    # The twin shares parameters, buffers and hooks with the model.
    compiled: Any = object.__new__(Compiled)
    compiled.__dict__ = model.__dict__
    object.__setattr__(compiled, "_checkmate_model", model)
    object.__setattr__(compiled, "_checkmate_step", CompiledStep(plain.forward, options))
    return compiled
