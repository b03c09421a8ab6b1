"""From the costs of the ops that could be measured to the profile of a step: the others are estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import torch.fx as fx

from checkmate.capture.device import BLOCK_BYTES, as_allocated
from checkmate.capture.joint import Joint
from checkmate.capture.ways.legal import candidates
from checkmate.capture.ways.table import written_of
from checkmate.core.problem import Profile
from checkmate.core.ways import Way
from checkmate.errors import Unsupported
from checkmate.profiling.cost_table import OpCost
from checkmate.profiling.one_op import device_of_op
from checkmate.profiling.roofline import DEVICES, moved_bytes_of, roofline_seconds

LIKE = {"cpu": "laptop", "cuda": "a100"}  # the device that ops are estimated for, by kind of device; then scaled


def fill(joint: Joint, costs: Sequence[OpCost | None], source: str) -> Profile:
    """The profile of a step.

    An op without a cost takes the seconds of its roofline estimate, times the median ratio of measured to estimated
    seconds of the others; its workspace is taken to be as large as all that it touches, and it writes over nothing.

    Args:
        joint: the step.
        costs: of each op, by position; None: not known. What autograd does has none and costs nothing.
        source: where the costs come from; how many are estimated is added to it.
    """
    graph = joint.graph
    seconds, workspace = np.zeros(len(costs)), np.zeros(len(costs), dtype=np.int64)
    nodes = {k: node for k, node in enumerate(joint.nodes) if node is not None}
    estimated = tuple(k for k in nodes if costs[k] is None)
    scale = _scale(nodes, costs) if estimated else 1.0
    for k, node in nodes.items():
        op, cost = graph.ops[k], costs[k]
        block = BLOCK_BYTES.get(device_of_op(node).type, 1)
        outputs = sum(as_allocated(graph.values[v].size_bytes, block) for v in op.outputs)
        if cost is None:
            inputs = sum(graph.values[v].size_bytes for v in op.inputs)
            seconds[k], workspace[k] = scale * _estimate(node), inputs + outputs
        else:
            seconds[k], workspace[k] = cost.seconds, max(0, cost.allocated_bytes - outputs)
    if estimated:
        source += f"; {len(estimated)} op{'s' if len(estimated) > 1 else ''} estimated"
    return Profile(seconds, workspace, joint.resident_bytes, source, estimated, tuple(_ways(joint, costs)))


def _ways(joint: Joint, costs: Sequence[OpCost | None]) -> Iterator[Way]:
    """What ops may write over, where that was tried and left the same bits."""
    for candidate in candidates(joint):
        k, makes, over, position = candidate
        node, cost = joint.nodes[k], costs[k]
        allocated = None if cost is None else cost.over.get(position)
        written = None if node is None else written_of(node.target)
        if node is not None and written is not None and allocated is not None:
            block = BLOCK_BYTES.get(device_of_op(node).type, 1)
            others = (v for v in joint.graph.ops[k].outputs if v != makes)
            made = sum(as_allocated(joint.graph.values[v].size_bytes, block) for v in others)
            yield Way(k, makes, over, max(0, allocated - made), written.slower)


def _estimate(node: fx.Node) -> float:
    device = DEVICES[LIKE[device_of_op(node).type]]
    try:
        return roofline_seconds(node, device)
    except Unsupported:  # a product of a rare type: by its bytes alone
        return device.seconds(0, "float32", moved_bytes_of(node))


def _scale(nodes: dict[int, fx.Node], costs: Sequence[OpCost | None]) -> float:
    measured = [(cost.seconds, nodes[k]) for k, cost in enumerate(costs) if cost is not None and k in nodes]
    return median(seconds / _estimate(node) for seconds, node in measured) if measured else 1.0
