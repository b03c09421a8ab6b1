"""Functions that draw from NumPy's global generator, called before the step at each call; their arrays are inputs.

Dynamo captures ``np.random.rand(3)`` as a draw of torch's generator, which has other numbers. Here a function of
constants that draws so is not followed: it is called as it is, by plain NumPy, before each step, in the order of the
program, and hands in its array as an input of the captured graph. That is one of NumPy's own, or one of the user's that
names ``np.random``, such as the masks of SpecAugment. Importing this module has Dynamo do so in what our backends
capture. Where such a function is given tensors, draws of torch's generator too, or returns no array or number, Dynamo
follows it, and the draw is refused when it is met.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np
import torch
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import GraphArg, wrap_fx_proxy_cls
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, TensorVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from checkmate.capture.patches.branches import is_ours, wrap
from checkmate.capture.questions import AnotherAnswer

Described = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]
_DRAWS = vars(np.random).values()
_AFTER = "_checkmate_numpy_state"  # on Dynamo's graph: NumPy's state after what was drawn for the capture


class DrawnArray(RandomValueSource):
    """Where an input comes from that such a function makes."""


def _describe(array: np.ndarray[Any, Any]) -> Described:
    return array.shape, array.strides, array.dtype


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """What a function returned as an array; None: it is neither an array nor a number."""
    found = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, bool, int, float)) else None
    return found if found is not None and found.dtype.kind in "biuf" else None


def _drawing(function: Callable[..., Any], expected: Described, place: str) -> Callable[..., Any]:
    """The function, for each later call."""

    def draw(*args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        array = _array(function(*args, **kwargs))
        if array is None or _describe(array) != expected:
            now = None if array is None else array.shape
            raise AnotherAnswer(place, expected[0], now, None, drawn=True)
        return array

    return draw


def _handed_in(tx: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> VariableTracker | None:
    """What a function of constants returns, as an input of the captured graph; None: it has to be followed."""
    if not is_ours(tx) or not all(a.is_python_constant() for a in (*args, *kwargs.values())):
        return None
    given = [a.as_python_constant() for a in args], {name: a.as_python_constant() for name, a in kwargs.items()}
    before, torchs = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  # what users' code draws from
    np.random.set_state(vars(tx.output).get(_AFTER, before))  # noqa: NPY002
    try:
        value = function(*given[0], **given[1])
        after = np.random.get_state()  # noqa: NPY002
    finally:
        np.random.set_state(before)  # noqa: NPY002
    array = _array(value)
    if array is None or bool((torch.get_rng_state() != torchs).any()):
        torch.set_rng_state(torchs)
        return None
    vars(tx.output)[_AFTER] = after
    place = f"{tx.f_code.co_filename}:{tx.lineno}"
    variable = _input(tx, array, (_drawing(function, _describe(array), place), *given))
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
def _names_generator(code: types.CodeType) -> frozenset[str]:
    """The global names in a function that names an attribute ``random``, also within functions in it."""
    within = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    own = frozenset(code.co_names) if "random" in code.co_names else frozenset()
    return own.union(*map(_names_generator, within))


def _following(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a function of the user's."""

    @wraps(plain)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function: Any = self.fn
        names = _names_generator(function.__code__) if type(self) is UserFunctionVariable and is_ours(tx) else ()
        draws = any(function.__globals__.get(name) in (np, np.random) for name in names)
        result = _handed_in(tx, function, args, kwargs) if draws else None
        return plain(self, tx, args, kwargs) if result is None else result

    return called


def _of_numpy(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a function of NumPy's."""

    @wraps(plain)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        draws = any(self.value is function for function in _DRAWS)
        result = _handed_in(tx, self.value, args, kwargs) if draws else None
        return plain(self, tx, args, kwargs) if result is None else result

    return called


wrap(UserFunctionVariable, "call_function", _following)
wrap(NumpyVariable, "call_function", _of_numpy)
