"""Leave logging, printing and warning out of a captured step, and let it raise, where Dynamo would end the capture.

That a call is left out is logged, once for each place. An exception that the user's code raises leaves the step as in
plain PyTorch, of its own type and with its own text, for which tensors are computed where `data_branches.value_now`
can.
"""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch

from checkmate.capture.guards import CannotTellError
from checkmate.capture.patches.data_branches import RAISED, is_question, value_now
from checkmate.capture.patches.only_our_captures import Handler, answer_now, follow
from checkmate.torch_internals.capturing import (
    AttributeMutationNew,
    BuiltinVariable,
    ExceptionVariable,
    LoggingLoggerVariable,
    StringFormatVariable,
    Unsupported,
    UserDefinedExceptionObjectVariable,
    VariableTracker,
    get_raised_exception,
    unimplemented,
)

log = logging.getLogger("checkmate.capture.patches.logging_calls")
_LOGS = re.compile(r"debug|info|warn|error|critical|exception|^log$")
_made_of: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()  # exceptions of the user's own classes


class Described(str):
    """Stands in texts for a value that is unknown during capture."""

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self)


def value_of(tx: Any, variable: Any) -> Any:
    """The Python value of a variable of Dynamo's, with tensors computed if possible, or a description."""
    variable = variable.realize()
    if isinstance(variable, StringFormatVariable):
        named = {name: value_of(tx, part) for name, part in variable.sym_kwargs.items()}
        return variable.format_string.format(*[value_of(tx, part) for part in variable.sym_args], **named)
    if variable.is_python_constant():
        return variable.as_python_constant()
    if isinstance(variable, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        return exception_of(tx, variable)
    if variable.is_tensor() or variable.is_symnode_like():
        node = variable.as_proxy().node
        try:
            return value_now(tx, node)
        except CannotTellError:
            example = node.meta.get("example_value")
            is_tensor = isinstance(example, torch.Tensor)
            return Described(f"<tensor of shape {tuple(example.shape)}>" if is_tensor else "<number from a tensor>")
    if isinstance(items := getattr(variable, "items", None), (list, tuple)):
        return variable.python_type()(value_of(tx, item) for item in items)
    return getattr(variable, "value", Described(f"<{variable.python_type_name()}>"))


def _leave_out(tx: Any, function: str) -> VariableTracker:
    """Leave out a call that logs or prints, and say so once per place; as a warning for prints."""
    answer: Any = answer_now()
    place = f"{tx.f_code.co_filename}:{tx.lineno} in {tx.f_code.co_name}"
    if place not in answer.said:
        answer.said.add(place)
        level = logging.WARNING if function == "print" else logging.INFO
        log.log(level, "%s: the compiled step leaves out this call of %s", place, function)
    return VariableTracker.build(tx, None)


def _call_logger(plain: Handler, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    method = getattr(self.value, name, None)
    if method is not None and _LOGS.search(name):
        return _leave_out(tx, f"{self.value.name}.{name}")
    if method is not None and name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers"):
        return VariableTracker.build(tx, method(*[argument.as_python_constant() for argument in args]))
    return plain(self, tx, name, args, kwargs)


def _call_builtin(plain: Handler, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is print:
        return _leave_out(tx, "print")
    if self.fn is AssertionError:  # Dynamo's own takes constant texts only
        return ExceptionVariable(AssertionError, list(args), kwargs)
    return plain(self, tx, args, kwargs)


def _call_function(plain: Handler, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Call a function, or leave it out if it logs or warns."""
    function: Any = getattr(self, "fn", None) or getattr(self, "value", None)
    if function is warnings.warn:
        return _leave_out(tx, "warnings.warn")
    if getattr(function, "__module__", None) != "logging":
        return plain(self, tx, args, kwargs)
    if function is logging.getLogger:
        return LoggingLoggerVariable(function(*[argument.as_python_constant() for argument in args]))
    if _LOGS.search(function.__name__):  # of the module, or of a LoggerAdapter
        return _leave_out(tx, f"logging.{function.__name__}")
    return plain(self, tx, args, kwargs)


def _format(plain: Handler, self: Any, spec: Any, flags: int) -> None:
    """Format a value in an f-string; a number from a tensor stays one until the text is used."""
    if not is_question(self.stack[-1]):
        plain(self, spec, flags)
        return
    text = VariableTracker.build(self, "{:" + spec.as_python_constant() + "}")
    self.call_function(BuiltinVariable(str.format), [text, self.pop()], {})


def exception_of(tx: Any, variable: Any) -> BaseException:
    """The exception that Dynamo follows, made as the user's code makes it."""
    error = _made(tx, variable.exc_type, *_made_of.get(variable, (variable.args, {})))
    base = getattr(variable, "exc_vt", variable)
    if isinstance(base.__cause__, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        error.__cause__ = exception_of(tx, base.__cause__)
    return error


def _made(tx: Any, kind: type[BaseException], args: Any, kwargs: Any) -> BaseException:
    values = [value_of(tx, argument) for argument in args]
    return kind(*values, **{name: value_of(tx, argument) for name, argument in kwargs.items()})


def _call_class(plain: Handler, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Call a class; note the arguments of the user's exceptions."""
    try:
        result = plain(self, tx, args, kwargs)
    except Unsupported:  # of a constructor that hands something else on to that of Exception
        # Constants and texts cannot decide what the captured code does next.
        if not issubclass(self.value, Exception) or not all(
            a.is_python_constant() or isinstance(a.realize(), StringFormatVariable) for a in (*args, *kwargs.values())
        ):
            raise
        error = _made(tx, self.value, args, kwargs)
        arguments = [VariableTracker.build(tx, argument) for argument in error.args]
        result = UserDefinedExceptionObjectVariable(error, init_args=arguments, mutation_type=AttributeMutationNew())
    if isinstance(result, UserDefinedExceptionObjectVariable):
        _made_of[result] = (args, kwargs)
    return result


def _handle_exception(plain: Handler, self: Any, raised: Any) -> None:
    """Find the handler of an exception; an unhandled one of the user's travels whole in Dynamo's error."""
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
            exception = exception_of(self, current)
        except Exception:  # of the user's constructor, for values that are only described here
            log.debug("cannot make the exception that the step raised", exc_info=True)
        else:
            error.users, error.is_users = exception, current in RAISED
        raise


follow("InstructionTranslatorBase._format_value", _format)
follow("InstructionTranslatorBase.exception_handler", _handle_exception)
follow("LoggingLoggerVariable.call_method", _call_logger)
follow("BuiltinVariable.call_function", _call_builtin)
follow("SkipFunctionVariable.call_function", _call_function)
follow("UserFunctionVariable.call_function", _call_function)
follow("UserDefinedClassVariable.call_function", _call_class)
