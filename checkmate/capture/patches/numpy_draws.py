"""Call functions that draw from NumPy's global generator before each step, and hand in their arrays as inputs.

Dynamo captures ``np.random.rand(3)`` as a draw of torch's generator, which has other numbers. Here a function of
constants that draws so is not followed: it is called as it is, by plain NumPy, before each step, in the order of the
program, and hands in its array as an input of the captured graph. That is one of NumPy's own, or one of the user's that
names ``np.random``, such as the masks of SpecAugment and of BigBird; a method of a module, too, if it sets no
attribute. Importing this module has Dynamo do so in what our backends capture. Where such a function is given tensors,
names PyTorch or what it computes with, or returns no number, array or arrays of one shape, Dynamo follows it, and the
draw is refused when it is met.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from checkmate.capture.patches.only_our_captures import follow
from checkmate.capture.questions import AnotherAnswer
from checkmate.torch_internals.dynamo import (
    GraphArg,
    ListVariable,
    NumpyNdarrayVariable,
    RandomValueSource,
    TensorVariable,
    UnspecializedNNModuleVariable,
    UserFunctionVariable,
    UserMethodVariable,
    ValueMutationNew,
    VariableTracker,
    wrap_fx_proxy_cls,
)

Described = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]
_SEEDS = (np.random.seed, np.random.set_state)  # which return nothing
_AFTER = "_checkmate_numpy_state"  # on Dynamo's graph: NumPy's state after what was drawn for the capture


class DrawnArray(RandomValueSource):
    """Where an input comes from that such a function makes."""


def _describe(array: np.ndarray[Any, Any]) -> Described:
    return array.shape, array.strides, array.dtype


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """What a function returned as an array, arrays of a list as its rows; None: it is none, nor a number."""
    if isinstance(value, list) and value:
        rows = [v for v in value if isinstance(v, np.ndarray) and _describe(v) == _describe(value[0])]
        value = np.stack(rows) if len(rows) == len(value) else None
    found = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, bool, int, float)) else None
    return found if found is not None and found.dtype.kind in "biuf" else None


def _drawing(function: Callable[..., Any], expected: Described, place: str) -> Callable[..., Any]:
    """The function, for each later call."""

    def draw(*args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        array = _array(function(*args, **kwargs))
        if array is None or _describe(array) != expected:
            now = None if array is None else array.shape
            raise AnotherAnswer(place, expected[0], now, None)
        return array

    return draw


def _handed_in(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> VariableTracker | None:
    """What a function of constants returns, as an input of the captured graph; None: it has to be followed."""
    if not all(a.is_python_constant() for a in (*args, *kwargs.values())):  # which Dynamo looks at from now on
        return None
    given = [a.as_python_constant() for a in args], {name: a.as_python_constant() for name, a in kwargs.items()}
    before, torchs = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  # what users' code draws from
    np.random.set_state(vars(tx.output).get(_AFTER, before))  # noqa: NPY002
    try:
        value = function(*given[0], **given[1])
        after = np.random.get_state()  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002
    array, seeds = _array(value), any(function is one for one in _SEEDS)
    if (array is None and not seeds) or bool((torch.get_rng_state() != torchs).any()):
        torch.set_rng_state(torchs)
        return None
    vars(tx.output)[_AFTER] = after
    if array is None:
        tx.output.random_calls.append((function, *given))
        return VariableTracker.build(tx, None)
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    variable = _input(tx, array, (_drawing(function, _describe(array), place), *given))
    if isinstance(value, list):
        places = [VariableTracker.build(tx, i) for i in range(len(value))]
        rows = [variable.call_method(tx, "__getitem__", [i], {}) for i in places]
        return ListVariable(rows, mutation_type=ValueMutationNew())
    return variable if isinstance(value, np.ndarray) else variable.call_method(tx, "item", [], {})


def _input(tx: Any, array: np.ndarray[Any, Any], call: tuple[Any, ...]) -> Any:
    source = DrawnArray(len(tx.output.random_calls))
    tx.output.random_calls.append(call)
    example = torch.as_tensor(array)
    fixed = StatefulSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * array.ndim, tensor_source=source)
    tx.output.tracing_context.tensor_to_context[example] = fixed
    fake = tx.fake_mode.from_tensor(example, symbolic_context=fixed, source=source)
    name = f"random_value_{source.random_call_index}"
    proxy = tx.output.root_tracer.create_graph_input(name, torch.Tensor, fake, source=source)
    proxy.node.meta["grapharg"] = GraphArg(
        source, example, pass_arg_as_tensor=True, fake_tensor=fake, is_tensor=False, example_strong_ref=example
    )
    kind = NumpyNdarrayVariable if array.ndim else TensorVariable
    return wrap_fx_proxy_cls(kind, tx, proxy, example_value=fake)


@cache
def _parts(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """The code of a function, and of functions within it."""
    within = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return (code, *(part for c in within for part in _parts(c)))


def _names(function: types.FunctionType) -> set[str]:
    return {name for code in _parts(function.__code__) for name in code.co_names}


def _called_by(function: types.FunctionType, owner: type | None) -> tuple[types.FunctionType, ...]:
    """A function, and what it and they name of its module and of the class whose method it is, but for PyTorch's."""
    found, todo = dict[types.FunctionType, None](), [function]
    while todo:
        found[(one := todo.pop())] = None
        for name in _names(one):
            here, method = one.__globals__.get(name), getattr(owner, name, None)
            others = [here] if getattr(here, "__globals__", None) is one.__globals__ else []
            others += [] if _is_of_torch(method) else [method]
            todo += [other for other in others if isinstance(other, types.FunctionType) and other not in found]
    return tuple(found)


