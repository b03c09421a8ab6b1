"""Measured costs of ops kept on disk, for the next process and for other machines.

One JSON file for each place: device, version of PyTorch, number of threads. Within it an op is known by what
`checkmate.profiling.inputs.key_of` says: target, shapes, strides, types and other arguments. The files are in the
user's cache folder, or in the folder that the environment variable ``CHECKMATE_CACHE_DIR`` names; deleting them costs
nothing but time. Several processes may write at once: each adds its ops to what it finds, under a lock, and replaces
the file as a whole. Nothing in a file can run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from checkmate.errors import InvalidProblem
from checkmate.graph import MAX_BYTES

log = logging.getLogger("checkmate.profiling")

FORMAT, VERSION = "checkmate-op-costs", 1
VARIABLE = "CHECKMATE_CACHE_DIR"
LOCK_SECONDS = 10.0  # a lock held for so long is of a process that died: adding to a file takes milliseconds


@dataclass(frozen=True)
class OpCost:
    """What one execution costs."""

    seconds: float
    allocated_bytes: int  # at the op's own peak, outputs included


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


def folder() -> Path:
    """Where the files are."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("checkmate", appauthor=False))


def path_of(place: Place) -> Path:
    """The file of a place.

    >>> path_of(Place("cpu x/y z", "2.13.0+cpu", 2)).name
    'cpu-x-y-z_torch-2.13.0-cpu_2-threads.json'
    """
    parts = (place.device, f"torch-{place.torch}", f"{place.threads}-threads", place.settings)
    safe = [re.sub(r"[^\w.]+", "-", part, flags=re.ASCII).strip("-.") for part in parts if part]
    return folder() / f"{'_'.join(safe)}.json"


def read(path: str | os.PathLike[str]) -> OpTable:
    """Read a file of measured ops.

    Raises:
        InvalidProblem: if it is no such file.
        OSError: if it cannot be read.
    """
    raw = Path(path).read_bytes()
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidProblem(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidProblem(f"{path} is no table of measured ops: its 'format' is not {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise InvalidProblem(f"{path} has version {document.get('version')!r}; this checkmate reads {VERSION}.")
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


def _cost(seconds: Any, allocated: Any) -> OpCost:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds!r} is no number of seconds")
    if isinstance(allocated, bool) or not isinstance(allocated, int) or not 0 <= allocated <= MAX_BYTES:
        raise ValueError(f"{allocated!r} is no number of bytes")
    return OpCost(float(seconds), allocated)


def write(path: str | os.PathLike[str], table: OpTable) -> None:
    """Write a file of measured ops, at once: whoever reads meanwhile sees the old file or the new one.

    Raises:
        OSError: if it cannot be written.
    """
    path = Path(path)
    ops = {key: None if cost is None else (cost.seconds, cost.allocated_bytes) for key, cost in table.ops.items()}
    document = {"format": FORMAT, "version": VERSION, "place": asdict(table.place), "ops": ops}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(document, file, allow_nan=False, indent=0)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
        with _locked(path.with_suffix(".lock")):
            write(path, OpTable(place, {**load(place), **ops}))
    except OSError as error:
        log.warning("What was measured is not kept for the next time: %s", error)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Hold a lock file. Should two processes hold it after one died, the file is still whole, and few ops are lost."""
    began = time.monotonic()
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            try:
                old = time.time() - lock.stat().st_mtime > LOCK_SECONDS
            except FileNotFoundError:  # let go just now
                continue
            if old or time.monotonic() - began > LOCK_SECONDS:  # the clock of another machine may be ahead of ours
                lock.unlink(missing_ok=True)
            else:
                time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
