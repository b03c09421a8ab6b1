"""What a mask selects, where the mask is known before the step runs: how much it is, is asked before, as a question.

``x[mask]`` is as large as the mask has elements that are true, which a plan must know. Where the mask depends only on
inputs and buffers, or on random numbers, as with adapters that are chosen by the language of a sample, that number is
asked before each call, and each other number gets a plan of its own. The step then indexes by the places of these
elements: what eager PyTorch makes of a mask as well, so that the kernels that follow are the same.

So is an integer that the step reads, ``int(self.pointer)``, which a slice or a size may depend on.

Not all of this is needed: ``x[mask].sum()`` is captured for any mask, and ``x * count.item()`` for any number. So it is
only done where a capture has failed without: see `knowing_selections`. Importing this module has Dynamo do so in what
our backends capture.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from checkmate.capture.patches.branches import decide, value_now
from checkmate.capture.patches.is_compiling import Answer, answer_of
from checkmate.capture.questions import CannotTellError
from checkmate.torch_internals.dynamo import (
    BuiltinVariable,
    TorchInGraphFunctionVariable,
    TupleVariable,
    VariableTracker,
    wrap,
    wrap_fx_proxy,
    wrap_tensor_method,
)
from checkmate.torch_internals.names import put_in_place

_OF_DATA = re.compile(
    r"depends? on data|[Dd]ata.dependent|asked of a size|a number is read from|only concrete integers|cannot be told"
)


def knowing_selections(run: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    """A compiled function whose captures ask how much masks select, and which integers are read, if they fail without.

    Args:
        run: made by `torch.compile`; it captures when it is called.
        answer: of its backend.
    """

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        answer.may_ask_sizes = False
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if answer.asks_sizes or not answer.may_ask_sizes or not _OF_DATA.search(str(error)):
                raise
            refused = error
        answer.asks_sizes = True
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if _OF_DATA.search(str(error)):
                raise refused from None
            raise
        finally:
            answer.asks_sizes = False

    return running


def _is_mask(value: Any) -> bool:
    return value.is_tensor() and value.dtype is torch.bool and bool(value.ndim)


def _places(tx: Any, mask: Any) -> Any:
    """Where a mask, or any tensor, is not zero: int64, (number of places, dimensions); None: that is not known."""
    answer = answer_of(tx.output.compiler_fn)
    if answer is None or not mask.ndim:
        return None
    if not answer.asks_sizes:
        answer.may_ask_sizes = answer.may_ask_sizes or _is_known(tx, mask)
        return None
    if not _is_known(tx, mask):
        return None
    count = mask.call_method(tx, "count_nonzero", [], {})
    size = decide(tx, count, int)
    return wrap_fx_proxy(
        tx, tx.output.create_proxy("call_function", torch.nonzero_static, (mask.as_proxy(),), {"size": size})
    )


def _is_known(tx: Any, mask: Any) -> bool:
    try:
        value_now(tx, mask.as_proxy().node)
    except CannotTellError:
        return False
    return True


def _by_place(tx: Any, key: Any) -> Any:
    """An index with places where it has masks; None: it has none that is known."""
    indices: list[Any] = []
    found = False
    for index in _indices(key):
        places = _places(tx, index) if _is_mask(index) else None
        found = found or places is not None
        columns = places and places.call_method(tx, "unbind", [VariableTracker.build(tx, 1)], {})
        indices += [index] if columns is None else columns.items
    return TupleVariable(indices) if found else None


def _indices(key: Any) -> list[Any]:
    key = key.realize()
    return [item.realize() for item in (key.items if isinstance(key, TupleVariable) else [key])]


def _getting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of what Python builds in, which may be ``x[index]``."""

    @wraps(plain)
    def got(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.getitem and args[0].is_tensor():
            args = [args[0], _by_place(tx, args[1]) or args[1]]
        return plain(self, tx, args, kwargs)

    return got


def _setting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's ``x[mask] = y``, where there may be a y for each element that is true."""

    @wraps(plain)
    def set_(self: Any, tx: Any, key: Any, value: Any) -> Any:
        value = value.realize()
        if value.is_tensor() and value.ndim:
            key = _by_place(tx, key) or key
        return plain(self, tx, key, value)

    return set_


def _select(tx: Any, x: Any, mask: Any) -> Any:
    """``x.masked_select(mask)``, but where its backward lays out gradients in a way of its own."""
    if x.requires_grad or not _is_mask(mask.realize()) or x.size != mask.realize().size:
        return None
    places = _by_place(tx, mask)
    return None if places is None else x.call_method(tx, "__getitem__", [places], {})


def _place(tx: Any, mask: Any, as_tuple: Any = None) -> Any:
    """``mask.nonzero()``."""
    places = _places(tx, mask.realize())
    if places is None or as_tuple is None or not as_tuple.as_python_constant():
        return places
    return places.call_method(tx, "unbind", [VariableTracker.build(tx, 1)], {})


def _place_of_true(tx: Any, mask: Any, *others: Any) -> Any:
    """``torch.where(mask)``."""
    return None if others else _place(tx, mask, VariableTracker.build(tx, True))


def _method(call: Callable[..., Any], plain: Callable[..., Any] | None) -> Callable[..., Any]:
    def called(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(tx, self, *args, **kwargs)
        return plain(self, tx, *args, **kwargs) if result is None and plain is not None else result

    return called


def _function(call: Callable[..., Any], plain: Callable[..., Any] | None) -> Callable[..., Any]:
    def called(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_known = len(args) > 0 and "out" not in kwargs and args[0].realize().is_tensor()
        result = call(tx, args[0].realize(), *args[1:], **kwargs) if is_known else None
        return plain(self, tx, *args, **kwargs) if result is None and plain is not None else result

    return called


def _install() -> None:
    wrap("BuiltinVariable._handle_insert_op_in_graph", _getting)
    BuiltinVariable.call_function_handler_cache.clear()  # of methods as they were
    wrap_tensor_method("__setitem__", _setting)
    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    functions: dict[Any, Callable[..., Any]] = {torch.masked_select: _select, torch.nonzero: _place}
    for function, call in functions.items():
        wrap_tensor_method(function.__name__, partial(_method, call))
    for function, call in {**functions, torch.where: _place_of_true}.items():
        handlers[function] = _function(call, handlers.get(function))


put_in_place("selections by masks", _install)
