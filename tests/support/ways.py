"""Steps whose ops are offered all ways that the table of candidates has, where their costs come without ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch.utils._python_dispatch import _disable_current_modes

from checkmate.backends import step_problem
from checkmate.capture.inplace.aliasing import candidates
from checkmate.capture.inplace.rules import TABLE, call_over
from checkmate.capture.joint import Joint
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Profile
from checkmate.memory import measure_peak
from checkmate.profiling.source import profile_of
from checkmate.profiling.trial import tried_here

_KNOWN: dict[Any, int] = {}  # bytes that a call allocates which writes over an argument


def offered(joint: Joint, costs: Profile) -> Profile:
    """Costs with all candidates as ways, where they come without any: the bits of each are taken to be equal.

    Those that run block by block have been tried: they depend on the shapes.
    """
    found = [] if costs.ways else [(c, joint.nodes[c.op]) for c in candidates(joint)]
    if not found:
        return costs
    ways = [
        InPlace(c.op, c.makes, c.over, _workspace(node, c.position), TABLE[node.target].slower) for c, node in found
    ]
    tried = tried_here(joint, replace(costs, ways=tuple(ways)))
    return replace(tried, ways=tuple(replace(way, slower=False) for way in tried.ways))  # so that all plans take them


def _workspace(node: fx.Node, position: int) -> int:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _described(n.meta["val"]))
    key = str((node.target, position, args, kwargs))
    if key not in _KNOWN:
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _like(n.meta["val"]))
            target, args, kwargs = call_over(node.target, args, kwargs, position)
            target(*args, **kwargs)
            _KNOWN[key] = measure_peak(lambda: target(*args, **kwargs)).peak
    return _KNOWN[key]


def _described(val: Any) -> Any:
    return (tuple(val.shape), val.stride(), val.dtype) if isinstance(val, torch.Tensor) else val


def _like(val: Any) -> Any:
    if not isinstance(val, torch.Tensor):
        return val
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cpu").fill_(1)


@contextmanager
def offering_ways() -> Iterator[None]:
    """Within the block whatever is captured is planned with ways."""
    with patch.object(step_problem, "profile_of", lambda joint, source: offered(joint, profile_of(joint, source))):
        yield
