"""Measured costs of ops kept on disk, for the next process and for other machines.

One JSON file for the same conditions (device, version of PyTorch, number of threads), in the folder of
`checkmate.core.files`. Within it an op is known by what `checkmate.profiling.one_op.key_of` says: target, shapes,
strides, types and other arguments. Several processes may write at once: each adds its ops to what it finds, under a
lock, and replaces the file as a whole.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkmate.core import files
from checkmate.core.graph import MAX_BYTES
from checkmate.devices import kind_of
from checkmate.errors import InvalidProblem

log = logging.getLogger("checkmate.profiling")

FORMAT = "checkmate-op-costs"
WITHOUT_WAYS, WITHOUT_CHECKSUM, VERSION = 1, 2, 3  # of files: in those of the first nothing was tried over an argument


@dataclass(frozen=True)
class OpCost:
    """The cost of one execution."""

    seconds: float
    allocated_bytes: int  # at the op's own peak, outputs included
    over: Mapping[int, int | None] = field(default_factory=dict)
    """For each argument, by position, that the op was tried to write over: bytes that it allocates so; None: it cannot.

    What was not tried is no way here, and is tried where costs are measured.
    """


@dataclass(frozen=True)
class Conditions:
    """Under which conditions ops were measured: costs hold for these only."""

    device: str  # e.g. "cpu AMD EPYC 7B12", "cuda NVIDIA L4"
    torch: str  # its version
    threads: int
    settings: str = ""  # of PyTorch, where they change which kernels run

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.device.startswith("cpu") else ""
        return ", ".join(filter(None, [self.device.partition(" ")[0], threads, self.settings]))


def conditions_on(device: torch.device) -> Conditions:
    """The conditions of measurements now: the device, PyTorch's version, its number of threads and its settings."""
    kind = kind_of(device)
    changed = {**kind.settings(), "deterministic": torch.are_deterministic_algorithms_enabled()}
    settings = ", ".join(word for word, holds in changed.items() if holds)
    where = f"{device.type} {kind.name(device)}".strip()
    return Conditions(where, torch.__version__, torch.get_num_threads(), settings)


Costs = Mapping[str, OpCost | None]  # by key; None: the op does not run on its own
OpKey = tuple[Conditions, str]  # under which conditions, and what `checkmate.profiling.one_op.key_of` says

_known: dict[OpKey, OpCost | None] = {}  # measured by this process


@dataclass(frozen=True)
class OpTable:
    """The costs measured under the same conditions."""

    conditions: Conditions
    ops: Costs
    name: str = field(default="the table", compare=False)  # in messages


def path_of(conditions: Conditions) -> Path:
    """The file of what was measured under these conditions.

    >>> path_of(Conditions("cpu x/y z", "2.13.0+cpu", 2)).name
    'cpu-x-y-z_torch-2.13.0-cpu_2-threads.json'
    """
    parts = (conditions.device, f"torch-{conditions.torch}", f"{conditions.threads}-threads", conditions.settings)
    safe = [re.sub(r"[^\w.]+", "-", part, flags=re.ASCII).strip("-.") for part in parts if part]
    return files.folder() / f"{'_'.join(safe)}.json"


def read(path: str | os.PathLike[str]) -> OpTable:
    """Read a file of measured ops.

    Raises:
        InvalidProblem: if it is no such file, or was changed.
        OSError: if it cannot be read.
    """
    versions, what = (WITHOUT_WAYS, WITHOUT_CHECKSUM, VERSION), "table of measured ops"
    document = files.read_json(Path(path), format=FORMAT, version=versions, what=what)
    if document["version"] == VERSION:
        document = files.without_checksum(document, path)
    try:
        conditions = Conditions(**document["place"])
        if not isinstance(conditions.threads, int) or not all(
            isinstance(text, str) for text in (conditions.device, conditions.torch, conditions.settings)
        ):
            raise ValueError(f"{conditions!r} are no conditions to measure in")
        ops = {key: None if cost is None else _cost(*cost) for key, cost in document["ops"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidProblem(f"{path} is no valid table of measured ops: {error}") from None
    return OpTable(conditions, ops)


def _cost(seconds: Any, allocated: Any, *tried: Any) -> OpCost:
    over = dict(tried)
    counts = (allocated, *(count for count in over.values() if count is not None))
    whole = all(type(number) is int and 0 <= number <= MAX_BYTES for number in (*counts, *over))
    if not whole or type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{[seconds, allocated, *tried]!r} is no cost of an op")
    return OpCost(float(seconds), allocated, over)


def write(path: str | os.PathLike[str], table: OpTable) -> None:
    """Write a file of measured ops, at once: whoever reads meanwhile sees the old file or the new one.

    Raises:
        OSError: if it cannot be written.
    """
    ops = {
        key: None if cost is None else (cost.seconds, cost.allocated_bytes, *cost.over.items())
        for key, cost in table.ops.items()
    }
    document = {"format": FORMAT, "version": VERSION, "place": asdict(table.conditions), "ops": ops}
    files.write_json(Path(path), files.with_checksum(document), indent=0)


def load(conditions: Conditions) -> Costs:
    """The ops measured under these conditions; none, with a warning, if the file is damaged or cannot be read."""
    path = path_of(conditions)
    try:
        table = read(path)
    except FileNotFoundError:
        return {}
    except (InvalidProblem, OSError) as error:
        log.warning("Ops are measured anew, and the file replaced: %s", error)
        return {}
    if table.conditions != conditions:
        log.warning("Ops are measured anew, and the file replaced: %s was measured at %s.", path, table.conditions)
        return {}
    return table.ops


def store(conditions: Conditions, ops: Costs, *, without: Collection[str] = ()) -> None:
    """Add ops to the file of these conditions, and drop others; of an op the latest cost counts.

    A warning says if the file cannot be written.
    """
    path = path_of(conditions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path):
            known = {key: cost for key, cost in load(conditions).items() if key not in without}
            write(path, OpTable(conditions, {**known, **ops}))
    except OSError as error:
        log.warning("What was measured is not kept for the next time: %s", error)


def recall(all_conditions: Iterable[Conditions]) -> dict[OpKey, OpCost | None]:
    """The costs measured under some conditions, from their files and from this process, which takes precedence."""
    return {(conditions, key): cost for conditions in all_conditions for key, cost in load(conditions).items()} | _known


def ran_here(key: OpKey) -> bool:
    """Whether this process measured an op."""
    return key in _known


def keep(costs: Mapping[OpKey, OpCost | None]) -> None:
    """Keep what this process measured, for itself and for others."""
    _known.update(costs)
    for conditions in {conditions for conditions, _ in costs}:
        store(conditions, {key: cost for (at, key), cost in costs.items() if at == conditions})


def drop(keys: Collection[OpKey]) -> None:
    """Forget what was measured of some ops, here and in the files."""
    for key in keys:
        _known.pop(key, None)
    for conditions in {conditions for conditions, _ in keys}:
        store(conditions, {}, without={key for at, key in keys if at == conditions})
