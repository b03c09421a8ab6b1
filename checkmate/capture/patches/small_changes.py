"""Small changes to Dynamo in our captures; those of guards and of gradients from outside are for the whole process."""

from __future__ import annotations

import inspect
import logging
import re
import threading
import weakref
from functools import wraps
from traceback import walk_tb
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from checkmate.capture.patches.only_our_captures import Handler, follow, follow_function, follow_method, follow_skipped
from checkmate.torch_internals.capturing import (
    AttrSource,
    FakeTensorObservedException,
    NullContextVariable,
    TorchRuntimeError,
    dynamo_config,
    runtime_wrappers,
    unimplemented,
)
from checkmate.torch_internals.names import put_in_place
from checkmate.torch_internals.running import (
    TransformType,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
    _foreach_lerp_,
    _str,
    retrieve_all_functorch_interpreters,
)

log = logging.getLogger("checkmate.capture")
here = threading.local()  # .told: shapes told of the step of ours whose backward runs on this thread
_CONVERT = {
    *("to", "type", "type_as", "contiguous", "cpu", "cuda", "bool", "byte", "char", "short", "int", "long"),
    *("half", "bfloat16", "float", "double"),
}
COMPILED = "checkmate_compiled"  # among the options of an attention: those of its compilation that are not usual
OPTIONS = {  # by name of the op: position of its options
    op.name(): [*inspect.signature(op.__call__).parameters].index("kernel_options")
    for op in (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward)
}
BY_JVP = "is differentiated by torch.func.jvp, which PyTorch does for tensors with data only."
_CHANGE_SHAPES = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}  # methods


def _guard_each_parameter() -> None:
    """Guard each parameter: PyTorch 2.11 assumes it unchanged if its dictionary was not written to.

    It would run what was captured before a parameter was frozen or thawed in place. Later versions look, and leave out
    the shortcut past whole modules that goes with it, by which the versions are told apart here.
    """
    if dynamo_config.use_recursive_dict_tags_for_guards:
        dynamo_config.use_recursive_dict_tags_for_guards = False
        dynamo_config.skip_tensor_guards_with_matching_dict_tags = False


def _tell_of_layouts() -> None:
    """Log where AOTAutograd lays out anew a gradient that comes to a result of a step of ours, once for each step."""
    lay_out = runtime_wrappers.coerce_to_expected_memory_format

    @wraps(lay_out)
    def telling(gradient: torch.Tensor, memory_format: Any) -> torch.Tensor:
        result: torch.Tensor = lay_out(gradient, memory_format)
        told = getattr(here, "told", None)
        if result is not gradient and told == []:
            told.append(gradient.shape)
            log.warning(
                "The gradient that comes to a result of the compiled step, of shape %s, is expanded or transposed, and "
                "is laid out anew, beside the budget. Plain PyTorch computes with it as it is: last bits of gradients "
                "may differ. Compute the loss within the step: compile a function that returns it.",
                tuple(gradient.shape),
            )
        return result

    runtime_wrappers.coerce_to_expected_memory_format = telling


def _convert(plain: Handler, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Give ``x`` itself for ``x.to(x.dtype)`` and its like, as plain PyTorch does.

    Dynamo makes another object of it, which has lost what Python keeps with the tensor: assigned again to the name of
    an `torch.nn.Buffer`, as models do that move it to where their input is, it no longer says whether it is persistent,
    and the assignment is refused.
    """
    result = plain(self, tx, name, args, kwargs)
    if name in _CONVERT and type(result) is type(self):
        converted, original = (variable.as_proxy().node.meta["example_value"] for variable in (result, self))
        return self if converted is original else result
    return result


def _leave_whole(plain: Handler, self: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
    """Keep an op whole that Dynamo decomposes because a number may be a tensor: parts round otherwise."""


def _pass_over_flags(plain: Handler, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Ignore ``torch.backends.cudnn.flags`` on the CPU; elsewhere None, a refusal: kernels run later, without them."""
    described = [n.meta.get("example_value") for n in tx.output.graph.nodes]
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in described)
    return None if on_gpu else NullContextVariable()


