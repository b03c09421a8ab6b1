"""Time and workspace of each distinct op, run on its own on the device it will run on.

Only one op's tensors exist at a time, so that a model whose plain step does not fit can be measured. The inputs are
made up in the shapes, strides and types of the trace: floats between 0.1 and 0.9 (valid as probabilities, variances and
standard deviations), integers zero (valid as indices), bools true.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from checkmate.capture import Joint
from checkmate.errors import Unsupported
from checkmate.memory import record_allocations
from checkmate.problem import Profile

log = logging.getLogger("checkmate.profiling")

Key = tuple[int, str]  # number of threads, and what two ops must share to cost the same
_known: dict[Key, OpCost] = {}  # what this process measured before

LEAST_REPEATS, MOST_REPEATS = 3, 50
SECONDS_PER_OP = 0.02  # what timing one distinct op may take beyond the least repeats


@dataclass(frozen=True)
class OpCost:
    """What one execution costs."""

    seconds: float
    allocated_bytes: int  # at the op's own peak, outputs included


def measure(joint: Joint) -> Profile:
    """Measure every distinct op of a captured step.

    Ops are the same if target, shapes, strides, types and other arguments are; what this process has measured before it
    does not measure again. Neither the global random state nor any tensor of the model is touched.

    Raises:
        Unsupported: if a tensor is not on the CPU.
    """
    _refuse_other_devices(joint)
    threads = torch.get_num_threads()
    keys = [None if node is None else (threads, _key(node)) for node in joint.nodes]
    distinct = {key: node for key, node in zip(keys, joint.nodes, strict=True) if key is not None and node is not None}
    new = {key: node for key, node in distinct.items() if key not in _known}
    began = time.perf_counter()
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        peaks = _measure_memory(new)
        _known.update({key: OpCost(_time(new[key]), peak) for key, peak in peaks.items()})
    log.info("Measured %d distinct ops of %d in %.1f s", len(peaks), len(keys), time.perf_counter() - began)
    failed = sorted({str(distinct[key].target) for key in distinct.keys() - _known.keys()})
    source = f"measured on cpu, {threads} thread{'s' if threads > 1 else ''}"
    if failed:
        log.warning("Could not run these ops on their own, so their cost is a guess: %s", ", ".join(failed))
        source += f"; guessed for {', '.join(failed)}"
    graph = joint.graph
    seconds, workspace = np.zeros(len(keys)), np.zeros(len(keys), dtype=np.int64)
    for k, (key, op) in enumerate(zip(keys, graph.ops, strict=True)):
        if key is None:
            continue
        outputs = sum(graph.values[v].size_bytes for v in op.outputs)
        inputs = sum(graph.values[v].size_bytes for v in op.inputs)
        cost = _known.get(key) or _guess(inputs, outputs)
        seconds[k] = cost.seconds
        workspace[k] = max(0, cost.allocated_bytes - outputs)
    return Profile(seconds, workspace, joint.resident_bytes, source)


def _refuse_other_devices(joint: Joint) -> None:
    for node in joint.module.graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                raise Unsupported(f"{node.name} is on {leaf.device}: so far only steps on the CPU can be planned.")


def _guess(inputs: int, outputs: int) -> OpCost:
    """For an op that does not run on made-up inputs: 5 GB/s, and a workspace as large as all that it touches."""
    return OpCost((inputs + outputs) / 5e9, outputs + inputs + outputs)


def _key(node: fx.Node) -> str:
    """What two ops must share to cost the same."""

    def describe(arg: Any) -> Any:
        val = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
        return tree_map(_describe_tensor, val)

    return repr((str(node.target), fx.node.map_aggregate((node.args, node.kwargs), describe)))


def _describe_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, str(leaf.device))
    return leaf


def _call(node: fx.Node) -> Callable[[], Any]:
    """The op with made-up inputs, ready to run."""

    def make(arg: Any) -> Any:
        return tree_map(_make_up, arg.meta["val"]) if isinstance(arg, fx.Node) else arg

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), make)
    target: Any = node.target
    return lambda: target(*args, **kwargs)


def _make_up(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    real = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    flat = real.as_strided((real.untyped_storage().nbytes() // real.element_size(),), (1,), 0)
    if leaf.dtype.is_floating_point:
        flat.uniform_(0.1, 0.9)
    else:
        flat.fill_(leaf.dtype is torch.bool)
    return real


def _measure_memory(distinct: dict[Key, fx.Node]) -> dict[Key, int]:
    """Bytes that each op allocates at its own peak, of those that can run on made-up inputs."""
    spans: dict[Key, str] = {}
    with record_allocations() as recording:
        for i, (key, node) in enumerate(distinct.items()):
            if _runs_within(f"checkmate.op{i}", node):
                spans[key] = f"checkmate.op{i}"
    return {key: int(recording.within(span).max()) for key, span in spans.items()}


def _runs_within(span: str, node: fx.Node) -> bool:
    """Run an op within a span of the recording; False if it does not run on made-up inputs."""
    try:
        run = _call(node)
        run()  # the first run may fill caches
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        log.debug("%s does not run on its own: %s", node.name, error)
        return False
    with torch.profiler.record_function(span):
        run()
    return True


def _time(node: fx.Node) -> float:
    """Seconds of one execution: the median of as many as fit the time for it."""
    run = _call(node)
    run()
    seconds: list[float] = []
    while len(seconds) < LEAST_REPEATS or (sum(seconds) < SECONDS_PER_OP and len(seconds) < MOST_REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
