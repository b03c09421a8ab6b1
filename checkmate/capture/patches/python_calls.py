"""Python that a step calls beside PyTorch: loggers, ``print`` and ``raise``, context variables, draws of NumPy.

Logging, printing and warning are left out of a captured step where Dynamo would end the capture; that a call is left
out is logged, once for each place. An exception that the user's code raises leaves the step as in plain PyTorch, of its
own type and with its own text, for which tensors are computed where `data_dependence.value_now` can.

Dynamo cannot call the methods of `contextvars.ContextVar`. Libraries that know it ask whether they are compiled, and
keep a global variable instead, which is another program: reset, it forgets what was set around it. Here Dynamo follows
the values itself. What a variable holds when the step begins is guarded: another value is another capture. A step that
leaves one set is refused, as the compiled step would not set it.

Dynamo captures ``np.random.rand(3)`` as a draw of torch's generator, which has other numbers. Here a function of
constants that draws so is not followed: it is called as it is, by plain NumPy, before each step, in the order of the
program, and hands in its array as an input of the captured graph. That is one of NumPy's own, or one of the user's that
names ``np.random``, such as the masks of SpecAugment. Where it is a method, is given tensors, names PyTorch or what it
computes with, or returns neither a number nor an array, Dynamo follows it, and the draw is refused when it is met.
"""

from __future__ import annotations

import logging
import re
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from checkmate.capture.guards import CannotTellError, GuardFailed
from checkmate.capture.patches.data_dependence import RAISED, is_question, value_now
from checkmate.capture.patches.only_our_captures import Handler, answer_now, follow
from checkmate.torch_internals.capturing import (
    AttributeMutationNew,
    AttrSource,
    BuiltinVariable,
    CallFunctionNoArgsSource,
    ExceptionVariable,
    GraphArg,
    LoggingLoggerVariable,
    NumpyNdarrayVariable,
    RandomValueSource,
    StringFormatVariable,
    TensorVariable,
    Unsupported,
    UserDefinedExceptionObjectVariable,
    UserFunctionVariable,
    VariableTracker,
    get_raised_exception,
    unimplemented,
    wrap_fx_proxy_cls,
)

log = logging.getLogger("checkmate.capture")
_LOGS = re.compile(r"debug|info|warn|error|critical|exception|^log$")
_arguments_of: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()  # exceptions of the user's own classes
_VALUES = "_checkmate_context_variables"  # on Dynamo's graph: those that the step has set, with their values
_SEEDS = (np.random.seed, np.random.set_state)  # which return nothing
_AFTER = "_checkmate_numpy_state"  # on Dynamo's graph: NumPy's state after what was drawn for the capture


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
    error = _exception(tx, variable.exc_type, *_arguments_of.get(variable, (variable.args, {})))
    base = getattr(variable, "exc_vt", variable)
    if isinstance(base.__cause__, (ExceptionVariable, UserDefinedExceptionObjectVariable)):
        error.__cause__ = exception_of(tx, base.__cause__)
    return error


def _exception(tx: Any, kind: type[BaseException], args: Any, kwargs: Any) -> BaseException:
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
        error = _exception(tx, self.value, args, kwargs)
        arguments = [VariableTracker.build(tx, argument) for argument in error.args]
        result = UserDefinedExceptionObjectVariable(error, init_args=arguments, mutation_type=AttributeMutationNew())
    if isinstance(result, UserDefinedExceptionObjectVariable):
        _arguments_of[result] = (args, kwargs)
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


class TokenVariable(VariableTracker):
    """The result of `ContextVar.set` in a captured step; ``before`` is None if the step had not set it."""

    def __init__(self, var: ContextVar[Any], before: VariableTracker | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.var, self.before = var, before

    def python_type(self) -> type:
        """The Python type."""
        return Token


def _call_method(plain: Handler, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    var = self.cv_obj if hasattr(self, "cv_obj") else self.value  # of a class for them, or of any object
    if not isinstance(var, ContextVar) or kwargs:
        return plain(self, tx, name, args, kwargs)
    # Set and reset change what the capture knows.
    variables: dict[ContextVar[Any], Any] = vars(tx.output).setdefault(_VALUES, {})
    if name == "set" and len(args) == 1:
        before = variables.get(var)
        variables[var] = args[0]
        return TokenVariable(var, before)
    token = args[0].realize() if name == "reset" and len(args) == 1 else None
    if isinstance(token, TokenVariable) and token.var is var:
        variables[var] = token.before
        if token.before is None:
            del variables[var]
        return VariableTracker.build(tx, None)
    # Get reads that, or else what the variable holds before the step, with a guard on it.
    if name == "get" and var in variables:
        return variables[var]
    if name == "get" and self.source is not None:
        try:
            value = var.get()
        except LookupError:
            return plain(self, tx, name, args, kwargs)
        return VariableTracker.build(tx, value, CallFunctionNoArgsSource(AttrSource(self.source, "get")))
    return plain(self, tx, name, args, kwargs)


def _end(plain: Handler, self: Any, *args: Any, **kwargs: Any) -> Any:
    """End a capture; refuse one that leaves a context variable set."""
    if variables := vars(self).get(_VALUES):
        names = ", ".join(var.name for var in variables)
        unimplemented(
            gb_type="A context variable is left set",
            context=names,
            explanation=f"The step sets {names} (contextvars.ContextVar) and does not reset it, which a compiled "
            "step would not do. Reset it within the step, or set it outside.",
            hints=[],
        )
    return plain(self, *args, **kwargs)


follow("ContextVarVariable.call_method", _call_method)
follow("OutputGraph.compile_subgraph", _end)


class DrawnArray(RandomValueSource):
    """The source of an input made by such a function."""


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, bool, int, float)) else None
    return array if array is not None and array.dtype.kind in "biuf" else None


