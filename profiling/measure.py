"""Time and workspace of each distinct op, run on its own on the device and with the threads it will run with.

Only one op's tensors exist at a time, so that a model whose plain step does not fit can be measured. What was measured
before, by this process or another, is not measured again (`checkmate.profiling.cost_table`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.nodes import target_name, tensors
from checkmate.capture.patches.is_compiling import not_compiling
from checkmate.capture.ways.table import positions_to_try
from checkmate.core.problem import Profile
from checkmate.errors import Unsupported
from checkmate.profiling import cpu, cuda
from checkmate.profiling.assemble import fill
from checkmate.profiling.cost_table import Costs, OpCost, OpTable, Place, load, store, write
from checkmate.profiling.one_op import device_of_op, key_of, runs_alone
from checkmate.statusline import showing
from checkmate.torch_internals.dispatcher import _disable_current_modes

log = logging.getLogger("checkmate.profiling")

BY_DEVICE = {"cpu": cpu.measure_ops, "cuda": cuda.measure_ops}
EXACT = ("none", "ieee")  # float32 as it is
KERNELS = (  # variables of the environment by which libraries choose kernels
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
)
Key = tuple[Place, str]

_known: dict[Key, OpCost | None] = {}  # what this process measured


@dataclass(frozen=True)
class Measure:
    """Measures every distinct op of a captured step; ``cache``: unless it was measured before."""

    cache: bool = True

    def __call__(self, joint: Joint) -> Profile:
        """The profile of a step."""
        return measure(joint, cache=self.cache)


def measure(joint: Joint, *, cache: bool = True) -> Profile:
    """Measure every distinct op of a captured step.

    Ops are the same if target, shapes, strides, types and other arguments are. Neither the global random state nor any
    tensor of the model is touched. Ops that do not run on their own are estimated, and marked in the profile. An op may
    write over an argument where it was tried and left the same bits.

    Args:
        joint: the step.
        cache: take what was measured before at the same place, on disk too, and keep what is measured now. False
            measures anew and keeps nothing.

    Raises:
        Unsupported: if a tensor is neither on the CPU nor on a CUDA device.
    """
    _refuse_other_devices(joint)
    places = {device: place_of(device) for device in {device_of_op(node) for node in joint.nodes if node is not None}}
    keys = [None if node is None else (places[device_of_op(node)], key_of(node)) for node in joint.nodes]
    distinct = {key: node for key, node in zip(keys, joint.nodes, strict=True) if key is not None and node is not None}
    known = _recall(list(places.values())) if cache else {}
    found = _measure_ops({key: node for key, node in distinct.items() if key not in known or _lacks(known[key], node)})
    if cache:
        _keep(found)
    known |= found
    if failed := sorted({target_name(node) for key, node in distinct.items() if known[key] is None}):
        log.warning("Could not run these ops on their own, so their cost is estimated: %s", ", ".join(failed))
    source = "measured on " + " and ".join(sorted({str(place) for place in places.values()}))
    return fill(joint, [None if key is None else known[key] for key in keys], source)


def export(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Write all that was measured on this machine, as it is set now, to a file for ``profile=`` on another.

    Args:
        path: a name that ends in ``.json``.
        device: ``"cpu"`` or a CUDA device.

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
    place = place_of(torch.device(device))
    ops = {key: cost for (at, key), cost in _recall([place]).items() if at == place}
    if not ops:
        raise Unsupported(f"Nothing has been measured on {place} yet: trace a step on this machine first.")
    write(path, OpTable(place, ops))


def place_of(device: torch.device) -> Place:
    """Where ops are measured now: the device, PyTorch's version, its number of threads and its settings."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return Place(f"{device.type} {name}", torch.__version__, torch.get_num_threads(), _settings(device.type))


def _settings(kind: str) -> str:
    """The settings that change which kernels run on a kind of device, where they are not PyTorch's own."""
    backends: Any = torch.backends
    if kind == "cuda":
        products, convolutions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        changed = {
            f"convolutions in {convolutions}": convolutions != "tf32",
            "without cudnn": not backends.cudnn.enabled,
            "cudnn benchmark": backends.cudnn.benchmark,
            "cudnn deterministic": backends.cudnn.deterministic,
        }
    else:
        products, convolutions = backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
        changed = {
            f"convolutions in {convolutions}": convolutions not in EXACT,
            "without mkldnn": not backends.mkldnn.enabled,
            **{f"{name}={os.environ.get(name)}": name in os.environ for name in KERNELS},
        }
    changed[f"products in {products}"] = products not in EXACT
    changed["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return ", ".join(word for word, holds in changed.items() if holds)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = {key.strip(): what.strip() for key, _, what in (line.partition(":") for line in lines)}
    name = found.get("model name") or platform.processor() or platform.machine()
    of_it = [
        found.get(key, "") for key in ("cpu family", "model", "stepping", "flags")
    ]  # one name may stand for several
    kind = hashlib.sha256("\n".join(of_it).encode()).hexdigest()[:8]
    return f"{name} {kind} {torch.backends.cpu.get_cpu_capability()}"  # AVX2, AVX512, ...


def _refuse_other_devices(joint: Joint) -> None:
    for node in joint.module.graph.nodes:
        for leaf in tensors(node.meta.get("val")):
            if leaf.device.type not in BY_DEVICE:
                raise Unsupported(
                    f"{node.name} is on {leaf.device}: ops are measured on {' and '.join(BY_DEVICE)} only. "
                    'checkmate.trace(..., profile="roofline:h100") estimates the costs for a named device instead.'
                )


def _lacks(cost: OpCost | None, node: fx.Node) -> bool:
    """Whether the op was measured when fewer of its ways were known than are now."""
    return cost is not None and not cost.over.keys() >= set(positions_to_try(node))


def _recall(places: list[Place]) -> dict[Key, OpCost | None]:
    return {(place, key): cost for place in places for key, cost in load(place).items()} | _known


def _keep(found: dict[Key, OpCost | None]) -> None:
    _known.update(found)
    for place in {place for place, _ in found}:
        ops: Costs = {key: cost for (at, key), cost in found.items() if at == place}
        store(place, ops)


def _measure_ops(new: dict[Key, fx.Node]) -> dict[Key, OpCost | None]:
    """Run ops that are not known."""
    found: dict[Key, OpCost | None] = {key: None for key, node in new.items() if not runs_alone(node)}
    todo = [(key, node) for key, node in new.items() if key not in found]
    if not todo:
        return found
    began = time.perf_counter()
    cards = sorted({device.index for _, node in todo if (device := device_of_op(node)).type == "cuda"})
    line = showing(lambda: f"measuring {len(done)} of {len(todo)} ops", share=lambda: len(done) / len(todo))
    done: dict[Key, OpCost | None] = {}
    fork = torch.random.fork_rng(devices=cards)
    with line, _disable_current_modes(), not_compiling(), torch.no_grad(), fork:
        for key, cost in _measure_each(todo):
            done[key] = cost  # noqa: PERF403  # which the line counts
    log.info("Measured %d distinct ops in %.1f s.", len(todo), time.perf_counter() - began)
    return found | done


def _measure_each(todo: list[tuple[Key, fx.Node]]) -> Iterator[tuple[Key, OpCost | None]]:
    for kind, measure_ops in BY_DEVICE.items():
        here = [(key, node) for key, node in todo if device_of_op(node).type == kind]
        if here:
            yield from ((here[i][0], cost) for i, cost in measure_ops([node for _, node in here]))
