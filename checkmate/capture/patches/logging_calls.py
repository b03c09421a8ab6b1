"""Let a step log, print, warn and raise errors while it is captured, where Dynamo would end the capture.

A log record, a print or a warning within a step does not end its capture: it is given out when the step is captured,
once for each place and text, and not by the compiled step. Values that depend on tensors are described in it, not
computed. An exception that the user's code raises leaves the call as in plain PyTorch, of its own type and with its own
text, for which tensors are computed where `branches.value_now` can. Importing this module has Dynamo do so in what
our backends capture; others are not affected.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from checkmate.capture.patches.branches import RAISED, is_ours, is_question, raise_as_users, value_now
from checkmate.capture.patches.is_compiling import answer_of
from checkmate.capture.questions import CannotTellError
from checkmate.torch_internals.dynamo import (
    AttributeMutationNew,
    BuiltinVariable,
    ExceptionVariable,
    LazyVariableTracker,
    LoggingLoggerVariable,
    StringFormatVariable,
    Unsupported,
    UserDefinedExceptionObjectVariable,
    VariableTracker,
    get_raised_exception,
    unimplemented,
    wrap,
)

log = logging.getLogger("checkmate.capture.patches.logging_calls")
_LOGS = re.compile(r"debug|info|warn|error|critical|exception|^log$")
_NUMBER = re.compile(r"%[-+ #0-9.]*[diouxXeEfFgG]")
_made_of: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()  # exceptions of the user's own classes


class Described:
    """Stands in a text for a value that is not known while a step is captured."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return self.text


