"""Keep one captured graph for each kind of call of a step, and drop the least recently used.

Dynamo keeps compiled code with a code object, looks through all of it at each call, and gives up at eight
(`torch._dynamo.config.recompile_limit`). Here each capture is a code object of its own. Which of them may be the one
for a call is looked up by the shapes and types of its tensors; Dynamo's guards decide. So the tenth shape costs what
the second did, and a capture that is forgotten is freed, with its code and its plan.
On the main path, 2 of 16: see docs/idea.md.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from checkmate.backends import ranks
from checkmate.backends.compilation import Backend, Call, CapturedStep, run_generated_code
from checkmate.backends.error_messages import explained, of_op, quietly
from checkmate.backends.other_sizes import Earlier, SizedCall, SizedPlans
from checkmate.backends.plan_swap import SwappablePlan
from checkmate.backends.recaptures import Kind, Reason, changed, constants, spelled, too_many, value_now, why_not
from checkmate.backends.step_problem import joint_of
from checkmate.backends.tensor_state import draw_again_from, other_random_states
from checkmate.capture.around import surrounded
from checkmate.capture.autocast import within_region
from checkmate.capture.guards import GuardFailed
from checkmate.capture.joint import Joint
from checkmate.capture.meta_tensors import Descriptions
from checkmate.capture.number_inputs import NotFree, Number, as_inputs, written_out
from checkmate.capture.patches.data_dependence import knowing_selections
from checkmate.capture.patches.is_compiling import plain_if_possible
from checkmate.capture.patches.kernels import value_of
from checkmate.capture.patches.recurrent import with_recurrent_modules
from checkmate.capture.patches.traced_ops import traced_since_now
from checkmate.capture.sizes import OtherStep, Sizes, fixed_at
from checkmate.core.solution import format_gap
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.memory.meter import collecting_seldom
from checkmate.statusline import showing
from checkmate.torch_internals import running
from checkmate.torch_internals.capturing import (
    TracingContext,
    _debug_get_cache_entry_list,
    _is_primal,
    dynamo_config,
    reset_code,
    run,
)
from checkmate.torch_internals.running import outside_tracing

log = logging.getLogger("checkmate.backends.capture_cache")
TRIES = 2  # to make sizes inputs: some are special, such as a multiple of eight
_FORWARD, _BACKWARD = (  # hooks of all modules
    (running._global_forward_pre_hooks, running._global_forward_hooks),
    (running._global_backward_pre_hooks, running._global_backward_hooks),
)
_HOOKS = [hooks for hooks in (*_FORWARD, *_BACKWARD) if isinstance(hooks, dict)]  # others this PyTorch lacks
MISS: Any = object()  # result of a captured function for a call without compiled code


class _NothingToPlan(Exception):
    """Raised by captured code that needs no gradient: plain PyTorch runs it."""


def _hand_back(*inputs: Any) -> Any:
    raise _NothingToPlan


_NOTHING = CapturedStep(_hand_back)


def _copy_of(fn: Callable[..., Any]) -> types.FunctionType:
    """Make a function that Dynamo captures as ``fn``, and that gives `MISS` if it has no compiled code for a call.

    When it is gone, Dynamo forgets its code. What autograd holds of that lives until the backward has run.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return MISS
        return fn(*args, **kwargs)

    own = types.FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
    own.__kwdefaults__ = step.__kwdefaults__
    weakref.finalize(own, _drop, own.__code__).atexit = False  # Dynamo's compiled code holds the code object
    return own


def _drop(code: types.CodeType) -> None:
    """Have Dynamo forget what it compiled of a code object, and free its guards.

    It keeps an object for the guards of each capture as long as the modules live that the step calls by name, and with
    that the lines of code that each guard is from.
    """
    guards = [entry.guard_manager for entry in _debug_get_cache_entry_list(code)]
    reset_code(code)
    for guard in guards:
        vars(guard).update(root=None, diff_guard_root=None, closure_vars=None, code_parts=[], verbose_code_parts=None)


@dataclass(eq=False)
class _Entry:
    """A captured step of the cache."""

    kind: Kind  # of the calls that it may be for
    own: types.FunctionType
    replay: Callable[..., Any]  # runs what was captured, or gives `MISS`
    because: Reason | None  # the value for which an earlier capture was not for its call
    numbers: frozenset[str]  # numbers that are inputs, by Dynamo's names
    used: int = 0  # at which call, the last time
    draws: bool = False  # from the generators of Python or NumPy
    fixed_at: str | None = None  # where PyTorch has fixed a size that was to be open
    step: CapturedStep = _NOTHING

    def end(self) -> None:
        """End the search for a better plan."""
        if self.step.training is not None:
            self.step.training.end()


