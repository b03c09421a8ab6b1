"""Call functions that draw from NumPy's global generator before each step; their arrays are inputs.

Dynamo captures ``np.random.rand(3)`` as a draw of torch's generator, which has other numbers. Here a function of
constants that draws so is not followed: it is called as it is, by plain NumPy, before each step, in the order of the
program, and hands in its array as an input of the captured graph. That is one of NumPy's own, or one of the user's that
names ``np.random``, such as the masks of SpecAugment. Where it is a method, is given tensors, names PyTorch or what it
computes with, or returns neither a number nor an array, Dynamo follows it, and the draw is refused when it is met.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from checkmate.capture.guards import GuardFailed
from checkmate.capture.patches.only_our_captures import Handler, follow
from checkmate.torch_internals.capturing import (
    GraphArg,
    NumpyNdarrayVariable,
    RandomValueSource,
    TensorVariable,
    UserFunctionVariable,
    VariableTracker,
    wrap_fx_proxy_cls,
)

_SEEDS = (np.random.seed, np.random.set_state)  # which return nothing
_AFTER = "_checkmate_numpy_state"  # on Dynamo's graph: NumPy's state after what was drawn for the capture


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
