"""Make a function of a generated module: ops are looked up once; inputs come in one list that can be cleared.

On the main path, 16 of 16: see docs/idea.md.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import isfinite
from traceback import walk_tb
from types import CodeType, FunctionType, MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.fx as fx
from torch.fx.graph import CodeGen

from checkmate.capture.nodes import PlannedOp, target_name
from checkmate.capture.provenance import is_users, where
from checkmate.codegen.transfers import ending_calls
from checkmate.errors import CheckmateError
from checkmate.torch_internals import running
from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten
Boxed = Callable[[list[Any]], Any]  # of inputs in one list
FILE = "<checkmate>"  # of the code that runs
ANEW = "anew"  # in a module's meta data: writes it again, so that its function need not keep it
_CODES = WeakValueDictionary[bytes, CodeType]()  # by the text

# Ops that PyTorch's generated Python bindings have under these names: the same ops, read two to five times as fast.
_PRIVATE = (
    (aten._adaptive_avg_pool2d.default, running._adaptive_avg_pool2d),
    (aten._foreach_copy_.default, running._foreach_copy_),
    (aten._log_softmax.default, running._log_softmax),
    (aten._log_softmax_backward_data.default, running._log_softmax_backward_data),
    (aten._softmax.default, running._softmax),
    (aten._softmax_backward_data.default, running._softmax_backward_data),
)
_PUBLIC: tuple[tuple[Any, str], ...] = (
    (torch, "add.Tensor div.Tensor mul.Tensor sub.Tensor where.self mean.dim squeeze.dim sum.dim_IntList"),
    (torch, "addmm.default bmm.default cat.default clone.default convolution.default embedding.default mm.default"),
    (torch, "native_layer_norm.default neg.default permute.default relu.default sigmoid.default t.default"),
    (torch, "tanh.default unsqueeze.default select.int transpose.int"),
    (torch.Tensor, "expand.default view.default"),
    (running._nn, "gelu.default hardtanh.default max_pool2d_with_indices.default silu.default"),
)
_BINDINGS: dict[Any, Callable[..., Any]] = dict(_PRIVATE) | {
    getattr(getattr(aten, name), overload): getattr(home, name)
    for home, ops in _PUBLIC
    for name, overload in (op.split(".") for op in ops.split())
}


class ListCodeGen(CodeGen):
    """Code that takes one list and clears it, so that the caller holds nothing that the code frees."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *args: Any, **kwargs: Any) -> str:
        """Write the head of the function."""
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = inputs" if names else ""
        return f"def forward(self, inputs){maybe_return_annotation}:{unpack}\n    inputs.clear()"


