"""Uses of autograd that Dynamo refuses: tensors given twice, leaves made within the step, frozen parameters.

An `autograd.Function` that is given one tensor in several places has a gradient for each. Dynamo keeps one for each
tensor; here every place but the first is given a view of it, so that autograd adds the gradients, in plain PyTorch's
order. It is given a view, too, of a tensor that Dynamo takes to need no gradient, and that has come to need one.

An intermediate that is given ``requires_grad_()``, or ``requires_grad = True``, is a leaf in plain PyTorch, which
leaves a gradient with it. Dynamo refuses results that depend on one, since AOTAutograd computes gradients of the inputs
only. Where nobody can ask for the leaf's own gradient, that is all there is to compute; `refuse_lost_leaves` refuses
the rest.

A parameter that is frozen within the step and thawed again, as an adapter that is off while the reference of DPO is
computed, is no gradient's concern in between: until then its name stands for what ``detach()`` makes of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx
from torch import nn

from checkmate.capture.nodes import storage
from checkmate.capture.patches.only_our_captures import Handler, follow
from checkmate.capture.provenance import readable, where
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import unimplemented, wrap_fx_proxy

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_frozen: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # per capture: inputs, with their own proxies


def refuse_lost_leaves(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse ``requires_grad_()`` on intermediates that train nothing, or whose own gradient may be asked for."""
    # Nobody may ask for a leaf's own gradient.
    results = [n for n in module.graph.output_node().all_input_nodes if _requires_grad(n)]
    shown = set(map(_storage, results))
    leaves = [*_leaves(module)]
    for leaf, origin in leaves:
        hooked = any(getattr(user.target, "__name__", user.target) in _HOOKS for user in leaf.users)
        if _requires_grad(leaf) and (hooked or _storage(leaf) in shown):
            raise Unsupported(
                f"{where(origin)}: an intermediate is given requires_grad_() and its gradient is asked for, by a "
                "hook or outside of the step. Only inputs, parameters and results have one of their own: compute "
                "the intermediate outside, and pass it in with requires_grad_()."
            )
    if not leaves:
        return
    # A result has to depend on an input that needs a gradient, by what needs one.
    trained = {
        node
        for node, tensor in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=False)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    }
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        needs = not isinstance(value, torch.Tensor) or value.requires_grad  # the results of a part, or it is not known
        if node.op == "get_attr" or (needs and not trained.isdisjoint(node.all_input_nodes)):
            trained.add(node)
    if not trained.issuperset(results):
        raise Unsupported(
            f"{where(leaves[0][1])}: a result needs a gradient only for an intermediate that is given "
            "requires_grad_(), which trains nothing: no parameter or input needs one. To have the gradient, "
            "compute the intermediate outside, and pass it in with requires_grad_()."
        )


def _leaves(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each such leaf, as all graphs around it know it, with the node that makes it a leaf.

    A checkpointed part is a graph of its own, and hands leaves out as results.
    """
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "requires_grad_":
            yield node.args[0], node
        held = (getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr")
        for body in (part for part in held if isinstance(part, fx.GraphModule)):
            results: Any = body.graph.output_node().args[0]
            for leaf, origin in _leaves(body):
                yield leaf, origin
                for user in node.users:
                    result = results[user.args[1]] if user.target is operator.getitem else None
                    if isinstance(result, fx.Node) and _storage(leaf) == _storage(result):
                        yield user, origin


def _storage(node: fx.Node) -> int:
    return storage(node.meta["example_value"])


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _set_attribute(plain: Handler, self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
    """Set an attribute; ``t.requires_grad`` through its method."""
    attribute, needed = (a.as_python_constant() if a.is_python_constant() else None for a in (name, value))
    if attribute != "requires_grad" or not obj.is_tensor() or not (needed is True or _is_parameter(obj)):
        return plain(self, tx, obj, name, value)
    obj.call_method(tx, "requires_grad_", [value], {})
    return value


def _call_method(plain: Handler, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Freeze a parameter until it is thawed; other methods and tensors are Dynamo's."""
    if name != "requires_grad_" or not _is_parameter(self):
        return plain(self, tx, name, args, kwargs)
    needed = next((a.as_python_constant() for a in (*args, *kwargs.values())), True)
    if needed == self.requires_grad:
        return self
    if not tx.output.is_root_tracer():
        _refuse_flag(self, needed, "in a part that is a graph of its own, such as a checkpoint")
    frozen = _frozen.setdefault(tx.output.tracing_context, {})
    if not needed:
        frozen[self] = self.proxy
        value = wrap_fx_proxy(tx, tx.output.create_proxy("call_method", "detach", (self.proxy,), {}))
        self.proxy, self.requires_grad = value.as_proxy(), False
    elif self in frozen:
        self.proxy, self.requires_grad = frozen.pop(self), True
    else:
        _refuse_flag(self, needed, "which was frozen before it")
    return self


def _is_parameter(variable: Any) -> bool:
    """Tell whether a tensor is a parameter, frozen within the step or not."""
    node = variable.as_proxy().node
    made_of = node.args[0] if node.target == "detach" else node
    return bool(variable.source) and isinstance(made_of.meta["example_value"], nn.Parameter)


def _end(plain: Handler, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """End a capture; refuse one that leaves a parameter frozen."""
    for variable in _frozen.pop(self.tracing_context, {}):
        _refuse_flag(variable, False, "and leaves it so")
    return plain(self, tx, *args, **kwargs)


def _refuse_flag(variable: Any, needed: bool, reason: str) -> None:
    name = readable(variable.source.name)
    explanation = f"The step calls requires_grad_({needed}) on {name}, {reason}."
    unimplemented(gb_type="A flag is changed", context=name, explanation=explanation, hints=[])


def _apply(plain: Handler, self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an `autograd.Function`; a tensor given twice is given as views."""
    arguments, nodes = [*args], [a.as_proxy().node if a.is_tensor() else None for a in args]
    for i in reversed(range(len(arguments))):  # autograd goes through nodes from the last made to the first
        if (node := nodes[i]) is None:
            continue
        # A view of what was written to since it was made may need a gradient now.
        value = node.meta.get("example_value")
        needs = not args[i].requires_grad and isinstance(value, torch.Tensor) and value.grad_fn is not None
        if needs or node in nodes[:i]:
            proxy = tx.output.create_proxy("call_method", "view_as", (args[i].as_proxy(),) * 2, {})
            arguments[i] = wrap_fx_proxy(tx, proxy)
    return plain(self, tx, arguments, kwargs)


follow("OutputGraph.compile_subgraph", _end)
follow("TensorVariable.call_method", _call_method)
follow("OutputGraph._check_requires_grad_intermediate_outputs", lambda plain, self, *args: None)
follow("SetAttrBuiltinVariable._call_setattr", _set_attribute)
follow("AutogradFunctionApplyVariable.call_function", _apply)
