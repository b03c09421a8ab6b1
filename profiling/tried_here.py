"""Whether ops that run block by block leave the bits of the whole here, where their costs come from elsewhere.

Which kernel runs depends on the size of a block, the processor and the number of threads. Where costs are measured here
that is tried along with them. By an estimate, a file of another machine or a profile that is handed in nothing has been
tried here: what is to run here by such costs is tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.core.problem import Profile
from checkmate.profiling.cost_table import Place
from checkmate.profiling.measure import place_of
from checkmate.profiling.one_op import attempt, call_of, device_of_op, key_of
from checkmate.profiling.trial import ways_of
from checkmate.torch_internals.dispatcher import _disable_current_modes

_known: dict[tuple[Place, str], dict[int, bool]] = {}  # by place and op, what this process tried: positions


def tried_here(joint: Joint, profile: Profile, positions: Mapping[tuple[int, int], int]) -> Profile:
    """A profile without those of its slower ways that leave other bits here. The global random state is not touched.

    Args:
        joint: the step.
        profile: of the step.
        positions: of the argument, by op and by the value that it may write over.
    """
    nodes = joint.nodes

    def holds(op: int, over: int) -> bool:
        node = nodes[op]
        return node is not None and _positions(node).get(positions[op, over], False)

    ways = tuple(way for way in profile.ways if not way.slower or holds(way.op, way.over))
    return profile if ways == profile.ways else replace(profile, ways=ways)


def _positions(node: fx.Node) -> dict[int, bool]:
    key = place_of(device_of_op(node)), key_of(node)
    if key not in _known:
        found: dict[int, bool] = {}
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            attempt(node, lambda: found.update(ways_of(node, call_of(node), _call)))
        _known[key] = found
    return _known[key]


def _call(_: int, call: Callable[[], Any]) -> Any:
    return call()