def takes_one_list(run: Boxed) -> Boxed:
    """Mark a function for AOTAutograd: it takes its inputs in one list, which it may clear."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class Detached:
    """A view as an argument to write over: whoever gets what is made could not write to it as a view."""

    node: fx.Node


Calls = Mapping[fx.Node, tuple[Any, tuple[Any, ...], dict[str, Any]]]  # target, arguments, and keywords


def boxed(module: fx.GraphModule, calls: Calls = MappingProxyType({})) -> Boxed:
    """The function of a module that takes and clears one list, marked for AOTAutograd.

    Its code has a line for each node, as that of `torch.fx` has, with each op under a name of its own: to look up
    ``torch.ops.aten.mm.default`` takes a third to a half of what a call costs on small tensors. Sizes have names, too:
    modules that differ in these alone share their code.

    Args:
        calls: for some nodes, what they call instead.
    """
    # Write a line for each node, which frees what no later one reads.
    graph, code = module.graph, _Code(module)
    last: dict[fx.Node, list[str]] = {}
    read = set[fx.Node]()
    for node in reversed(graph.nodes):
        for a in node.all_input_nodes:
            if a not in read:
                read.add(a)
                last.setdefault(node, []).append(a.name)
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    lines = ["def forward(inputs):", *([f"    {', '.join(inputs)}, = inputs"] if inputs else [])]
    lines += ["    inputs.clear()", "    try:"]
    head = len(lines)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"        return {code.text(node.args[0])}")
            break
        own = node.target, node.args, node.kwargs
        call = code.attribute(node) if node.op == "get_attr" else code.call(*calls.get(node, own))
        gone = [*last.get(node, ()), *([] if node.users else [node.name])]
        lines.append(f"        {node.name} = {call}" + (f"; {' = '.join(gone)} = None" if gone else ""))

    # Make the function, which says where an op that fails comes from. It is one function: each call of another takes
    # longer than many an op.
    say_where = code.name_of(partial(_say_where, module=when_asked(module), head=head))
    lines += ["    except Exception as error:", f"        {say_where}(error)", "        raise"]
    return takes_one_list(ending_calls(graph, _function("\n".join(lines), code.bound)))


def when_asked(module: fx.GraphModule) -> Callable[[], fx.GraphModule]:
    """A function that gives a module, and does not keep it where it can be written again."""
    anew, reference = module.meta.get(ANEW), weakref.ref(module)
    return (lambda: module) if anew is None else (lambda: reference() or anew())


def _function(text: str, bound: dict[str, Any]) -> Boxed:
    """The function ``forward`` of a text; its code is shared by all that have this text."""
    key = sha256(text.encode()).digest()
    code = _CODES.get(key)
    if code is None:
        namespace: dict[str, Any] = {}
        exec(compile(text, FILE, "exec"), namespace)
        code = _CODES[key] = namespace["forward"].__code__
    return FunctionType(code, bound)


class _Code:
    """Expressions for the calls of a module's nodes, and what their names are bound to."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.bound: dict[str, Any] = {}
        self._module = module
        self._names = dict[Any, str]()  # of what is bound, by its id, or the number that it is
        self._prefix = "_"  # of no node's name
        while any(node.name.startswith(self._prefix) for node in module.graph.nodes):
            self._prefix += "_"

    def name_of(self, value: Any) -> str:
        """The name that a value is bound to."""
        key = (value,) if type(value) is int else id(value)
        if key not in self._names:
            name = self._names[key] = sys.intern(f"{self._prefix}{len(self.bound)}")  # the modules of all plans have it
            self.bound[name] = value
        return self._names[key]

    def attribute(self, node: fx.Node) -> str:
        """An attribute of the module."""
        return self.name_of(operator.attrgetter(str(node.target))(self._module))

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """A call of a function; of an op by the quickest way to it."""
        arguments = [self.text(arg) for arg in args]
        if target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if isinstance(target, OpOverload):
            target = _BINDINGS.get(target, target._op)
        elif isinstance(target, PlannedOp):
            target = target.run
        arguments += [f"{name}={self.text(arg)}" for name, arg in kwargs.items()]
        return f"{self.name_of(target)}({', '.join(arguments)})"

    def text(self, arg: Any) -> str:
        """An argument."""
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, list):
            return f"[{', '.join(map(self.text, arg))}]"
        if isinstance(arg, tuple):
            kind = self.name_of(type(arg)) if hasattr(arg, "_fields") else ""
            return f"{kind}({''.join(f'{self.text(item)}, ' for item in arg)})"
        if isinstance(arg, dict):
            return f"{{{', '.join(f'{key!r}: {self.text(value)}' for key, value in arg.items())}}}"
        if isinstance(arg, slice):
            return f"slice({', '.join(map(self.text, (arg.start, arg.stop, arg.step)))})"
        if isinstance(arg, Detached):
            return self.call(aten.detach.default, (arg.node,), {})
        if type(arg) is int:
            return repr(arg) if -2 < arg < 2 else self.name_of(arg)
        is_literal = arg is None or type(arg) in (bool, str) or (type(arg) is float and isfinite(arg))
        return repr(arg) if is_literal else self.name_of(arg)


def _say_where(error: Exception, module: Callable[[], fx.GraphModule], head: int) -> None:
    """Add the line of the user's code to the error message of an op; an error of checkmate's has said where.

    ``head``: lines before that of the first op.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    at = next((i for i, (name, _) in enumerate(frames) if name == FILE), None)
    if isinstance(error, CheckmateError) or at is None or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    nodes = [node for node in module().graph.nodes if node.op not in ("placeholder", "output")]
    if not head < frames[at][1] <= head + len(nodes):
        return
    node = nodes[frames[at][1] - head - 1]
    phase = "backward" if node.meta.get("autograd_backward") else "forward"
    error.args = (f"{error.args[0]}\n  in {target_name(node)} of the {phase}: {where(node)}",)
    error.from_kernel = not any(is_users(name) for name, _ in frames[at + 1 :])  # type: ignore[attr-defined]
