"""Table of higher-order ops, which run graphs or kernels: which of them may run again, and why.

Such an op has no schema that says what it does, so `AGAIN` says it by name, each with the argument that another run
leaves the same bits and changes nothing else. What its graphs do is looked up in them. An op that is not named runs
once. Kernels of Triton's are looked into themselves (`checkmate.capture.higher_order.triton_kernels`).

Some never come here: AOTAutograd traces through checkpoints and functions of autograd, whose ops are ops of the step,
and the regions of ``torch.compiler.nested_compile_region`` are put in place of their calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from checkmate.capture.device import is_unordered
from checkmate.capture.higher_order.bodies import bodies
from checkmate.capture.higher_order.fused_attention import Fused
from checkmate.capture.higher_order.triton_kernels import WRAPPER, Launch, why_once
from checkmate.capture.nodes import is_collective, is_mutating, is_random, target_name
from checkmate.capture.random_draws import draws
from checkmate.torch_internals.capturing import is_with_effects
from checkmate.torch_internals.running import HigherOrderOperator, OpOverload

_ROWS = "runs its graph once for each row; the order of rows is that of the tensor"
_WRITES = "calls an op of somebody's on copies of what that writes to: an op as any other"
AGAIN = {  # by name: why another run leaves the same bits, where the graphs that it is given do
    "cond": "runs one of its graphs, which one says a number that it is given",
    "map_impl": _ROWS,
    "scan": f"{_ROWS}, and what it carries begins with a tensor that it is given",
    "associative_scan": "combines rows in an order that their number alone gives",
    "while_loop": "how often it runs its graph depends on tensors that it is given",
    "auto_functionalized": _WRITES,
    "auto_functionalized_v2": _WRITES,
    "flex_attention": "dense products and a softmax, or one kernel without atomic operations",
    "flex_attention_backward": "as the forward: each block of a gradient is summed by one program, in a fixed order",
}
_MAY_NOT_END = {"while_loop"}  # on made-up numbers


def runs_once(node: fx.Node) -> str | None:
    """The reason why a higher-order op must run exactly once; None if it may run again, or is another op."""
    if isinstance(node.target, Launch):
        return node.target.once
    op = node.target.op if isinstance(node.target, Fused) else node.target
    if not isinstance(op, HigherOrderOperator):
        return None
    if node.target is WRAPPER:
        return why_once(node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    if op.name() not in AGAIN:
        return f"runs {op.name()}, which may leave other bits another time"
    if AGAIN[op.name()] is _WRITES:
        written = node.args[0]
        if not isinstance(written, OpOverload):
            return f"runs {written}, which may leave other bits another time"
        return f"draws random numbers, by {written}" if draws(written, (), {}) else None
    graphs: list[Any] = bodies(node) or [None]
    return next((f"runs a graph that {reason}" for body in graphs for reason in _of_body(body)), None)


def runs_alone(node: fx.Node) -> bool:
    """Tell whether a higher-order op can run on made-up numbers, for its costs."""
    return node.target is not WRAPPER and runs_once(node) is None and node.target.name() not in _MAY_NOT_END  # type: ignore[union-attr]


def _of_body(body: Any) -> Iterator[str]:
    """The reasons why a graph may not run again."""
    if not isinstance(body, fx.GraphModule):
        yield "cannot be looked into"
        return
    for node in body.graph.nodes:
        if node.op == "call_module" or node.op == "call_method":
            yield f"calls {node.target}, of which nothing is known"
        elif node.op == "call_function":
            if is_mutating(node):
                yield f"writes over a tensor, by {target_name(node)}"
            elif is_with_effects(node):
                yield "has a side effect"
            elif is_random(node):
                yield f"draws random numbers, by {target_name(node)}"
            elif is_collective(node):
                yield "exchanges data with other ranks"
            elif is_unordered(node):
                yield f"adds in no fixed order on a GPU, by {target_name(node)}"
            elif isinstance(node.target, HigherOrderOperator):
                yield from filter(None, [runs_once(node)])
