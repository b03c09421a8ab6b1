"""Make a function of a generated module: ops are looked up once; inputs come in one list that can be cleared.

On the main path, 16 of 16: see docs/idea.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.fx as fx
from torch.fx.graph import CodeGen

from checkmate.capture.nodes import PlannedOp, target_name
from checkmate.capture.provenance import is_users, where
from checkmate.codegen.transfers import ending_calls
from checkmate.errors import CheckmateError
from checkmate.torch_internals import kernels

aten = torch.ops.aten
Run = Callable[[list[Any]], Any]  # of inputs in one list
_SAY_WHERE = "_say_where"
_EXCEPT = ("    except Exception as error:", f"        {_SAY_WHERE}(error)", "        raise")
_OP_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")

# Ops that PyTorch's generated Python bindings have under these names: the same ops, read two to five times as fast.
_PRIVATE = (
    (aten._adaptive_avg_pool2d.default, kernels._adaptive_avg_pool2d),
    (aten._foreach_copy_.default, kernels._foreach_copy_),
    (aten._log_softmax.default, kernels._log_softmax),
    (aten._log_softmax_backward_data.default, kernels._log_softmax_backward_data),
    (aten._softmax.default, kernels._softmax),
    (aten._softmax_backward_data.default, kernels._softmax_backward_data),
)
_PUBLIC: tuple[tuple[Any, str], ...] = (
    (torch, "add.Tensor div.Tensor mul.Tensor sub.Tensor where.self mean.dim squeeze.dim sum.dim_IntList"),
    (torch, "addmm.default bmm.default cat.default clone.default convolution.default embedding.default mm.default"),
    (torch, "native_layer_norm.default neg.default permute.default relu.default sigmoid.default t.default"),
    (torch, "tanh.default unsqueeze.default select.int transpose.int"),
    (torch.Tensor, "expand.default view.default"),
    (kernels._nn, "gelu.default hardtanh.default max_pool2d_with_indices.default silu.default"),
)
_BINDINGS: dict[Any, Callable[..., Any]] = dict(_PRIVATE) | {
    getattr(getattr(aten, name), overload): getattr(home, name)
    for home, ops in _PUBLIC
    for name, overload in (op.split(".") for op in ops.split())
}


class Boxed(CodeGen):
    """Code that takes one list and clears it, so that the caller holds nothing that the code frees."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *args: Any, **kwargs: Any) -> str:
        """Write the head of the function."""
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = inputs" if names else ""
        return f"def forward(self, inputs){maybe_return_annotation}:{unpack}\n    inputs.clear()"


def takes_one_list(run: Run) -> Run:
    """Mark a function for AOTAutograd: it takes its inputs in one list, which it may clear."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def boxed(module: fx.GraphModule) -> Run:
    """The function of a module that takes and clears one list, marked for AOTAutograd.

    It runs the module's code, with one change: where that looks up ``torch.ops.aten.mm.default`` at every call, this
    has the op itself. On small tensors this takes a third to a half off what a call costs.
    """
    # Write the code, with each op under a short name of its own.
    module.graph.set_codegen(Boxed())
    code = module.graph.python_code("self")
    bound = {name: what.run if isinstance(what, PlannedOp) else what for name, what in code.globals.items()}

    def bind(match: re.Match[str]) -> str:
        namespace, name, overload = match.groups()
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        short = f"_{namespace}_{name}_{overload}"
        bound[short] = _BINDINGS.get(op, op._op)
        return f"{short}("

    # Make the function, which says where an op that fails comes from. It is one function: each call of another takes
    # longer than many an op.
    file = f"<checkmate {id(module):x}>"
    head, body = _OP_CALL.sub(bind, code.src).split(":\n", 1)
    bound[_SAY_WHERE] = partial(_say_where, graph=module.graph, file=file)
    lines = [f"{head}:", "    try:", *(f"    {line}" for line in body.splitlines()), *_EXCEPT]
    exec(compile("\n".join(lines), file, "exec"), bound)
    return takes_one_list(ending_calls(module.graph, partial(bound["forward"], module)))


def _say_where(error: Exception, graph: fx.Graph, file: str) -> None:
    """Add the line of the user's code to the error message of an op; an error of checkmate's has said where."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    at = next((i for i, (name, _) in enumerate(frames) if name == file), None)
    if isinstance(error, CheckmateError) or at is None or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    line = graph.python_code("self").src.splitlines()[frames[at][1] - 2]  # what runs has a `try` before it
    made = re.match(r"\s*(\w+)(?::.*?)? = ", line)
    node = nodes.get(made.group(1)) if made else None
    if node is None:
        return
    phase = "backward" if node.meta.get("autograd_backward") else "forward"
    error.args = (f"{error.args[0]}\n  in {target_name(node)} of the {phase}: {where(node)}",)
    error.from_kernel = not any(is_users(name) for name, _ in frames[at + 1 :])  # type: ignore[attr-defined]