def _pass_over_early_stop(plain: Handler, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Ignore ``set_checkpoint_early_stop``: how much of a checkpoint runs again changes no number."""
    return NullContextVariable()


def _drop_of_nothing(plain: Handler, self: Any, tx: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Give the tensor itself for dropout of no elements, also of types without draws; None if there are elements."""
    x = kwargs.get("input", x)
    if x is None or not x.is_tensor() or not x.realize().valid_size():
        return None
    return x if any(type(n) is int and n == 0 for n in x.realize().size) else None


def _describe(plain: Handler, node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Make an op's fake result; an error that its kernel may not have becomes a refusal that says so.

    A fake tensor is made again from its base by the views that led to it, and a change of shape in place, as by
    ``unsqueeze_``, is left out: a later write to such a view fails. Of tensors without elements the description of an
    op may check more than the kernel. And a backward is traced that never runs.
    """
    inputs = node.all_input_nodes
    try:
        return plain(node, tx, *args, **kwargs)
    except (IndexError, TorchRuntimeError, FakeTensorObservedException) as error:
        _end_guards(error)
        if (reason := _reason(inputs, tx, error)) is None:
            raise
        name = getattr(node.target, "__name__", node.target)
        match = re.search(r"got \w+\((.*)", str(error))  # PyTorch's own sentence
        words = (match[1] if match else str(error).split("\n")[0]).strip(")'\"").rstrip(".')\"")
        why = f"{name} {reason}" if reason == BY_JVP else f"PyTorch says: {words}. {reason}"
        unimplemented(gb_type="What an op makes cannot be told", context=str(error), explanation=why, hints=[])


def _end_guards(error: BaseException | None) -> None:
    """End the guards in frames that an error and its causes hold: one that ends later sets the dispatcher's keys back.

    Dynamo's message shows the op's arguments, which PyTorch cannot do within ``torch.func.jvp``.
    """
    with _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()):
        while error is not None:
            for frame, _ in walk_tb(error.__traceback__):
                if frame.f_code is _str.__code__:
                    frame.clear()
            error = error.__context__  # which a cause is, too


def _reason(inputs: list[Any], tx: Any, error: Exception) -> str | None:
    """The reason why a kernel may not have this error; None if it has it too."""
    if any(level.key() == TransformType.Jvp for level in retrieve_all_functorch_interpreters()):
        return BY_JVP
    tracer, root = tx.output.current_tracer, tx.output.root_tracer
    within = tracer.parent is not None  # a function of autograd, or a graph within the step's
    changes = [n.target for graph in (tracer.graph, root.graph) for n in graph.nodes if n.target in _CHANGE_SHAPES]
    if changes and (isinstance(error, IndexError) or within):
        return f"Before, {changes[0]} changed the shape of a tensor in place."
    described = [n.meta.get("example_value") for n in inputs]
    if any(isinstance(x, torch.Tensor) and any(type(n) is int and n == 0 for n in x.shape) for x in described):
        return "It is given a tensor of no elements."
    while within and tx is not None and tx.f_code.co_name != "backward":
        tx = tx.parent
    return "Plain PyTorch runs a backward only where the result of its function is used." if within and tx else None


def _note_compiled(plain: Handler, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Call a function; mark attention inside one compiled by the user, which is one kernel in plain PyTorch.

    Dynamo follows such a function as if it was not compiled. The mark is in the call's options, which its backward has,
    too.
    """
    source = self.source
    if hasattr(self, "wrapper_obj"):
        compiled = self.wrapper_obj
    elif isinstance(source, AttrSource) and source.member == "_torchdynamo_inline":
        # PyTorch 2.11 takes a compiled function that a module holds for the plain one; where it was found tells.
        scopes = {"L": tx.output.local_scope, "G": tx.output.global_scope}
        compiled = source.base.get_value(scopes, {}, weakref.WeakKeyDictionary())
    else:
        return plain(self, tx, args, kwargs)
    attention: Any = {"op": "call_function", "target": torch.ops.higher_order.flex_attention}
    before = set(tx.output.graph.find_nodes(**attention))
    result = plain(self, tx, args, kwargs)
    if (config := _config(compiled)) is not None:
        usual = _config(torch.compile(_config)) or {}
        changed = {name: value for name, value in config.items() if usual.get(name) != value}
        position = OPTIONS["flex_attention"]
        for node in tx.output.graph.find_nodes(**attention):
            if node not in before:
                options: Any = node.args[position]
                node.update_arg(position, {**options, COMPILED: changed})
    return result


def _config(function: Any) -> dict[str, Any] | None:
    """The settings of Inductor; other compilers have none."""
    ask = getattr(function, "get_compiler_config", None)
    return None if ask is None else ask()


put_in_place("guards of parameters", _guard_each_parameter)
put_in_place("layouts of gradients", _tell_of_layouts)
follow("TensorVariable.call_method", _convert)
follow("get_fake_value", _describe)
follow("WrapperUserFunctionVariable.call_function", _note_compiled)
follow("UserFunctionVariable.call_function", _note_compiled)
follow_function(torch.backends.cudnn.flags, _pass_over_flags)
follow_skipped(set_checkpoint_early_stop, _pass_over_early_stop)
for dropout in (torch.dropout, torch.nn.functional.dropout):
    follow_function(dropout, _drop_of_nothing)
for whole in (torch.addcdiv, _foreach_lerp_):
    follow_function(whole, _leave_whole)
for method in ("add_", "addcmul_", "addcdiv_"):
    follow_method(method, _leave_whole)
