"""`contextvars.ContextVar` within a step: set, read and reset during capture as in plain PyTorch.

Dynamo cannot call their methods. Libraries that know it ask whether they are compiled, and keep a global variable
instead, which is another program: reset, it forgets what was set around it. Here Dynamo follows the values itself.

What a variable holds when the step begins is guarded: another value is another capture. A step that leaves one set is
refused, as the compiled step would not set it.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any

from checkmate.capture.patches.only_our_captures import Handler, follow
from checkmate.torch_internals.capturing import AttrSource, CallFunctionNoArgsSource, VariableTracker, unimplemented

_VALUES = "_checkmate_context_variables"  # on Dynamo's graph: those that the step has set, with their values


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
