"""Time and workspace of each distinct op, run on its own on the device and with the threads it will run with.

Only one op's tensors exist at a time, so that a model whose plain step does not fit can be measured; an op that does
not fit even so is estimated, and measured once there is room. What was measured before, by this process or another, is
not measured again (`checkmate.profiling.cost_table`). Collectives take more than one process: what all ranks have
measured together is taken (`checkmate.profiling.mesh`), or an estimate.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
import torch.fx as fx

from checkmate.capture.device import as_allocated, same_random_state
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import is_collective, is_convolution, target_name, tensors
from checkmate.capture.patches.is_compiling import not_compiling
from checkmate.capture.ways.legal import candidates
from checkmate.capture.ways.table import positions_to_try, written_of
from checkmate.core.problem import Profile
from checkmate.core.ways import Way
from checkmate.devices import is_known, kind_of
from checkmate.errors import Unsupported
from checkmate.profiling import accelerator, cpu
from checkmate.profiling.cost_table import Conditions, OpCost, OpTable, conditions_on, load, store, write
from checkmate.profiling.mesh import measured_collectives
from checkmate.profiling.one_op import device_of_op, key_of, runs_alone
from checkmate.profiling.roofline import DEVICES, moved_bytes_of, roofline_seconds
from checkmate.statusline import showing
from checkmate.torch_internals.dispatcher import outside_tracing

log = logging.getLogger("checkmate.profiling")

Key = tuple[Conditions, str]

_known: dict[Key, OpCost | None] = {}  # what this process measured


@dataclass(frozen=True)
class Measure:
    """Measures every distinct op of a captured step.

    Ops are the same if target, shapes, strides, types and other arguments are. Neither the global random state nor any
    tensor of the model is touched. Ops that do not run on their own are estimated, and marked in the profile. An op may
    write over an argument where it was tried and left the same bits.

    Args:
        cache: take what was measured before under the same conditions, on disk too, and keep what is measured now.
            False measures anew and keeps nothing.
    """

    cache: bool = True

    def __call__(self, joint: Joint) -> Profile:
        """The profile of a step.

        Raises:
            Unsupported: if a tensor is neither on the CPU nor on a CUDA device, nor on another whose allocator's counts
                PyTorch tells.
        """
        _refuse_other_devices(joint)
        all_conditions, keys = _keys(joint)
        distinct = {key: node for key, node in zip(keys, joint.nodes, strict=True) if key and node}
        known = _recall(list(all_conditions.values())) if self.cache else {}
        new = {key: node for key, node in distinct.items() if _is_new(key, node, known)}
        found = _measure_ops(new, known)
        if self.cache:
            _known.update(found)
            for conditions in {conditions for conditions, _ in found}:
                store(conditions, {key: cost for (at, key), cost in found.items() if at == conditions})
        known = {key: cost for key, cost in known.items() if key not in new} | found  # without what has no room now
        by_conditions: dict[Conditions, dict[str, OpCost | None]] = {at: {} for at in all_conditions.values()}
        for (at, key), cost in known.items():
            by_conditions.setdefault(at, {})[key] = cost
        collectives = measured_collectives(joint.nodes, lambda node: by_conditions[all_conditions[device_of_op(node)]])
        lacking = {k: key for k, key in enumerate(keys) if key and known.get(key) is None and k not in collectives}
        large = [k for k, key in lacking.items() if key not in known]
        untried = [k for k, key in enumerate(keys) if key and not _is_tried(distinct[key], known.get(key))]
        if failed := sorted({target_name(distinct[key]) for k, key in lacking.items() if k not in large}):
            log.warning("Could not run these ops on their own, so their cost is estimated: %s", ", ".join(failed))
        source = "measured on " + " and ".join(sorted({str(conditions) for conditions in all_conditions.values()}))
        profile = fill(joint, [None if key is None else known.get(key) for key in keys], source, collectives)
        more = f", {len(large)} too large to run alone in the memory that was free" if large else ""
        more += f"; {len(untried)} too large to be tried over an input" if untried else ""
        return replace(profile, source=profile.source + more)


def forget(joint: Joint) -> None:
    """Forget the measured costs of a step's ops, so that the next capture measures them anew, in any process."""
    all_conditions, keys = _keys(joint)
    gone = {key for key in keys if key is not None}
    for key in gone:
        _known.pop(key, None)
    for conditions in all_conditions.values():
        store(conditions, {}, without={key for at, key in gone if at == conditions})


