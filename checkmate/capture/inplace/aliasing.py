"""Tell which arguments an op of a captured step may write over, because nothing else can see the change.

The plan sees to it, run by run, that the argument's value is not needed any more. Here is what it cannot see: who holds
a tensor without being an op of the step, and which bytes are not the value's alone. The answer becomes ways of ops
(`checkmate.core.inplace`), once, when costs are given; all else reads these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from checkmate.capture.inplace.rules import first_result, is_whole, positions, positions_to_try, written_of
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import PlannedOp, ancestors, leaf_nodes
from checkmate.errors import SolverError
from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten


class Reason(Enum):
    """A reason why an op must not write over an argument in any plan."""

    CALLERS = "it belongs to the caller"  # a parameter, a buffer, an input
    HELD = "autograd or Dynamo handed it in, and holds it"
    HANDED_OUT = "the step hands it out, or a view of it"
    KEPT = "an op that is not PyTorch's own may keep it, or other ranks still send it"
    PART = "it shows a part of its memory, or repeats it"
    OTHER_SIZE = "its memory is of another size than the result's"
    TWICE = "it is an argument twice"
    OTHER_VIEW = "another argument shows it too"
    SEVERAL = "several values are behind it, or none"
    ZEROS = "it may be zeros that have no memory"  # as derivatives in forward mode are


class Candidate(NamedTuple):
    """Op ``op`` could make value ``makes`` over its input ``over``, which is the argument at ``position``."""

    op: int
    makes: int
    over: int
    position: int
    slower: bool  # than the plain op


def candidates(joint: Joint) -> Iterator[Candidate]:
    """The arguments that ops may write over, by shapes, layouts and aliases; bits are tried elsewhere."""
    seen = seen_by_others(joint)
    for k, node in [(k, node) for k, node in enumerate(joint.nodes) if node is not None]:
        for i in positions_to_try(node):
            argument, written = node.args[i], written_of(node.target)
            assert isinstance(argument, fx.Node)
            assert written is not None
            if reason_against(joint, k, argument, seen) is None:
                (makes, *_), (over,) = joint.graph.ops[k].outputs, joint.value_of[argument]
                yield Candidate(k, makes, over, i, written.slower)


def position_of(joint: Joint, k: int, over: int) -> int:
    """The position of the argument by which op k writes over a value; `SolverError` if there is no such argument."""
    node: Any = joint.nodes[k]
    for i in positions(node):
        if joint.value_of[node.args[i]] == (over,):
            return i
    raise SolverError(f"The plan has {node.name} write over what it must not.")


def seen_by_others(joint: Joint) -> dict[int, Reason]:
    """Values that the caller sees, or that stay to the end of the step, or that may be held by others than its ops."""
    ops = zip(joint.graph.ops, joint.nodes, strict=True)
    held = [v for op, n in ops if n is not None and _may_keep(n) for v in (*op.inputs, *op.outputs)]
    outputs = leaf_nodes((*joint.step.forward_outputs, *joint.step.backward_outputs))
    shown = {v for n in outputs for v in joint.value_of[n]}.union(joint.graph.outputs)
    return dict.fromkeys(shown, Reason.HANDED_OUT) | dict.fromkeys(held, Reason.KEPT)


def _may_keep(node: fx.Node) -> bool:
    """Tell whether an op may hold what it reads or makes: it is not PyTorch's or ours, or is a collective."""
    called = [node.target, *(a for a in node.args if isinstance(a, OpOverload))]  # which ours may call
    return any(
        op.namespace not in ("aten", "prims", "checkmate")
        if isinstance(op, (OpOverload, PlannedOp))
        else getattr(op, "__module__", "").partition(".")[0] != "checkmate"
        for op in called
    )


def reason_against(joint: Joint, k: int, argument: fx.Node, seen: Mapping[int, Reason]) -> Reason | None:
    """The reason why op k must not write its first result over an argument; None if it may, once the value dies.

    ``seen``: the values that are `seen_by_others`.
    """
    # One value is behind it, which an op of the step has made, and nobody else sees.
    node, outputs = joint.nodes[k], joint.graph.ops[k].outputs
    assert node is not None
    result, values = first_result(node), joint.value_of[argument]
    if len(values) != 1 or result is None or not outputs:
        return Reason.SEVERAL
    (v,), values_of = values, joint.graph.values
    producer = values_of[v].producer
    if producer is None:
        return Reason.CALLERS
    if joint.nodes[producer] is None:
        return Reason.HELD
    if v in seen:
        return seen[v]
    if seen.get(outputs[0]) is Reason.KEPT:
        return Reason.KEPT
    # Its bytes are the value's, and as many as the result's.
    if not is_whole(argument):
        return Reason.PART
    if values_of[v].size_bytes != values_of[outputs[0]].size_bytes:
        return Reason.OTHER_SIZE
    # No other argument may show the value, nor this one twice.
    read: list[fx.Node] = []  # with repetitions
    fx.node.map_arg((node.args, node.kwargs), read.append)
    read = [n for n in read if v in joint.value_of.get(n, ())]
    if any(n is not argument for n in read):
        return Reason.OTHER_VIEW
    if len(read) > 1:
        return Reason.TWICE
    # ATen makes zeros without memory of others, in sums, products, ``dot`` and views.
    zeros = node.graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default)
    return Reason.ZEROS if zeros and not ancestors([argument]).isdisjoint(zeros) else None
