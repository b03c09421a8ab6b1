"""Where an op of a captured step may write over an argument: where nothing else could still see what it overwrites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.nodes import leaf_nodes
from checkmate.capture.ways.table import positions


class Candidate(NamedTuple):
    """Op ``op`` could make value ``makes`` over its input ``over``, which is the argument at ``position``."""

    op: int
    makes: int
    over: int
    position: int


def candidates(joint: Joint) -> Iterator[Candidate]:
    """What the ops of a step may write over, as far as shapes, layouts and aliases tell; bits are another question."""
    shown = {v for n in leaf_nodes((*joint.forward_outputs, *joint.backward_outputs)) for v in joint.value_of[n]}
    for k, node in enumerate(joint.nodes):
        for i in () if node is None else positions(node):
            assert node is not None
            argument = node.args[i]
            assert isinstance(argument, fx.Node)
            over, makes = joint.value_of[argument], joint.graph.ops[k].outputs
            if len(over) == 1 and makes and reason_against(joint, node, argument, over[0], shown) is None:
                yield Candidate(k, makes[0], over[0], i)


def reason_against(joint: Joint, node: fx.Node, argument: fx.Node, v: int, shown: set[int]) -> str | None:
    """Why a node must not write over an argument that shows value v; None: it may, once nothing else needs v.

    Args:
        shown: values that the step hands out, or views of them.
    """
    producer = joint.graph.values[v].producer
    if producer is None or joint.nodes[producer] is None:
        return "it belongs to the caller"
    if v in joint.graph.outputs or v in shown:
        return "the step hands it out"
    others = [n for n in node.all_input_nodes if n is not argument]
    if any(v in joint.value_of[n] for n in others if n in joint.value_of):
        return "another argument shows it too"
    if sum(n is argument for n in leaf_nodes([*node.args, *node.kwargs.values()])) > 1:
        return "it is an argument twice"
    return None
