"""`flex_attention` compiled by the user: one kernel by Inductor, the op alone, as plain PyTorch runs it.

Called plainly, `flex_attention` is dense ops in plain PyTorch, with other bits: there it stays so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.capture.device import main_device
from checkmate.capture.higher_order.bodies import body_of, text_of
from checkmate.capture.nodes import tensors
from checkmate.capture.patches.small_changes import COMPILED, OPTIONS
from checkmate.capture.provenance import where
from checkmate.errors import Unsupported
from checkmate.memory import CPU
from checkmate.torch_internals import capturing  # takes a second to import: looked up when needed
from checkmate.torch_internals.capturing import FakeTensorMode, tracing
from checkmate.torch_internals.running import (
    HigherOrderOperator,
    outside_tracing,
    sdpa_dense,
    sdpa_dense_backward,
    tree_flatten,
    tree_unflatten,
    triton_utils,
)

_kernels: dict[str, Callable[..., Any]] = {}  # by what they compute, as compiled in this process
_FAILS = (RuntimeError, AssertionError)  # Inductor's errors: its own are RuntimeErrors
_INSTALL = {
    "cpu": "It takes g++ or clang++ (the environment variable CXX names another) and the header files of Python "
    "(package python3-dev).",
    "cuda": "It takes Triton (pip install triton) and a GPU of compute capability 7.0 or more.",
}


@dataclass(frozen=True, eq=False)
class Fused:
    """A call of an op's compiled kernel, with the op's arguments. Unread results are None."""

    op: HigherOrderOperator
    key: str

    __name__ = "fused_attention"

    def __call__(self, *args: Any) -> Any:
        """Run the kernel."""
        return _kernels[self.key](*tensors(args))

    def __str__(self) -> str:
        return str(self.op)


def is_compiled(node: fx.Node) -> bool:
    """Tell whether an op is an attention that the user compiled."""
    position = OPTIONS.get(str(node.target))
    return position is not None and COMPILED in node.args[position]  # type: ignore[operator]


def compile_attention(graph: fx.Graph) -> None:
    """Replace each attention that the user compiled by a call of its kernel; refuse it if there is no compiler."""

    def describe(arg: Any) -> Any:
        if isinstance(arg, fx.Node) and (body := body_of(arg)) is not None:
            return text_of(body, describe)
        value = arg.meta["val"] if isinstance(arg, fx.Node) else arg
        if isinstance(value, Tensor):
            return f"{value.dtype}{[*value.shape]}{[*value.stride()]}{value.device}"
        return value

    for node in filter(is_compiled, [*graph.nodes]):
        read = {user.args[1] for user in node.users if user.users}
        node.meta["val"] = tuple(val if i in read else None for i, val in enumerate(node.meta["val"]))
        results = [describe(val) for val in tree_flatten(node.meta["val"])[0]]
        key = f"{node.target} {fx.node.map_aggregate(node.args, describe)!r} {results}"
        if key not in _kernels:
            _kernels[key] = _compiled(node)
        node.target = Fused(node.target, key)


def dense_ops(node: fx.Node) -> fx.GraphModule | None:
    """The dense ops of an attention that the user did not compile; None for other ops and for the kernel."""
    dense = {"flex_attention": sdpa_dense, "flex_attention_backward": sdpa_dense_backward}.get(str(node.target))
    if dense is None or is_compiled(node):
        return None
    # Trace the op as Python has it, on fake tensors on the CPU, as there may be no other device here.
    with outside_tracing(), tracing(None), torch.no_grad():
        inputs: list[Tensor] = []

        def make(arg: Any) -> Any:
            if not isinstance(arg, fx.Node):
                return arg
            if (body := body_of(arg)) is not None:
                return _on_cpu(body)
            val: Tensor = arg.meta["val"]
            inputs.append(torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=CPU))
            return inputs[-1]

        with FakeTensorMode():
            args = fx.node.map_aggregate(node.args, make)
            leaves, spec = tree_flatten(args)

            def run(*tensors: Tensor) -> Any:
                values = iter(tensors)
                return dense(*tree_unflatten([next(values) if isinstance(x, Tensor) else x for x in leaves], spec))

            return make_fx(run)(*inputs)


def _on_cpu(body: nn.Module) -> nn.Module:
    """A copy of a graph that makes its tensors on the CPU."""
    if not isinstance(body, fx.GraphModule):
        return body
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda arg: CPU if isinstance(arg, torch.device) else arg
        )
    return fx.GraphModule(body, graph)


def _compiled(node: fx.Node) -> Callable[..., Any]:
    # Have Inductor compile a module of the op alone.
    device = main_device(tensors(node.meta["val"]))
    options: Any = node.args[OPTIONS[str(node.target)]]
    try:
        if device.type == "cpu":
            capturing.get_cpp_compiler()
        elif not triton_utils.has_triton():
            raise RuntimeError(f"there is no Triton for {device}.")
        with outside_tracing(), tracing(None), torch.no_grad():
            alone, inputs = _alone(node)
            settings = options[COMPILED] | {"triton.cudagraphs": False}  # whose memory would be in no plan
            run = capturing.compile_fx(alone, inputs, config_patches=settings)
    except _FAILS as error:
        lines = str(error).strip().splitlines()
        raise Unsupported(
            f"{where(node)}: {node.target} is called by a function of torch.compile. Inductor is to compile it on "
            f"{device}, as in plain PyTorch, and that does not work. {_INSTALL.get(device.type, '')} Without "
            "torch.compile it needs no compiler, but memory for all scores.\n"
            f"{type(error).__name__}: {lines[0] if lines else ''}"
        ) from error
    # Its results are those that are read; None stands for the others.
    leaves, spec = tree_flatten(node.meta["val"])

    def call(*args: Tensor) -> Any:
        with torch.no_grad():
            results = iter(run(*args))
        return tree_unflatten([None if leaf is None else next(results) for leaf in leaves], spec)

    return call


def _alone(node: fx.Node) -> tuple[fx.GraphModule, list[Tensor]]:
    """A module that runs an op alone on tensors and gives the results that are read, with fake tensors to trace it."""
    # Tensors become inputs, and graphs parts of the module.
    root, graph, inputs = nn.Module(), fx.Graph(), list[Tensor]()

    def copy(arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        if (body := body_of(arg)) is not None:
            name = f"body{len(root._modules)}"
            root.add_module(name, body)
            return graph.get_attr(name)
        val: Tensor = arg.meta["val"]
        with mode:
            inputs.append(torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device))
        return graph.placeholder(f"given{len(inputs)}")

    mode = FakeTensorMode()
    args: list[Any] = [fx.node.map_aggregate(arg, copy) for arg in node.args]
    # The options of the compilation are none of the op's.
    position = OPTIONS[str(node.target)]
    args[position] = {name: value for name, value in args[position].items() if name != COMPILED}
    result = graph.call_function(node.target, tuple(args))  # type: ignore[arg-type]
    graph.output(tuple(_parts(graph, result, node.meta["val"])))
    return fx.GraphModule(root, graph), inputs


def _parts(graph: fx.Graph, result: fx.Node, val: Any) -> Iterator[fx.Node]:
    """The tensors of a result, in order."""
    if isinstance(val, Tensor):
        yield result
    elif isinstance(val, (tuple, list)):
        for i, part in enumerate(val):
            if tensors(part):
                yield from _parts(graph, graph.call_function(operator.getitem, (result, i)), part)
