"""Put our handlers into Dynamo for captures by checkmate's backends; other backends keep Dynamo's.

A handler of ours is called as Dynamo's, with that one in front of its arguments: ``ours(plain, self, tx, ...)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from checkmate.torch_internals.capturing import (
    InstructionTranslator,
    TorchInGraphFunctionVariable,
    get_torch_obj_rule_map,
    manual_torch_name_rule_map,
    wrap,
    wrap_tensor_method,
)
from checkmate.torch_internals.names import put_in_place

Handler = Callable[..., Any]


@dataclass(eq=False)
class Answer:
    """The ``answer`` attribute of a backend, which marks it as ours and holds what its captures remember."""

    compiled: set[str] = field(default_factory=set)  # places that are told that they are compiled
    asked: dict[str, None] = field(default_factory=dict)  # in this capture, in order of the last time
    said: set[Any] = field(default_factory=set)  # where captured code logs or prints
    asks_sizes: bool = False  # asked before a step: how much masks select, integers that are read
    may_ask_sizes: bool = False  # in this capture there were such that are known before it


def answer_now() -> Answer | None:
    """The answer of the capturing backend, inside PyTorch's wrappers; None if the backend is not ours."""
    compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    while compiler is not None:
        if isinstance(answer := getattr(compiler, "answer", None), Answer):
            return answer
        compiler = getattr(compiler, "__wrapped__", None) or getattr(compiler, "compiler_fn", None)
    return None


def only_ours(ours: Handler, plain: Handler | None) -> Handler:
    """A handler that is ours in our captures and Dynamo's otherwise; for some functions Dynamo has none."""
    theirs = plain or (lambda *args, **kwargs: None)  # Dynamo makes a call without a handler a node

    @wraps(theirs)
    def handled(*args: Any, **kwargs: Any) -> Any:
        return theirs(*args, **kwargs) if answer_now() is None else ours(theirs, *args, **kwargs)

    _, *taken = inspect.signature(ours).parameters.values()
    handled.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return handled


def follow(name: str, ours: Handler) -> None:
    """Follow calls of a function or method of Dynamo's, by its name in `checkmate.torch_internals.capturing`."""
    wrap(name, lambda plain: only_ours(ours, plain))


def follow_method(name: str, ours: Handler) -> None:
    """Follow a tensor method."""
    put_in_place(f"Tensor.{name}", lambda: wrap_tensor_method(name, lambda plain: only_ours(ours, plain)))


def follow_function(function: Handler, ours: Handler) -> None:
    """Follow a function of PyTorch."""

    def install() -> None:
        handlers: dict[Any, Handler] = TorchInGraphFunctionVariable._get_handlers()
        handlers[function] = only_ours(ours, handlers.get(function))

    put_in_place(f"torch's {function.__name__}", install)


def follow_skipped(function: Handler, ours: Handler) -> None:
    """Follow a function of PyTorch that Dynamo refuses to."""
    follow_function(function, ours)
    manual_torch_name_rule_map[f"{function.__module__}.{function.__name__}"] = TorchInGraphFunctionVariable
    get_torch_obj_rule_map.cache_clear()  # it is made of these names, and again by torch.distributed