class CaptureCache:
    """A cache of captures of a function, one for each kind of call; ``most`` of them are kept.

    Where there is nothing to plan, plain PyTorch runs the function, unless the backend lowers modules in its own way.
    """

    def __init__(self, fn: Callable[..., Any], backend: Backend, most: int = 64) -> None:
        self._fn, self.backend, self._most = fn, backend, most
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._entries: list[_Entry] = []
        self._calls = itertools.count(1)
        self._fixed: set[str] = set()  # Dynamo's names of numbers that cannot be inputs
        self._closed = Counter[tuple[Kind, Set[str]]]()  # times that sizes could not be inputs, beside these numbers
        self._warned = False
        self.before: Callable[[Any, Any], None] | None = None  # calls this function, before a call is captured for it

    @property
    def steps(self) -> list[CapturedStep]:
        """The captured steps that train, in the order of capture."""
        return [entry.step for entry in self._entries if entry.step.training is not None]

    @property
    def plans(self) -> list[SwappablePlan]:
        """The plans by which these run now."""
        return [plan for step in self.steps if step.training is not None for plan in step.training.plans]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the capture for this call; make it if there is none."""
        kind, failure = self._kind(args, kwargs), None
        answers: list[tuple[bool | int, ...]] = []  # answers of this call, each from the first question on
        for entry in self._of_kind(kind):
            # Pass over a capture that differs from this call in the last of some answers, and in none before it.
            then = entry.step.answers
            if any(then[: len(a) - 1] == a[:-1] and then[len(a) - 1 : len(a)] not in ((), a[-1:]) for a in answers):
                continue
            state = other_random_states() if entry.draws else None
            try:
                result = entry.replay(*args, **kwargs)
            except GuardFailed as answer:
                draw_again_from(state)
                failure = failure or answer
                if answer.place is not None:
                    answers.append((*entry.step.answers[: answer.place], answer.now))
                continue
            except _NothingToPlan:
                draw_again_from(state)
                result = self._fn(*args, **kwargs)
            if result is not MISS:
                entry.used = next(self._calls)
                return result
        return self._anew(kind, args, kwargs, failure)

    def open(self, call: tuple[Any, Any], other: tuple[Any, Any]) -> None:
        """Capture a call, arguments and keywords, to pose problems: sizes that differ in another call are inputs.

        This call, and all for which the capture is, raise a `SizedCall` from then on.

        Raises:
            NotFree: if no sizes can be inputs.
        """
        wide = self._kind(*call).opened(self._kind(*other))
        if wide is None:
            raise NotFree("more than its sizes differs, or a size is 1")
        with wide.marked(*call):
            self._captured(wide, Call((self._fn, *call), poses=True))
        raise NotFree("there is nothing to plan")

    def _anew(self, kind: Kind, args: Any, kwargs: Any, failure: GuardFailed | None) -> Any:
        """Capture the call. Numbers or sizes that changed since another capture become inputs, if they can.

        ``failure``: the guard of a capture that is not for this call, if one failed.
        """
        callback, self.before = self.before, None
        if callback is not None:
            try:
                callback(args, kwargs)
                return self(*args, **kwargs)
            finally:
                self.before = callback
        # Find a capture that only values keep from serving the call. If these are numbers, make them inputs.
        arguments = {"args": args, "kwargs": kwargs, "fn": self._fn}
        fixed = [entry for entry in self._of_kind(kind) if not isinstance(entry.step.training, SizedPlans)]
        candidates = ((entry, why) for entry in fixed if (why := why_not(entry.own, arguments)))
        entry, reasons = next(candidates, (None, list[Reason]()))
        if entry is not None and (sources := self._numbers(entry, reasons)) is not None:
            check = partial(_check, entry.step, _values_then(entry, sources, arguments))
            try:
                result = self._captured(kind, Call((self._fn, args, kwargs), sources, check))
            except Exception:  # any error: it comes again without these inputs
                log.debug("%s cannot be inputs of %s", sources, self._name, exc_info=True)
                self._fixed.update(sources)
            else:
                self._forget(entry)  # the new one is for its numbers too
                return result
        # Find a capture of which only sizes keep from serving the call, and make these inputs.
        if entry is None and (result := self._with_open_sizes(kind, args, kwargs)) is not MISS:
            return result
        # Else capture the call as it is.
        if failure is not None and failure.place is not None and not reasons:
            advice = "Compute without asking: torch.where(condition, a, b), or x[:, index] with a tensor as index."
            place = f"the value of a tensor that the step asks for ({failure.where})"
            reasons = [Reason(place, failure.was, failure.now, advice=advice)]
        return self._captured(kind, Call((self._fn, args, kwargs)), reasons[0] if reasons else None)

    def _numbers(self, entry: _Entry, reasons: Sequence[Reason]) -> frozenset[str] | None:
        """The numbers that are inputs once those that differ from the capture's are, too; None if not all can be."""
        are_numbers = all(type(r.now) is type(r.value) and type(r.now) in (int, float) for r in reasons)
        sources = {reason.source for reason in reasons}
        return entry.numbers | sources if are_numbers and sources.isdisjoint(self._fixed) else None

    def _with_open_sizes(self, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Capture the call with inputs for sizes and numbers that differ from an earlier one; `MISS` if none can be."""
        arguments = {"args": args, "kwargs": kwargs, "fn": self._fn}
        earlier = dict[tuple[Kind, Set[str]], list[Earlier]]()
        for entry in sorted(self._entries, key=lambda entry: -entry.used):
            wide, training = entry.kind.opened(kind), entry.step.training
            if wide is None or training is None:
                continue
            reasons = changed(entry.own, arguments)
            numbers = self._numbers(entry, reasons)
            if numbers is None or self._closed[wide, numbers] >= TRIES:
                continue
            if isinstance(training, SwappablePlan):
                then = dict[Any, set[Any]]()  # size now -> sizes then, where they are open
                for now, before, size in zip(kind.sizes, entry.kind.sizes, wide.sizes, strict=True):
                    if size is None:
                        then.setdefault(now, set()).add(before)
                sizes = partial(_earlier, then)
            elif reasons and wide == entry.kind:  # numbers alone keep it from serving the call
                sizes = partial(_of_then, training.sizes)
            else:
                continue
            values = _values_then(entry, numbers, arguments)
            capture = Earlier(training, sizes, partial(_check, entry.step, values), values, entry.step.answers)
            earlier.setdefault((wide, numbers), []).append(capture)
        for (wide, sources), captures in sorted(earlier.items(), key=lambda kind: len(kind[0][1])):
            try:
                with wide.marked(args, kwargs):
                    result = self._captured(wide, Call((self._fn, args, kwargs), sources, earlier=captures))
            except Exception as error:  # any other error: it comes again with these sizes alone
                reason = explained(error, self._fn)
                if isinstance(reason, InfeasibleBudget) and not sources:
                    raise
                self._close(wide, sources, error)
                continue
            # There is none where torch.compile is turned off.
            new = next((entry for entry in self._entries if entry.kind is wide), None)
            if new is not None and isinstance(training := new.step.training, SizedPlans):
                replaced = training.earlier()
                assert replaced is not None
                entry = next(entry for entry in self._entries if entry.step.training is replaced.training)
                if replaced.training.plans[0] in training.plans:
                    entry.step = _NOTHING  # whose plan and search go on as the new one's
                self._forget(entry)
            elif new is not None:
                new.kind = kind
                self._close(wide, sources, NotFree(f"PyTorch traces it for one size only: {new.fixed_at}"))
            return result
        return MISS

    def _close(self, wide: Kind, numbers: Set[str], error: Exception) -> None:
        """Log why open sizes cannot be inputs. At others they may, if the step takes another way there."""
        cause = getattr(error, "inner_exception", None) or error
        is_said = isinstance(cause, (NotFree, InfeasibleBudget))
        why = cause if is_said else f"PyTorch cannot trace it for sizes that change, {of_op(error)}"
        log.info("sizes that change are no inputs of %s, and each is captured by itself: %s", self._name, why)
        log.debug("", exc_info=error)
        self._closed[wide, numbers] += 1 if isinstance(cause, (OtherStep, InfeasibleBudget)) else TRIES

    def _captured(self, kind: Kind, call: Call, because: Reason | None = None) -> Any:
        """Capture a call, with some of its numbers as inputs, keep the capture, and give the result."""
        (_, args, kwargs), numbers = call.reach, call.numbers
        if not numbers and not call.earlier:  # else it takes the place of another one
            # Forget the least recently used until there is room; refuse if half of them are for values of one source.
            while len(entries := sorted(self._entries, key=lambda entry: entry.used)) >= self._most:
                reasons = [r for entry in entries if because and (r := entry.because) and r.source == because.source]
                if because and len(reasons) >= self._most // 2:
                    raise Unsupported(too_many(self._fn, self._name, [*reasons, because], self._most))
                self._forget(entries[0])
        # Capture it in a code object of its own, and run it.
        own, state = _copy_of(self._fn), other_random_states()
        entry = _Entry(kind, own, run(own), because, frozenset(numbers))
        capturing = traced_since_now("capturing")

        def doing() -> str:
            if entry.step.training is None:
                return capturing()
            planning = entry.step.training.known
            return f"training; planning goes on, gap {format_gap(planning.gap)}" if planning.goes_on else "first run"

        def compile(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            if call.earlier and (context := TracingContext.try_get()) is not None:
                entry.fixed_at = fixed_at(context.fake_mode.shape_env)
            entry.step = step = self.backend.compile(module, inputs, call)
            if step.training is None and self.backend.lower is run_generated_code:
                entry.step = replace(step, run=surrounded(_hand_back, [Descriptions(module)]))
            return entry.step.run

        reference, answer = weakref.ref(compile), self.backend.answer

        # Dynamo keeps this one until it is reset, and so neither the call nor the cache.
        def compile_graph(module: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
            compile_now = reference()
            assert compile_now is not None
            return compile_now(module, inputs)

        compile_graph.answer = answer  # type: ignore[attr-defined]  # by which Dynamo's patches know that it is ours
        captured = with_recurrent_modules(torch.compile(own, fullgraph=True, dynamic=False, backend=compile_graph))
        captured = plain_if_possible(knowing_selections(captured, answer), answer)
        # By default Dynamo does not look whether hooks were added to a module that had none, and never calls them.
        looking = dynamo_config.patch(skip_nnmodule_hook_guards=False)
        try:
            with ranks.in_one_piece(), as_inputs(numbers), quietly(), showing(doing), collecting_seldom(), looking:
                result = captured(*args, **kwargs)
        except _NothingToPlan:
            entry.draws = _have_drawn(state)
            draw_again_from(state)
            result = self._fn(*args, **kwargs)
        except SizedCall:  # it is kept for further calls
            self._entries.append(entry)
            raise
        except BaseException:
            entry.end()
            raise
        if result is MISS:  # torch.compile is turned off
            return self._fn(*args, **kwargs)
        entry.draws = entry.draws or _have_drawn(state)
        self._fixed.update(numbers & constants(own).keys())
        entry.used = next(self._calls)
        self._entries.append(entry)
        count = len(self._entries)
        if not self._warned and count >= 2 and count >= self._most // 2:
            self._warned = True
            why = f"The last one because {spelled(because.source, self._fn)} was {because.value!r}. " if because else ""
            log.warning(
                "%s was captured and planned %d times, for as many kinds of input. %sHalf of max_plans=%d is used; "
                "beyond it the least recently used is dropped.",
                self._name,
                count,
                why,
                self._most,
            )
        return result

    def _kind(self, args: Any, kwargs: Any) -> Kind:
        # Dynamo does not look whether the hooks of all modules are others than at the capture.
        return Kind.of(args, kwargs, (within_region(), *map(tuple, _HOOKS)))

    def _of_kind(self, kind: Kind) -> list[_Entry]:
        """The captures for calls of a kind, the last used first."""
        return sorted((entry for entry in self._entries if entry.kind.includes(kind)), key=lambda entry: -entry.used)

    def _forget(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.end()
        _drop(entry.own.__code__)  # at once, and not when garbage is collected


def as_data(numbers: Mapping[str, Number], joint: Joint) -> list[Any]:
    """Write out the computation for these values of its numbers, as data that equal captures share."""
    step = joint.step
    primals = [n for n in step.placeholders if _is_primal(n)]
    pairs = zip(primals, step.backward_outputs, strict=False)
    gradients = [g for n, g in pairs if n not in step.numbers and isinstance(n.meta["val"], torch.Tensor)]
    with outside_tracing():  # constants are read
        return written_out(step.module.graph, step.numbers, [*step.forward_outputs, *gradients], numbers)


def _earlier(then: Mapping[int, Set[Any]], sizes: Sizes) -> Sizes:
    """The sizes of an earlier call in place of those of this one; strides of a larger tensor stay as they are."""
    if any(len(then.get(size, ())) > 1 for size in sizes):
        raise NotFree("sizes that are the same now were not the same before")
    return tuple(next(iter(then.get(size, (size,)))) for size in sizes)


def _values_then(entry: _Entry, numbers: Set[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Look up the values of numbers at an entry's capture; of numbers that it does not know, take those of now."""
    then: dict[str, Any] = {**constants(entry.own)}
    if entry.step.training is not None:
        inputs = joint_of(entry.step.training.plans[0].captured).step.given_numbers
        then |= {source: value_of(node.meta["val"]) for node, source in inputs.items()}
    return {s: then[s] if s in then else value_now(s, entry.own, arguments) for s in numbers}


def _check(step: CapturedStep, values: Mapping[str, Number], joint: Joint) -> None:
    """Compare an earlier capture with this one, at its sizes and with its numbers."""
    if step.single is not None:
        earlier: Joint | None = step.single()
    else:
        earlier = None if step.training is None else joint_of(step.training.plans[0].captured)
    if earlier is None or as_data(values, joint) != as_data(values, earlier):
        raise NotFree(f"with {values or 'the sizes of before'} the step is another one than before")


def _of_then(then: Sizes, sizes: Sizes) -> Sizes:
    """The sizes of then, where these are of the same inputs."""
    if len(sizes) != len(then):
        raise NotFree("another number of sizes is open than before")
    return then


def _have_drawn(before: tuple[Any, Any]) -> bool:
    return pickle.dumps(other_random_states()) != pickle.dumps(before)
