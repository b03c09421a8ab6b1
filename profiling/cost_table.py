"""Measured costs of ops kept on disk, for the next process and for other machines.

One JSON file for each place, in the folder of `checkmate.core.files`: device, version of PyTorch, number of threads.
Within it an op is known by what `checkmate.profiling.one_op.key_of` says: target, shapes, strides, types and other
arguments. Several processes may write at once: each adds its ops to what it finds, under a lock, and replaces the file
as a whole.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkmate.core import files
from checkmate.core.graph import MAX_BYTES
from checkmate.errors import InvalidProblem

log = logging.getLogger("checkmate.profiling")

FORMAT = "checkmate-op-costs"
WITHOUT_WAYS, VERSION = 1, 2  # of files: in those of the former nothing was tried over an argument


@dataclass(frozen=True)
class OpCost:
    """What one execution costs."""

    seconds: float
    allocated_bytes: int  # at the op's own peak, outputs included
    over: Mapping[int, int | None] = field(default_factory=dict)
    """For each argument, by position, that the op was tried to write over: bytes that it allocates so; None: it cannot.

    What was not tried is no way here, and is tried where costs are measured.
    """


@dataclass(frozen=True)
class Place:
    """Where and how ops were measured: costs hold for one place only."""

    device: str  # e.g. "cpu AMD EPYC 7B12", "cuda NVIDIA L4"
    torch: str  # its version
    threads: int
    settings: str = ""  # of PyTorch, where they change which kernels run

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}" if self.device.startswith("cpu") else ""
        return ", ".join(filter(None, [self.device.partition(" ")[0], threads, self.settings]))


Costs = Mapping[str, OpCost | None]  # by key; None: the op does not run on its own


@dataclass(frozen=True)
class OpTable:
    """What was measured at a place."""

    place: Place
    ops: Costs


def path_of(place: Place) -> Path:
    """The file of a place.

    >>> path_of(Place("cpu x/y z", "2.13.0+cpu", 2)).name
    'cpu-x-y-z_torch-2.13.0-cpu_2-threads.json'
    """
    parts = (place.device, f"torch-{place.torch}", f"{place.threads}-threads", place.settings)
    safe = [re.sub(r"[^\w.]+", "-", part, flags=re.ASCII).strip("-.") for part in parts if part]
    return files.folder() / f"{'_'.join(safe)}.json"


def read(path: str | os.PathLike[str]) -> OpTable:
    """Read a file of measured ops.

    Raises:
        InvalidProblem: if it is no such file.
        OSError: if it cannot be read.
    """
    document = files.read_json(Path(path), format=FORMAT, version=(WITHOUT_WAYS, VERSION), what="table of measured ops")
    try:
        place = Place(**document["place"])
        if not isinstance(place.threads, int) or not all(map(_is_text, (place.device, place.torch, place.settings))):
            raise ValueError(f"{place!r} is no place")
        ops = {key: None if cost is None else _cost(*cost) for key, cost in document["ops"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidProblem(f"{path} is no valid table of measured ops: {error}") from None
    return OpTable(place, ops)


def _is_text(what: object) -> bool:
    return isinstance(what, str)


def _cost(seconds: Any, allocated: Any, *tried: Any) -> OpCost:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds!r} is no number of seconds")
    over = {position: None if count is None else _bytes(count) for position, count in tried}
    if any(isinstance(position, bool) or not isinstance(position, int) or position < 0 for position in over):
        raise ValueError(f"{[*over]!r} are no positions of arguments")
    return OpCost(float(seconds), _bytes(allocated), over)


def _bytes(count: Any) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_BYTES:
        raise ValueError(f"{count!r} is no number of bytes")
    return count


def write(path: str | os.PathLike[str], table: OpTable) -> None:
    """Write a file of measured ops, at once: whoever reads meanwhile sees the old file or the new one.

    Raises:
        OSError: if it cannot be written.
    """
    ops = {
        key: None if cost is None else (cost.seconds, cost.allocated_bytes, *cost.over.items())
        for key, cost in table.ops.items()
    }
    document = {"format": FORMAT, "version": VERSION, "place": asdict(table.place), "ops": ops}
    files.write_json(Path(path), document, indent=0)


def load(place: Place) -> Costs:
    """The ops measured at a place so far; none, with a warning, if the file is damaged or cannot be read."""
    path = path_of(place)
    try:
        table = read(path)
    except FileNotFoundError:
        return {}
    except (InvalidProblem, OSError) as error:
        log.warning("Ops are measured anew, and the file replaced: %s", error)
        return {}
    if table.place != place:
        log.warning("Ops are measured anew, and the file replaced: %s was measured at %s.", path, table.place)
        return {}
    return table.ops


def store(place: Place, ops: Costs) -> None:
    """Add ops to the file of a place; of an op the latest cost counts. A warning says if the file cannot be written."""
    path = path_of(place)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path):
            write(path, OpTable(place, {**load(place), **ops}))
    except OSError as error:
        log.warning("What was measured is not kept for the next time: %s", error)
