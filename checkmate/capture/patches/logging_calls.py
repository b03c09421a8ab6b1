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
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

from checkmate.capture.patches.branches import RAISED, is_question, raise_as_users, value_now
from checkmate.capture.patches.only_our_captures import answer_now, follow
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
)

log = logging.getLogger("checkmate.capture.patches.logging_calls")
Plain = Callable[..., Any]
_LOGS = re.compile(r"debug|info|warn|error|critical|exception|^log$")
_NUMBER = re.compile(r"%[-+ #0-9.]*[diouxXeEfFgG]")
_made_of: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()  # exceptions of the user's own classes


class Described(str):
    """Stands in a text for a value that is not known while a step is captured."""

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self)


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
        return _computed(tx, variable, compute)
    if isinstance(items := getattr(variable, "items", None), (list, tuple)):
        return variable.python_type()(value_of(tx, item, compute) for item in items)
    return getattr(variable, "value", Described(f"<{variable.python_type_name()}>"))


def _computed(tx: Any, variable: Any, compute: bool) -> Any:
    node = variable.as_proxy().node
    try:
        if compute:
            return value_now(tx, node)
    except CannotTellError:
        pass
    example = node.meta.get("example_value")
    if isinstance(example, torch.Tensor):
        return Described(f"<tensor of shape {tuple(example.shape)}>")
    return Described("<number from a tensor>")


def _say(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any, who: str = "") -> VariableTracker:
    """Call a function that logs or prints, unless the same was said from this place before."""
    answer: Any = answer_now()
    values = [value_of(tx, argument, compute=False) for argument in args]
    named = {name: value_of(tx, argument, compute=False) for name, argument in kwargs.items()}
    said = (tx.f_code.co_filename, tx.lineno, who, repr(values), repr(named))
    if said not in answer.said:
        answer.said.add(said)
        if any(isinstance(value, Described) for value in values):  # logger.info("%d", n), n described: "%s"
            values = [_NUMBER.sub("%s", value) if isinstance(value, str) else value for value in values]
        here = (tx.f_code.co_filename, tx.lineno, tx.f_code.co_name, None)  # the line that is being captured
        with patch.object(logging.Logger, "findCaller", lambda *args, **kwargs: here):
            function(*values, **named)
    return VariableTracker.build(tx, None)


def _call_logger(plain: Plain, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    method = getattr(self.value, name, None)
    if method is not None and _LOGS.search(name):
        return _say(tx, method, args, kwargs, who=f"{self.value.name}.{name}")
    if method is not None and name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers"):
        return VariableTracker.build(tx, method(*[argument.as_python_constant() for argument in args]))
    return plain(self, tx, name, args, kwargs)


def _call_builtin(plain: Plain, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is print:
        return _say(tx, print, args, kwargs, who="print")
    if self.fn is AssertionError:  # Dynamo's own takes constant texts only
        return ExceptionVariable(AssertionError, list(args), kwargs)
    return plain(self, tx, args, kwargs)


def _call_function(plain: Plain, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A function, followed or not, which may be one of logging or of warnings."""
    function: Any = getattr(self, "fn", None) or getattr(self, "value", None)
    if function is warnings.warn:
        return _warn(tx, *args, **kwargs)
    if getattr(function, "__module__", None) != "logging":
        return plain(self, tx, args, kwargs)
    if function is logging.getLogger:
        return LoggingLoggerVariable(function(*[argument.as_python_constant() for argument in args]))
    if _LOGS.search(function.__name__):  # of the module, or of a LoggerAdapter
        return _say(tx, function, args, kwargs, who=f"logging.{function.__name__}")
    return plain(self, tx, args, kwargs)


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


def _format(plain: Plain, self: Any, spec: Any, flags: int) -> None:
    """A value in an f-string: a number from a tensor stays one until the text is said."""
    if not is_question(self.stack[-1]):
        plain(self, spec, flags)
        return
    text = VariableTracker.build(self, "{:" + spec.as_python_constant() + "}")
    self.call_function(BuiltinVariable(str.format), [text, self.pop()], {})


def exception_of(tx: Any, variable: Any) -> BaseException:
    """The exception that Dynamo follows, made as the user's code made it."""
    error = _made(tx, variable.exc_type, *_made_of.get(variable, (variable.args, {})))
    base = getattr(variable, "exc_vt", variable)
    if isinstance(base.__cause__, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        error.__cause__ = exception_of(tx, base.__cause__)
    return error


def _made(tx: Any, kind: type[BaseException], args: Any, kwargs: Any) -> BaseException:
    values = [value_of(tx, argument, compute=True) for argument in args]
    return kind(*values, **{name: value_of(tx, argument, compute=True) for name, argument in kwargs.items()})


def _call_class(plain: Plain, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A class: what an exception of the user's own class is made of is remembered."""
    try:
        result = plain(self, tx, args, kwargs)
    except Unsupported:  # of a constructor that hands something else on to that of Exception
        if not issubclass(self.value, Exception) or not _are_constant([*args, *kwargs.values()]):
            raise
        error = _made(tx, self.value, args, kwargs)
        given = [VariableTracker.build(tx, argument) for argument in error.args]
        result = UserDefinedExceptionObjectVariable(error, init_args=given, mutation_type=AttributeMutationNew())
    if isinstance(result, UserDefinedExceptionObjectVariable):
        _made_of[result] = (args, kwargs)
    return result


def _are_constant(arguments: list[Any]) -> bool:
    """Whether their values cannot decide what the captured code does next: constants, and texts."""
    return all(a.is_python_constant() or isinstance(a.realize(), StringFormatVariable) for a in arguments)


def _handle_exception(plain: Plain, self: Any, raised: Any) -> None:
    """The search for who handles an exception: one of the user's that nobody does goes with the error, whole."""
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


follow("InstructionTranslatorBase._format_value", _format)
follow("InstructionTranslatorBase.exception_handler", _handle_exception)
follow("LoggingLoggerVariable.call_method", _call_logger)
follow("BuiltinVariable.call_function", _call_builtin)
follow("SkipFunctionVariable.call_function", _call_function)
follow("UserFunctionVariable.call_function", _call_function)
follow("UserDefinedClassVariable.call_function", _call_class)
