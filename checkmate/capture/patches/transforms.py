"""Calls of an `autograd.Function`, its own backward within ``torch.func``, and tangents that are zero.

Of a function with ``setup_context`` Dynamo does not know where its methods come from, and takes numbers in their
closures for constants. Here the methods are reached through a global, so that Dynamo guards what they read.

Dynamo makes graphs of a function's forward and backward. ``torch.func`` would differentiate these, and nothing leads
from the second to the function's inputs, so that a gradient of the gradient is lost. Of a function's own ``jvp`` and
``vmap`` Dynamo knows nothing. So within gradients the function itself becomes a node, which AOTAutograd calls while it
traces; Dynamo has followed it before, for its guards and its results. Within other transforms it is refused.

``torch.func.jvp`` of a norm makes a view of the tangent of its weight, which is zero where the weight has none. Such
zeros, of which ATen has the shape only, have kernels of their own for a few views, below which nothing is traced: the
view of a fake tensor was none. These kernels are those of tensors with data, and left out here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.patches.only_our_captures import Handler, follow
from checkmate.torch_internals.capturing import (
    AttrSource,
    GlobalSource,
    GuardBuilder,
    install_guard,
    proxy_args_kwargs,
    unimplemented,
)
from checkmate.torch_internals.names import put_in_place
from checkmate.torch_internals.running import (
    TransformType,
    _enter_dual_level,
    _exit_dual_level,
    functorch,
    retrieve_all_functorch_interpreters,
    saved_tensors_hooks,
)

ZEROS = torch.library.Library("aten", "IMPL", "ZeroTensor")  # what is registered is undone with it


@contextmanager
def closing_levels() -> Iterator[None]:
    """Within the block a graph is traced; if that fails, leave the levels that its nodes have entered.

    Nodes of their own enter and leave a level, and forbid hooks of saved tensors in between.
    """
    depth, forward = len(retrieve_all_functorch_interpreters()), _is_in_forward_mode()
    forbidden = saved_tensors_hooks._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        for level in retrieve_all_functorch_interpreters()[depth:][::-1]:
            getattr(functorch, f"_{level.key().name.lower()}_decrement_nesting")()
        if not forward and _is_in_forward_mode():
            _exit_dual_level(level=0)
        if forbidden is None:
            saved_tensors_hooks._saved_tensors_hooks_enable()
        raise


def _is_in_forward_mode() -> bool:
    """Tell whether there is a level of forward mode; PyTorch refuses a second one."""
    try:
        _exit_dual_level(level=_enter_dual_level())
    except RuntimeError:
        return True
    return False


def _call_apply(plain: Handler, self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an `autograd.Function`; within ``torch.func`` by its own rules, or not at all."""
    _guard_methods(self, any(a.is_tensor() and a.requires_grad is not False for a in args))
    levels = {level.key() for level in retrieve_all_functorch_interpreters()}
    if not levels or not torch.is_grad_enabled():
        return plain(self, tx, args, kwargs)
    if levels != {TransformType.Grad}:
        _refuse(self, "within torch.func.jvp or vmap its own rules would be left out")
    # What a level does not differentiate, those around it may: have Dynamo follow the backward in any case.
    arguments = [x.clone(requires_grad=True) if _may_need_gradient(x) else x for x in args]
    graph: fx.Graph = tx.output.current_tracer.graph
    before = set(graph.nodes)
    result = plain(self, tx, arguments, kwargs)
    target = torch.ops.higher_order.autograd_function_apply
    for node in graph.find_nodes(op="call_function", target=target):
        if node in before:
            continue
        apply = _applied(self.fn_cls, flat=isinstance(node.meta["example_value"], tuple))
        with graph.inserting_before(node):
            called = tx.output.create_proxy("call_function", apply, *proxy_args_kwargs(args, kwargs)).node
        if not {*node.all_input_nodes[2:]} <= {*called.all_input_nodes}:
            _refuse(self, "it reads a tensor, or a number that changes, which it is not given: pass that to apply()")
        called.meta.update(node.meta)
        node.replace_all_uses_with(called)
        graph.erase_node(node)
    return result


def _guard_methods(variable: Any, needs_gradient: bool) -> None:
    """Guard that the methods of a function stay the same objects, as `_apply` has Dynamo reach them otherwise."""
    source = getattr(variable, "fn_cls_source", variable.source)
    for name in ("forward", "setup_context", "backward"):
        is_static = isinstance(getattr(variable.fn_cls, name), FunctionType)
        if needs_gradient and not is_static:
            reason = "is no @staticmethod. Write it as one, and pass what it reads of the class to apply()."
            why = f"The {name} of {variable.fn_cls.__name__}, an autograd.Function, {reason}"
            unimplemented(gb_type="A method of a function of autograd", context=name, explanation=why, hints=[])
        if source is not None and is_static:
            install_guard(AttrSource(source, name).make_guard(GuardBuilder.ID_MATCH))


def _apply(plain: Handler, self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function; if Dynamo does not know where its methods come from, they come from a new global."""
    if self.parent_source is None:
        methods = SimpleNamespace(forward=self.fwd_fn, backward=self.bwd_fn)
        self.parent_source = GlobalSource(tx.output.install_global("methods", methods))
    return plain(self, tx, args, kwargs)


def _may_need_gradient(variable: Any) -> bool:
    return variable.is_tensor() and (variable.dtype.is_floating_point or variable.dtype.is_complex)


def _applied(function: Any, *, flat: bool) -> Callable[..., Any]:
    """A call of the function, with the results of Dynamo's node for it: ``flat`` means a tuple of tensors."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = function.apply(*args, **kwargs)
        if not flat:
            return result
        return tuple(t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor))

    return apply


def _refuse(variable: Any, why: str) -> None:
    explanation = f"{variable.fn_cls.__name__} is an autograd.Function within torch.func, and {why}."
    unimplemented(gb_type="A function of autograd within torch.func", context="", explanation=explanation, hints=[])


def _trace_views_of_zeros() -> None:
    with warnings.catch_warnings():  # PyTorch 2.11 says what is replaced
        warnings.simplefilter("ignore", UserWarning)
        for view in ("view", "as_strided", "_reshape_alias"):
            ZEROS.impl(view, torch.library.fallthrough_kernel)


put_in_place("views of zeros", _trace_views_of_zeros)
follow("AutogradFunctionVariable.call_apply", _call_apply)
follow("AutogradFunctionApplyVariable.call_function", _apply)