def _is_of_torch(value: Any) -> bool:
    """Whether it is PyTorch, of PyTorch, or holds what PyTorch computes with."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _draws(function: types.FunctionType) -> bool:
    """Whether it names NumPy's generator."""
    names = _names(function)
    return "random" in names and any(function.__globals__.get(name) in (np, np.random) for name in names)


def _reaches(function: types.FunctionType, module: torch.nn.Module | None) -> Iterator[Any]:
    """What a function names of its module and of the module whose method it is, and what it holds."""
    places: list[dict[str, Any]] = [function.__globals__]
    if module is not None:
        places += vars(module), module._parameters, module._buffers, module._modules
    yield from (place.get(name) for place in places for name in _names(function))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is filled later
            yield cell.cell_contents
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _outside(called: Any) -> Callable[..., Any] | None:
    """What Dynamo is about to follow, as it is called outside of a step, if it draws and that does nothing else.

    None: it does not draw, or may compute with tensors, or set attributes.
    """
    held = called.obj.realize() if type(called) is UserMethodVariable else None
    is_held = isinstance(held, UnspecializedNNModuleVariable) and held.source is not None
    module: Any = vars(held)["value"] if is_held else None
    if module is None and type(called) is not UserFunctionVariable:
        return None
    owner: Any = None if module is None else type(module)
    functions = _called_by(called.fn, owner)
    if not any(map(_draws, functions)) or any(_is_of_torch(v) for one in functions for v in _reaches(one, module)):
        return None
    if module is None:
        return called.fn
    code = [part for function in functions for part in _parts(function.__code__)]
    if any(instruction.opname == "STORE_ATTR" for part in code for instruction in dis.get_instructions(part)):
        return None
    alive, function = weakref.ref(module), called.fn
    return lambda *args, **kwargs: function(alive(), *args, **kwargs)


def _call(plain: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A function of the user's."""
    function = _outside(self)
    result = None if function is None else _handed_in(tx, function, args, kwargs)
    return plain(self, tx, args, kwargs) if result is None else result


def _call_numpy(plain: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A function of NumPy's."""
    draws = any(self.value is function for function in vars(np.random).values())
    result = _handed_in(tx, self.value, args, kwargs) if draws else None
    return plain(self, tx, args, kwargs) if result is None else result


follow("UserFunctionVariable.call_function", _call)
follow("NumpyVariable.call_function", _call_numpy)
follow("SkipFunctionVariable.call_function", _call_numpy)  # what np.random.seed of NumPy 1.26 is taken for
follow("UserDefinedObjectVariable.call_function", _call_numpy)  # and that of NumPy 2.0
