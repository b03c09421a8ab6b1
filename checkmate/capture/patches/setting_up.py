"""Run what a model does once, in its first call, to set itself up: plainly, before that call is captured.

A procedure that is given modules and constants and returns nothing may put another part in place for this kind of
input, or install hooks under a lock. Dynamo captures neither parameters that a step makes nor locks, and a compiled
step would do at each call what was meant for the first. Where a capture ends at one of these, the outermost such
procedure around it is called as it is, and the capture begins again: it finds all set up, as a second call of plain
PyTorch would. It is called before anything else of the step, so that this is done only where the step has drawn no
random numbers and changed nothing before. If the call fails all the same, modules and random states are put back.
"""

from __future__ import annotations

import dis
import inspect
import random
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from torch import fx, nn

from checkmate.capture.dependencies import is_write, written_by
from checkmate.capture.device import main_device, random_states, set_random_states
from checkmate.capture.earlier_draws import CannotTellError, draws_of
from checkmate.capture.patches.only_our_captures import follow
from checkmate.torch_internals.dynamo import (
    AttributeMutationNew,
    ConstantVariable,
    LazyVariableTracker,
    UnspecializedNNModuleVariable,
    Unsupported,
    ValueMutationNew,
)

_ENDS = re.compile(r"`R?lock` context manager|Parameter\(\)` constructor")
_MADE = (AttributeMutationNew, ValueMutationNew)  # by the step
_UNKNOWN: Any = object()
_Call = tuple[Any, ...]  # a function, and what it is given


def set_up_first(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.compile` whose captures begin again once what ended them is done."""

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        def after(*done: _Call) -> Any:
            try:
                return run(*args, **kwargs)
            except Unsupported as error:
                call: _Call | None = getattr(error, "sets_up", None)
                if call is None or call in done:  # it is done, and the capture ends there again
                    raise
            function, *given = call
            with _put_back_on_failure([x for x in given if isinstance(x, nn.Module)]):
                function(*given)
                return after(*done, call)

        return after()

    return running


@contextmanager
def _put_back_on_failure(modules: list[nn.Module]) -> Iterator[None]:
    """Put modules and random states back as they were if the block ends in an error, also one that ends a trace."""
    held = [part for module in modules for part in module.modules()]
    kept = [vars(part) for part in held]
    kept += [value for attributes in kept for value in attributes.values() if type(value) in (dict, OrderedDict)]
    before = [dict(one) for one in kept]
    device = main_device(parameter for part in held for parameter in part.parameters(recurse=False))
    state, python = random_states(device), random.getstate()
    try:
        yield
    except BaseException:
        for one, contents in zip(kept, before, strict=True):
            one.clear()
            one.update(contents)
        set_random_states(state, device)
        random.setstate(python)
        raise


def _inline(plain: Any, parent: Any, func: Any, args: Any, kwargs: Any, *others: Any, **options: Any) -> Any:
    """A function is called: what sets up is noted in the error that ends the capture there."""
    call = None if kwargs else _as_called(func, args)
    before = [*parent.output.current_tracer.graph.nodes] if call and _changes_nothing(parent) else None
    try:
        return plain(parent, func, args, kwargs, *others, **options)
    except Unsupported as error:
        if before is not None and _ENDS.search(str(error)) and _may_wait(before, parent.output.nn_modules):
            error.sets_up = call  # that of the outermost is the last
        raise


def _as_called(func: Any, args: Any) -> _Call | None:
    """A procedure of modules and constants, and these; None: it is another kind of function."""
    function = getattr(func, "fn", None)
    if not isinstance(function, types.FunctionType) or not _returns_nothing(function.__code__):
        return None
    given = [_value(arg) for arg in args]
    is_all = any(isinstance(x, nn.Module) for x in given) and not any(x is _UNKNOWN for x in given)
    return (function, *given) if is_all else None


def _value(variable: Any) -> Any:
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        value = variable.peek_value()
    else:
        variable = variable.realize()
        is_held = isinstance(variable, UnspecializedNNModuleVariable) and variable.source is not None
        value = variable.value if is_held or isinstance(variable, ConstantVariable) else _UNKNOWN
    return value if isinstance(value, (nn.Module, str, int, float, type(None))) else _UNKNOWN


@cache
def _returns_nothing(code: types.CodeType) -> bool:
    """Whether a function ends with ``return``, or at its end, and nowhere else."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_VALUE" and not (_is_none(before) and not instruction.is_jump_target):
            return False
        if instruction.opname == "RETURN_CONST" and not _is_none(instruction):
            return False
        before = instruction
    return not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)


def _is_none(instruction: dis.Instruction | None) -> bool:
    return instruction is not None and instruction.opname.endswith("_CONST") and instruction.argval is None


def _changes_nothing(tx: Any) -> bool:
    """Whether the step has changed no object so far that was there before it, and Python's generator has not drawn."""
    effects = tx.output.side_effects
    there = [v for v in effects.id_to_variable.values() if not isinstance(v.mutation_type, _MADE)]
    return (
        tx.output.current_tracer.parent is None
        and not tx.output.random_calls
        and not any(map(effects.is_modified, there))
    )


def _may_wait(nodes: list[fx.Node], attributes: Any) -> bool:
    """Whether ops write to nothing and draw no random numbers, so that they may come after what sets up."""
    try:
        return not any(is_write(n) and written_by(n) for n in nodes) and not any(draws_of(nodes, attributes).values())
    except CannotTellError:
        return False


follow("InliningInstructionTranslator.inline_call", _inline)