def _handed_in(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> VariableTracker | None:
    """Make the result of a function of constants an input of the captured graph; None if it must be followed."""
    if not all(a.is_python_constant() for a in (*args, *kwargs.values())):  # which Dynamo looks at from now on
        return None
    # Call it now, with NumPy's state as after earlier draws of this capture, and see what it gives.
    arguments = [a.as_python_constant() for a in args], {name: a.as_python_constant() for name, a in kwargs.items()}
    before, torchs = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  # the user's generators
    np.random.set_state(vars(tx.output).get(_AFTER, before))  # noqa: NPY002
    try:
        value = function(*arguments[0], **arguments[1])
        after = np.random.get_state()  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002
    array, seeds = _array(value), any(function is seeder for seeder in _SEEDS)
    if (array is None and not seeds) or bool((torch.get_rng_state() != torchs).any()):
        torch.set_rng_state(torchs)
        return None
    vars(tx.output)[_AFTER] = after
    if array is None:
        tx.output.random_calls.append((function, *arguments))
        return VariableTracker.build(tx, None)
    place, expected = f"{tx.f_code.co_filename}:{tx.lineno}", (array.shape, array.strides, array.dtype)

    def draw(*args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:  # at each later call
        array = _array(function(*args, **kwargs))
        if array is None or (array.shape, array.strides, array.dtype) != expected:
            raise GuardFailed(place, expected[0], None if array is None else array.shape, None)
        return array

    # Make the array an input, which Dynamo fills before each step as it does those of Python's generator.
    source = DrawnArray(len(tx.output.random_calls))
    tx.output.random_calls.append((draw, *arguments))
    example = torch.as_tensor(array)
    fixed = StatefulSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * array.ndim, tensor_source=source)
    tx.output.tracing_context.tensor_to_context[example] = fixed
    fake = tx.fake_mode.from_tensor(example, symbolic_context=fixed, source=source)
    name = f"random_value_{source.random_call_index}"
    proxy = tx.output.root_tracer.create_graph_input(name, torch.Tensor, fake, source=source)
    proxy.node.meta["grapharg"] = GraphArg(
        source, example, pass_arg_as_tensor=True, fake_tensor=fake, is_tensor=False, example_strong_ref=example
    )
    variable = wrap_fx_proxy_cls(NumpyNdarrayVariable if array.ndim else TensorVariable, tx, proxy, example_value=fake)
    return variable if isinstance(value, np.ndarray) else variable.call_method(tx, "item", [], {})


def _names(code: types.CodeType) -> set[str]:
    """Names in the code of a function and of the functions within it."""
    within = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set[str](code.co_names).union(*within)


def _only_draws(function: types.FunctionType) -> bool:
    """Tell whether a function, with those of its module that it calls, names NumPy's generator and not PyTorch."""
    draws, todo, seen = False, [function], set[Any]()
    while todo:
        seen.add(callee := todo.pop())
        names = _names(callee.__code__)
        named = [callee.__globals__.get(name) for name in names]
        held = [*(callee.__defaults__ or ()), *(callee.__kwdefaults__ or {}).values()]
        for cell in callee.__closure__ or ():
            with suppress(ValueError):  # it is filled later
                held.append(cell.cell_contents)
        if any(map(_is_of_torch, (*named, *held))):
            return False
        draws |= "random" in names and any(value is np or value is np.random for value in named)
        functions = [value for value in named if isinstance(value, types.FunctionType)]
        todo += [value for value in functions if value.__globals__ is callee.__globals__ and value not in seen]
    return draws


def _is_of_torch(value: Any) -> bool:
    """Tell whether it is PyTorch, part of PyTorch, or holds PyTorch objects."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _call(plain: Handler, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    draws = type(self) is UserFunctionVariable and _only_draws(self.fn)
    return (draws and _handed_in(tx, self.fn, args, kwargs)) or plain(self, tx, args, kwargs)


def _call_numpy(plain: Handler, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    draws = any(self.value is function for function in vars(np.random).values())
    return (draws and _handed_in(tx, self.value, args, kwargs)) or plain(self, tx, args, kwargs)


follow("UserFunctionVariable.call_function", _call)
follow("NumpyVariable.call_function", _call_numpy)
follow("SkipFunctionVariable.call_function", _call_numpy)  # Dynamo's kind of np.random.seed in NumPy 1.26
follow("UserDefinedObjectVariable.call_function", _call_numpy)  # and that of NumPy 2.0
