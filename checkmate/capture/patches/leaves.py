"""What Dynamo refuses of autograd and our backends capture: one tensor given twice, intermediates that become leaves.

Importing this module has Dynamo take these in what our backends capture, and in nothing else.

An `autograd.Function` that is given one tensor in several places has a gradient for each. Dynamo keeps one for each
tensor; here every place but the first is given a view of it, so that autograd adds the gradients, in plain PyTorch's
order.

An intermediate that is given ``requires_grad_()`` is a leaf in plain PyTorch, which leaves a gradient with it. Dynamo
refuses results that depend on one, since AOTAutograd computes gradients of the inputs only. Where nobody can ask for
the leaf's own gradient, that is all there is to compute; `refuse_lost_leaves` refuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable

from checkmate.capture.nodes import storage
from checkmate.capture.patches.is_compiling import answer_of
from checkmate.capture.provenance import where
from checkmate.errors import Unsupported

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def refuse_lost_leaves(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse intermediates with ``requires_grad_()`` that train nothing, or whose own gradient can be asked for.

    Args:
        module: a graph as Dynamo captured it.
        inputs: what it is called with.

    Raises:
        Unsupported: naming the line of the user's code.
    """
    trains = any(isinstance(given, torch.Tensor) and given.requires_grad for given in inputs)
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        (output,) = part.graph.find_nodes(op="output")
        kept = {storage(n.meta["example_value"]) for n in output.all_input_nodes if _requires_grad(n)}
        for node in part.graph.find_nodes(op="call_method", target="requires_grad_"):
            leaf = node.args[0]
            hooked = any(getattr(user.target, "__name__", user.target) in _HOOKS for user in leaf.users)
            if kept and not trains:
                raise Unsupported(
                    f"{where(node)}: the result needs a gradient only for an intermediate that is given "
                    "requires_grad_(), which trains nothing: no parameter or input needs one. To have the gradient, "
                    "compute the intermediate outside, and pass it in with requires_grad_()."
                )
            if _requires_grad(leaf) and (hooked or storage(leaf.meta["example_value"]) in kept):
                raise Unsupported(
                    f"{where(node)}: an intermediate is given requires_grad_() and its gradient is asked for, by a "
                    "hook or outside of the step. Only inputs, parameters and results have one of their own: compute "
                    "the intermediate outside, and pass it in with requires_grad_()."
                )


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaves_pass(check: Callable[..., None]) -> Callable[..., None]:
    """Dynamo's check for such intermediates, but for what our backends capture."""

    @wraps(check)
    def checked(self: Any, *args: Any) -> None:
        if answer_of(self.compiler_fn) is None:
            check(self, *args)

    return checked


def _given_views(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's capture of an `autograd.Function`, given views where our backends capture one tensor given twice."""

    @wraps(apply)
    def applied(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if answer_of(tx.output.compiler_fn) is not None:
            args = _each_once(tx, args)
        return apply(self, tx, args, kwargs)

    return applied


def _each_once(tx: Any, args: Sequence[Any]) -> list[Any]:
    given, first = [*args], [a.as_proxy().node if a.is_tensor() else None for a in args]
    for i in reversed(range(len(given))):  # autograd goes through nodes from the last made to the first
        if first[i] is not None and first[i] in first[:i]:
            given[i] = wrap_fx_proxy(
                tx, tx.output.create_proxy("call_method", "view_as", (args[i].as_proxy(),) * 2, {})
            )
    return given


def _install() -> None:
    checked = "_check_requires_grad_intermediate_outputs"
    if hasattr(OutputGraph, checked):  # a PyTorch without it has nothing to refuse
        setattr(OutputGraph, checked, _leaves_pass(getattr(OutputGraph, checked)))
    AutogradFunctionApplyVariable.call_function = _given_views(  # type: ignore[method-assign]
        AutogradFunctionApplyVariable.call_function
    )


_install()
