"""``x[mask]`` and its like, if the mask is known before the step: the number of selected elements is a guard.

``x[mask]`` is as large as the mask has elements that are true, which a plan must know. Where the mask depends only on
inputs and buffers, or on random numbers, as with adapters that are chosen by the language of a sample, that number is
asked before each call, and each other number gets a plan of its own. The step then indexes by the places of these
elements: what eager PyTorch makes of a mask as well, so that the kernels that follow are the same.

So is an integer that the step reads, ``int(self.pointer)``, which a slice or a size may depend on.

``x[mask].sum()`` is captured for any mask, and ``x * count.item()`` for any number, so this is done only where a
capture has failed without (`knowing_selections`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from checkmate.capture.guards import CannotTellError
from checkmate.capture.patches.data_branches import decide, value_now
from checkmate.capture.patches.only_our_captures import Answer, answer_now, follow, follow_function, follow_method
from checkmate.torch_internals.capturing import (
    BuiltinVariable,
    TensorVariable,
    TupleVariable,
    VariableTracker,
    wrap_fx_proxy,
)
from checkmate.torch_internals.names import put_in_place

_OF_DATA = re.compile(
    r"depends? on data|[Dd]ata.dependent|asked of a size|a number is read from|only concrete integers|cannot be told"
)


def knowing_selections(run: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    """Make captures that fail ask for the sizes of selections, and for integers that are read."""

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        # First without: most of it is captured for any mask.
        answer.may_ask_sizes = False
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if answer.asks_sizes or not answer.may_ask_sizes or not _OF_DATA.search(str(error)):
                raise
            refused = error
        # Then with these questions; if that fails too, the first error stands.
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


def _places(tx: Any, mask: Any, as_tuple: bool = True) -> Any:
    """The nonzero places of a tensor, int64 (places, dimensions), or their columns; None if unknown."""
    if not mask.ndim:
        return None
    try:
        value_now(tx, mask.as_proxy().node)
    except CannotTellError:
        return None
    answer: Any = answer_now()
    answer.may_ask_sizes = True
    if not answer.asks_sizes:
        return None
    size = decide(tx, mask.call_method(tx, "count_nonzero", [], {}), int)
    proxy = tx.output.create_proxy("call_function", torch.nonzero_static, (mask.as_proxy(),), {"size": size})
    places = wrap_fx_proxy(tx, proxy)
    return places.call_method(tx, "unbind", [VariableTracker.build(tx, 1)], {}) if as_tuple else places


def _by_place(tx: Any, key: Any) -> Any:
    """An index with places instead of masks; None if it has no known mask."""
    key = key.realize()
    indices: list[Any] = []
    has_mask = False
    for index in [item.realize() for item in (key.items if isinstance(key, TupleVariable) else [key])]:
        columns = _places(tx, index) if _is_mask(index) else None
        has_mask = has_mask or columns is not None
        indices += [index] if columns is None else columns.items
    return TupleVariable(indices) if has_mask else None


def _call_operator(plain: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is operator.getitem and args[0].is_tensor():  # ``x[index]``
        args = [args[0], _by_place(tx, args[1]) or args[1]]
    return plain(self, tx, args, kwargs)


def _set(plain: Callable[..., Any], self: Any, tx: Any, key: Any, value: Any) -> Any:
    """Assign ``x[mask] = y``; if y has an element for each true one, by their places."""
    value = value.realize()
    if value.is_tensor() and value.ndim:
        key = _by_place(tx, key) or key
    return plain(self, tx, key, value)


def _select(tx: Any, x: Any, mask: Any) -> Any:
    """Trace ``x.masked_select(mask)``, unless its backward lays out gradients otherwise."""
    if x.requires_grad or not _is_mask(mask.realize()) or x.size != mask.realize().size:
        return None
    places = _by_place(tx, mask)
    return None if places is None else x.call_method(tx, "__getitem__", [places], {})


def _place(tx: Any, mask: Any, as_tuple: Any = None) -> Any:
    """``mask.nonzero()``."""
    return _places(tx, mask.realize(), as_tuple is not None and as_tuple.as_python_constant())


def _place_of_true(tx: Any, mask: Any, *values: Any) -> Any:
    """``torch.where(mask)``."""
    return None if values else _places(tx, mask)


def _called(
    handler: Callable[..., Any], plain: Callable[..., Any], self: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call one of these functions; ``self`` is a tensor where it is called as its method."""
    arguments = [self, *args] if isinstance(self, TensorVariable) else [args[0].realize(), *args[1:]] if args else []
    is_known = arguments and "out" not in kwargs and arguments[0].is_tensor()
    result = handler(tx, *arguments, **kwargs) if is_known else None
    return plain(self, tx, *args, **kwargs) if result is None else result


follow("BuiltinVariable._handle_insert_op_in_graph", _call_operator)
put_in_place("x[mask]", lambda: BuiltinVariable.call_function_handler_cache.clear())  # of methods as they were
follow_method("__setitem__", _set)
follow_function(torch.where, partial(_called, _place_of_true))
for name, handler in (("masked_select", _select), ("nonzero", _place)):
    follow_function(getattr(torch, name), partial(_called, handler))
    follow_method(name, partial(_called, handler))