def value_of(tx: Any, variable: Any, compute: bool) -> Any:
    """The Python value of what Dynamo follows, or a description of it; ``compute``: tensors, where that is possible."""
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        seen = variable.peek_value()
        if not isinstance(seen, torch.Tensor):
            return seen  # known without a guard: another value is no reason to capture again
    variable = variable.realize()
    if isinstance(variable, StringFormatVariable):
        named = {name: value_of(tx, part, compute) for name, part in variable.sym_kwargs.items()}
        return variable.format_string.format(*[value_of(tx, part, compute) for part in variable.sym_args], **named)
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(variable, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        return exception_of(tx, variable)
    if variable.is_tensor() or variable.is_symnode_like():
        return _computed(tx, variable) if compute else _described(variable)
    if isinstance(items := getattr(variable, "items", None), (list, tuple)):
        return variable.python_type()(value_of(tx, item, compute) for item in items)
    return getattr(variable, "value", Described(f"<{variable.python_type_name()}>"))


def _described(variable: Any) -> Described:
    example = variable.as_proxy().node.meta.get("example_value")
    if isinstance(example, torch.Tensor):
        return Described(f"<tensor of shape {tuple(example.shape)}>")
    return Described("<number from a tensor>")


def _computed(tx: Any, variable: Any) -> Any:
    try:
        value, _ = value_now(tx, variable.as_proxy().node)
    except CannotTellError:
        return _described(variable)
    return value


def _say(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any, who: str = "") -> VariableTracker:
    """Call a function that logs or prints, unless the same was said from this place before."""
    answer: Any = answer_of(tx.output.compiler_fn)
    values = [value_of(tx, argument, compute=False) for argument in args]
    named = {name: value_of(tx, argument, compute=False) for name, argument in kwargs.items()}
    said = (tx.f_code.co_filename, tx.lineno, who, repr(values), repr(named))
    if said not in answer.said:
        answer.said.add(said)
        with _as_if_from(tx):
            function(*_without_numbers(values), **named)
    return VariableTracker.build(tx, None)


def _without_numbers(values: list[Any]) -> list[Any]:
    """For ``logger.info("%d", n)`` with an ``n`` that is only described: ``%s``."""
    if any(isinstance(value, Described) for value in values):
        return [_NUMBER.sub("%s", value) if isinstance(value, str) else value for value in values]
    return values


def _as_if_from(tx: Any) -> AbstractContextManager[Any]:
    """Have log records name the line that is being captured."""
    place = (tx.f_code.co_filename, tx.lineno, tx.f_code.co_name, None)
    return patch.object(logging.Logger, "findCaller", lambda *args, **kwargs: place)


def _logging(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a method of a logger."""

    @wraps(plain)
    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(self.value, name, None)
        if not is_ours(tx) or method is None:
            return plain(self, tx, name, args, kwargs)
        if _LOGS.search(name):
            return _say(tx, method, args, kwargs, who=f"{self.value.name}.{name}")
        if name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers"):
            return VariableTracker.build(tx, method(*[argument.as_python_constant() for argument in args]))
        return plain(self, tx, name, args, kwargs)

    return called


def _builtin(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a function or class that Python has built in."""

    @wraps(plain)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is print and is_ours(tx):
            return _say(tx, print, args, kwargs, who="print")
        if self.fn is AssertionError and is_ours(tx):  # Dynamo's own takes constant texts only
            return ExceptionVariable(AssertionError, list(args), kwargs)
        return plain(self, tx, args, kwargs)

    return called


def _calling(plain: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    """Dynamo's call of a function, which may be one of logging or of warnings."""

    @wraps(plain)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(self, attribute)
        speaks = function is warnings.warn or getattr(function, "__module__", None) == "logging"
        if not speaks or not is_ours(tx):
            return plain(self, tx, args, kwargs)
        if function is warnings.warn:
            return _warn(tx, *args, **kwargs)
        if function is logging.getLogger:
            return LoggingLoggerVariable(function(*[argument.as_python_constant() for argument in args]))
        if _LOGS.search(function.__name__):  # of the module, or of a LoggerAdapter
            return _say(tx, function, args, kwargs, who=f"logging.{function.__name__}")
        return plain(self, tx, args, kwargs)

    return called


def _warn(tx: Any, message: Any, category: Any = None, stacklevel: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`warnings.warn`, as if from the line that is being captured."""
    above, at = (1 if stacklevel is None else stacklevel.as_python_constant()), tx
    while above > 1 and at.parent is not None:
        above, at = above - 1, at.parent
    registry = at.f_globals.setdefault("__warningregistry__", {})
    place = (at.f_code.co_filename, at.lineno, at.f_globals.get("__name__"), registry)

    def warn(said: Any, kind: Any = None) -> None:
        if not isinstance(said, Warning):
            said, kind = str(said), kind or UserWarning
        try:
            warnings.warn_explicit(said, type(said) if isinstance(said, Warning) else kind, *place)
        except Warning as error:  # as the user's filters have it
            raise_as_users(tx, type(error), [str(error)])

    return _say(tx, warn, [message] if category is None else [message, category], {}, who="warnings.warn")


def _formatting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's formatting of a value in an f-string: a number from a tensor stays one until the text is said."""

    @wraps(plain)
    def formatted(self: Any, spec: Any, flags: int) -> None:
        if not is_ours(self) or not is_question(self.stack[-1]):
            plain(self, spec, flags)
            return
        text = VariableTracker.build(self, "{:" + spec.as_python_constant() + "}")
        self.call_function(BuiltinVariable(str.format), [text, self.pop()], {})

    return formatted


def exception_of(tx: Any, variable: Any) -> BaseException:
    """The exception that Dynamo follows, made as the user's code made it."""
    args, kwargs = _made_of.get(variable, (variable.args, {}))
    values = [value_of(tx, argument, compute=True) for argument in args]
    error: BaseException = variable.exc_type(*values, **{k: value_of(tx, v, compute=True) for k, v in kwargs.items()})
    base = getattr(variable, "exc_vt", variable)
    if isinstance(base.__cause__, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        error.__cause__ = exception_of(tx, base.__cause__)
    return error


def _making(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a class: what an exception of the user's own class is made of is remembered."""

    @wraps(plain)
    def made(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = plain(self, tx, args, kwargs)
        except Unsupported:  # of a constructor that hands something else on to that of Exception
            if not is_ours(tx) or not issubclass(self.value, Exception) or not _are_constant([*args, *kwargs.values()]):
                raise
            values = [value_of(tx, argument, compute=True) for argument in args]
            error = self.value(*values, **{k: value_of(tx, v, compute=True) for k, v in kwargs.items()})
            given = [VariableTracker.build(tx, argument) for argument in error.args]
            result = UserDefinedExceptionObjectVariable(error, init_args=given, mutation_type=AttributeMutationNew())
        if isinstance(result, UserDefinedExceptionObjectVariable) and is_ours(tx):
            _made_of[result] = (args, kwargs)
        return result

    return made


def _are_constant(arguments: list[Any]) -> bool:
    """Whether their values cannot decide what the captured code does next: constants, and texts."""
    return all(a.is_python_constant() or isinstance(a.realize(), StringFormatVariable) for a in arguments)


def _leaving(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's search for who handles an exception: one of the user's that nobody does goes with the error, whole."""

    @wraps(plain)
    def handled(self: Any, raised: Any) -> None:
        if not is_ours(self):
            return plain(self, raised)
        try:
            current = get_raised_exception(self.exn_vt_stack)
        except AssertionError:  # Dynamo's own: it keeps none of a call whose arguments do not fit
            unimplemented(gb_type="Arguments do not fit", context="", explanation=str(raised), hints=[])
        if self.current_instruction.opname == "RAISE_VARARGS":
            RAISED.add(current)
        try:
            plain(self, raised)
        except Unsupported as error:
            try:
                found = exception_of(self, current)
            except Exception:  # of the user's constructor, for values that are only described here
                log.debug("cannot make the exception that the step raised", exc_info=True)
            else:
                error.users, error.is_users = found, current in RAISED
            raise

    return handled


def _install() -> None:
    wrap("InstructionTranslatorBase._format_value", _formatting)
    wrap("LoggingLoggerVariable.call_method", _logging)
    wrap("BuiltinVariable.call_function", _builtin)
    wrap("SkipFunctionVariable.call_function", partial(_calling, attribute="value"))
    wrap("UserFunctionVariable.call_function", partial(_calling, attribute="fn"))
    wrap("UserDefinedClassVariable.call_function", _making)
    wrap("InstructionTranslatorBase.exception_handler", _leaving)


_install()