def _keys(joint: Joint) -> tuple[dict[torch.device, Conditions], list[Key | None]]:
    """The conditions under which the ops of a step are measured, and the key of each op."""
    devices = {device_of_op(node) for node in joint.nodes if node is not None}
    found = {device: conditions_on(device) for device in devices}
    return found, [None if node is None else (found[device_of_op(node)], key_of(node)) for node in joint.nodes]


def _is_new(key: Key, node: fx.Node, known: dict[Key, OpCost | None]) -> bool:
    """Whether an op was not measured, or when fewer of its ways were known than are now.

    A convolution on CUDA runs in each process: cuDNN chooses, and may try out, a kernel at its first run, with
    workspaces as large as memory is free, which is not to be within a step. So does a kernel of Triton's that is tuned.
    Its seconds stay those that are known, by which a plan is found on disk.
    """
    chooses = is_convolution(node) or getattr(node.target, "tunes", False)
    if device_of_op(node).type != "cpu" and chooses and key not in _known:
        return True
    return key not in known or (key not in _known and not _is_tried(node, known[key]))


def _is_tried(node: fx.Node, cost: OpCost | None) -> bool:
    """Whether an op was tried over all of its arguments that it may write over, if it runs on its own at all."""
    return cost is None or cost.over.keys() >= set(positions_to_try(node))


