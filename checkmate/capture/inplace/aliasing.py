"""Find the arguments that ops of a captured step may write over, because nothing else can see the change.

That the argument's value is not needed any more is for the plan to see to, run by run. What it cannot see is here: who
holds a tensor without being an op of the step, and which bytes are not the value's alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import NamedTuple

import torch
import torch.fx as fx

from checkmate.capture.inplace.rules import first_result, is_whole, positions_to_try
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import ancestors, leaf_nodes

aten = torch.ops.aten


class Reason(Enum):
    """A reason why an op must not write over an argument in any plan."""

    CALLERS = "it belongs to the caller"  # a parameter, a buffer, an input
    HELD = "autograd or Dynamo handed it in, and holds it"
    HANDED_OUT = "the step hands it out, or a view of it"
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


def candidates(joint: Joint) -> Iterator[Candidate]:
    """The arguments that ops may write over, by shapes, layouts and aliases; bits are tried elsewhere."""
    shown = handed_out(joint)
    for k, node in [(k, node) for k, node in enumerate(joint.nodes) if node is not None]:
        for i in positions_to_try(node):
            argument = node.args[i]
            assert isinstance(argument, fx.Node)
            if reason_against(joint, k, argument, shown) is None:
                yield Candidate(k, joint.graph.ops[k].outputs[0], joint.value_of[argument][0], i)


def handed_out(joint: Joint) -> set[int]:
    """Values that the caller sees, or that stay to the end of the step."""
    outputs = leaf_nodes((*joint.step.forward_outputs, *joint.step.backward_outputs))
    return {v for n in outputs for v in joint.value_of[n]}.union(joint.graph.outputs)


def reason_against(joint: Joint, k: int, argument: fx.Node, shown: Collection[int]) -> Reason | None:
    """The reason why op k must not write its first result over an argument; None if it may, once the value dies.

    ``shown``: the values that are `handed_out`.
    """
    # One value is behind it, which an op of the step has made, and nobody else sees.
    node, outputs = joint.nodes[k], joint.graph.ops[k].outputs
    assert node is not None
    made, values = first_result(node), joint.value_of[argument]
    if len(values) != 1 or made is None or not outputs:
        return Reason.SEVERAL
    (v,), values_of = values, joint.graph.values
    producer = values_of[v].producer
    if producer is None:
        return Reason.CALLERS
    if joint.nodes[producer] is None:
        return Reason.HELD
    if v in shown:
        return Reason.HANDED_OUT
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
