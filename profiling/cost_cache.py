"""Measured costs of ops: on disk for later processes (`checkmate.core.files`), and in a file for other machines.

An op is known by the conditions (device, version of PyTorch, number of threads, settings) and by what
`checkmate.profiling.one_op.key_of` says: target, shapes, strides, types and other arguments.
"""

from __future__ import annotations

import json
import logging
import math
import os
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
VERSION = 4  # of files: in those of the first nothing was tried over an argument; some had a checksum
MOST_FILE_BYTES = 2**28
TABLE = "costs_1"  # on disk


@dataclass(frozen=True)
class OpCost:
    """The cost of one execution."""

    seconds: float
    allocated_bytes: int  # at the op's own peak, outputs included
    # By position, each argument that the op was tried to write over: bytes that it allocates so; None: it cannot. What
    # was not tried is no way here, and is tried where costs are measured.
    over: Mapping[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which ops were measured; costs hold for these only."""

    device: str  # e.g. "cpu AMD EPYC 7B12", "cuda NVIDIA L4"
    torch: str  # its version
    threads: int
    settings: str = ""  # of PyTorch, where they change which kernels run

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.device.startswith("cpu") else ""
        return ", ".join(filter(None, [self.device.partition(" ")[0], threads, self.settings]))


def conditions_on(device: torch.device) -> Conditions:
    """The present conditions of measurements: device, PyTorch's version, number of threads, settings."""
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


def read(path: str | os.PathLike[str]) -> OpTable:
    """Read a file of measured ops.

    Raises:
        InvalidProblem: if it is no such file.
        OSError: if it cannot be read.
    """
    versions, kind = range(1, VERSION + 1), "table of measured ops"
    document = files.read_json(Path(path), format=FORMAT, versions=versions, what=kind, most=MOST_FILE_BYTES)
    try:
        conditions = Conditions(**document["place"])
        texts = (conditions.device, conditions.torch, conditions.settings)
        if not isinstance(conditions.threads, int) or not all(isinstance(text, str) for text in texts):
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


def _as_list(cost: OpCost | None) -> list[Any] | None:
    return None if cost is None else [cost.seconds, cost.allocated_bytes, *cost.over.items()]


def write(path: str | os.PathLike[str], table: OpTable) -> None:
    """Write a file of measured ops atomically.

    Raises:
        OSError: if it cannot be written.
    """
    ops = {key: _as_list(cost) for key, cost in table.ops.items()}
    document = {"format": FORMAT, "version": VERSION, "place": asdict(table.conditions), "ops": ops}
    files.write_bytes(Path(path), json.dumps(document, allow_nan=False, indent=0).encode(), private=True)


def load(conditions: Conditions, keys: Iterable[str] | None = None) -> Costs:
    """The costs of ops, by default all, on disk for these conditions; empty, with a warning, if that fails."""
    at = f"{json.dumps(asdict(conditions))} "  # prefix of the keys under these conditions
    try:
        with files.rows(TABLE) as rows:
            costs = rows.beginning(at) if keys is None else rows.get(at + key for key in keys)
    except OSError as error:
        log.warning("Ops are measured anew: %s", error)
        return {}
    return {key.removeprefix(at): None if cost is None else _cost(*cost) for key, cost in costs.items()}


def store(conditions: Conditions, ops: Costs, *, without: Collection[str] = ()) -> None:
    """Add ops to the disk and drop others; the latest cost of an op counts. A warning says if that fails."""
    at = f"{json.dumps(asdict(conditions))} "  # prefix of the keys under these conditions
    try:
        with files.rows(TABLE, write=True) as rows:
            rows.drop(at + key for key in without)
            rows.put({at + key: _as_list(cost) for key, cost in ops.items()})
    except OSError as error:
        log.warning("What was measured is not kept for the next time: %s", error)


def recall(keys: Collection[OpKey]) -> dict[OpKey, OpCost | None]:
    """The known costs of ops: those measured by this process go before those on disk."""
    costs = {key: _known[key] for key in keys if key in _known}
    for conditions in {at for at, _ in keys}:
        missing = [key for at, key in keys if at == conditions and (at, key) not in costs]
        costs |= {(conditions, key): cost for key, cost in load(conditions, missing).items()}
    return costs


def all_known(conditions: Conditions) -> Costs:
    """The costs of all ops measured under these conditions, on disk and by this process."""
    return {**load(conditions), **{key: cost for (at, key), cost in _known.items() if at == conditions}}


def ran_here(key: OpKey) -> bool:
    """Tell whether this process measured an op."""
    return key in _known


def keep(costs: Mapping[OpKey, OpCost | None]) -> None:
    """Keep costs that this process measured, in memory and on disk."""
    _known.update(costs)
    for conditions in {conditions for conditions, _ in costs}:
        store(conditions, {key: cost for (at, key), cost in costs.items() if at == conditions})


def drop(keys: Collection[OpKey]) -> None:
    """Forget the measured costs of some ops, in memory and on disk."""
    for key in keys:
        _known.pop(key, None)
    for conditions in {conditions for conditions, _ in keys}:
        store(conditions, {}, without={key for at, key in keys if at == conditions})