def export(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Write all that was measured on this machine, as it is set now, to a file for ``profile=`` on another.

    Args:
        path: a name that ends in ``.json``.
        device: ``"cpu"`` or a CUDA device, or another.

    Raises:
        Unsupported: if nothing was measured here, or not with this number of threads and these settings.
        ValueError: if the name does not end in ``.json``.
        OSError: if the file cannot be written.

    >>> import tempfile, torch, checkmate
    >>> layer, batch = torch.nn.Linear(8, 4), torch.ones(2, 8)
    >>> problem = checkmate.trace(layer, batch)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(f"{folder}/ops.json")
    ...     elsewhere = checkmate.trace(layer, batch, profile=f"{folder}/ops.json")
    >>> list(elsewhere.seconds) == list(problem.seconds)
    True
    """
    if not os.fspath(path).endswith(".json"):
        raise ValueError(f"The name of a file of measured ops ends in .json, and {os.fspath(path)!r} does not.")
    conditions = conditions_on(torch.device(device))
    ops = {key: cost for (at, key), cost in _recall([conditions]).items() if at == conditions}
    if not ops:
        raise Unsupported(f"Nothing has been measured on {conditions} yet: trace a step on this machine first.")
    write(path, OpTable(conditions, ops))


def _refuse_other_devices(joint: Joint) -> None:
    for node in joint.module.graph.nodes:
        for leaf in tensors(node.meta.get("val")):
            if not is_known(leaf.device):
                raise Unsupported(
                    f"{node.name} is on {leaf.device}: ops are measured on cpu and cuda only. "
                    'checkmate.trace(..., profile="roofline:h100") estimates the costs for a named device instead.'
                )


def _recall(all_conditions: list[Conditions]) -> dict[Key, OpCost | None]:
    return {(conditions, key): cost for conditions in all_conditions for key, cost in load(conditions).items()} | _known


def measure_ops_on(device: torch.device) -> Callable[..., Iterator[tuple[int, OpCost | None]]]:
    """What measures ops there: gives the position and the cost of each; None where it does not run on its own."""
    return cpu.measure_ops if device.type == "cpu" else accelerator.measure_ops


def _measure_ops(new: dict[Key, fx.Node], known: Mapping[Key, OpCost | None]) -> dict[Key, OpCost | None]:
    """Run ops that are not known, or not as they run now."""
    found: dict[Key, OpCost | None] = {key: None for key, node in new.items() if not runs_alone(node)}
    todo = [(key, node) for key, node in new.items() if key not in found]
    if not todo:
        return found
    began = time.perf_counter()
    devices = {device_of_op(node) for _, node in todo}
    line = showing(lambda: f"measuring {len(done)} of {len(todo)} ops", share=lambda: len(done) / len(todo))
    done: dict[Key, OpCost | None] = {}
    with line, outside_tracing(), not_compiling(), torch.no_grad(), same_random_state(*devices):
        for device in sorted(devices, key=str):
            keys = [key for key, node in todo if device_of_op(node) == device]
            before = {i: cost for i, key in enumerate(keys) if (cost := known.get(key)) is not None}
            for i, cost in measure_ops_on(device)([new[key] for key in keys], before):
                done[keys[i]] = cost  # which the line counts
    log.info("Measured %d distinct ops in %.1f s.", len(todo), time.perf_counter() - began)
    return found | done


def fill(
    joint: Joint, costs: Sequence[OpCost | None], source: str, collectives: Mapping[int, float] | None = None
) -> Profile:
    """The profile of a step.

    An op without a cost takes the seconds of its roofline estimate, times the median ratio of measured to estimated
    seconds of the others, unless it is a collective; its workspace is taken to be as large as all that it touches, and
    it writes over nothing.

    Args:
        joint: the step.
        costs: of each op, by position; None: not known. What autograd does has none and costs nothing.
        source: where the costs come from; how many are estimated is added to it.
        collectives: seconds of those that all ranks have measured, by position.
    """
    graph, collectives = joint.graph, collectives or {}
    seconds, workspace = np.zeros(len(costs)), np.zeros(len(costs), dtype=np.int64)
    nodes = {k: node for k, node in enumerate(joint.nodes) if node is not None}
    estimated = tuple(k for k in nodes if costs[k] is None and k not in collectives)
    scale = _scale(nodes, costs) if estimated else 1.0
    for k, node in nodes.items():
        op, cost = graph.ops[k], costs[k]
        block = kind_of(device_of_op(node)).block_bytes
        outputs = sum(as_allocated(graph.values[v].size_bytes, block) for v in op.outputs)
        if cost is None:
            inputs = sum(graph.values[v].size_bytes for v in op.inputs)
            of_device = 1.0 if is_collective(node) else scale
            seconds[k] = collectives[k] if k in collectives else of_device * _estimate(node)
            workspace[k] = inputs + outputs
        else:
            seconds[k], workspace[k] = collectives.get(k, cost.seconds), max(0, cost.allocated_bytes - outputs)
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
            block = kind_of(device_of_op(node)).block_bytes
            others = (v for v in joint.graph.ops[k].outputs if v != makes)
            made = sum(as_allocated(joint.graph.values[v].size_bytes, block) for v in others)
            yield Way(k, makes, over, max(0, allocated - made), written.slower)


def _estimate(node: fx.Node) -> float:
    device = DEVICES[kind_of(device_of_op(node)).like]
    try:
        return roofline_seconds(node, device)
    except Unsupported:  # a product of a rare type: by its bytes alone
        return device.seconds(0, "float32", moved_bytes_of(node))


def _scale(nodes: dict[int, fx.Node], costs: Sequence[OpCost | None]) -> float:
    measured = [(cost.seconds, nodes[k]) for k, cost in enumerate(costs) if cost is not None and k in nodes]
    return median(seconds / _estimate(node) for seconds, node in measured) if measured else 1.0
