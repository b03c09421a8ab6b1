"""Open the second memory that a user names, ``host="file:/fast/disk"`` or ``"pinned"``, and measure its links.

Bytes per second each way are measured once, on blocks like those that a step will send, and kept on disk: plans of the
next start are the same then. There is one record for each place, that is the machine, its device and the folder
(`checkmate.core.files`). Whoever measures at the same time takes what the first has written.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from checkmate.core.files import rows
from checkmate.core.host import Host
from checkmate.devices import is_here, kind_of
from checkmate.errors import HostError, InvalidProblem
from checkmate.host.store import BLOCK, Store, rounded

log = logging.getLogger("checkmate.host")

TABLE = "links_2"  # on disk
ROUNDS = 3  # per measurement; the median counts
BLOCKS = (1 << 20, 16 << 20)  # bytes, where none are given
LEAST = 1e-9  # seconds: below it no clock measures
_measured: dict[str, Host] = {}  # in this process, by place


def open_store(where: str, capacity: int, device: torch.device) -> Store:
    """Open a second memory for a step. All bytes are allocated at once, so that a lack shows before the step.

    Args:
        where: ``"file:/fast/disk"``, a folder in which a file without a name is made, for a step on the CPU;
            ``"file:"`` takes the folder for temporary files. ``"pinned"``, or ``"memory"``, beside an accelerator.
        capacity: bytes; each value takes its bytes `rounded`.
        device: where the step runs.

    Raises:
        HostError: if there is no such memory, no such folder, or not so much room.

    >>> store = open_store("file:", 10_000, torch.device("cpu"))
    >>> value, landing = torch.rand(1000).untyped_storage(), torch.UntypedStorage(4000)
    >>> store.send(0, value)
    >>> store.wait(0)
    >>> store.fetch(0, landing)
    >>> store.wait(0)
    >>> bytes(landing) == bytes(value), store.bytes_there
    (True, 4096)
    >>> store.close()
    """
    kind, colon, folder = where.partition(":")
    if kind == "file" and colon:
        if device.type != "cpu":
            raise HostError(f"A file is for steps on the CPU, not on {device}: write host='pinned'.")
        if sys.platform != "linux":
            raise HostError("A file as a second memory needs Linux.")
        from checkmate.host.files import FileMover

        return Store(FileMover(Path(folder or tempfile.gettempdir()), rounded(capacity)), capacity)
    if where not in ("pinned", "memory"):
        raise HostError(f"Unknown second memory {where!r}: write 'file:/fast/disk', 'file:', or on CUDA 'pinned'.")
    if device.type == "cpu":
        raise HostError(f"Pinned memory is for steps on CUDA, not on {device}: write host='file:/fast/disk'.")
    from checkmate.host.pinned import PinnedMover

    return Store(PinnedMover(device, rounded(capacity)), capacity)


def measure(store: Store, device: torch.device, sizes: Sequence[int] = BLOCKS) -> Host:
    """Measure the links of an empty store with two blocks of each size; sizes that do not fit are skipped.

    The blocks are allocated on the device meanwhile, and freed again. The links count as one if both directions at once
    take closer to the sum of their times than to the longer.

    Raises:
        HostError: if a copy fails.
        InvalidProblem: if no size fits.

    >>> store = open_store("file:", 4 << 20, torch.device("cpu"))
    >>> measure(store, torch.device("cpu"), [1 << 20]).send > 0
    True
    """
    fitting = sorted({size for size in sizes if size and 2 * rounded(size) <= store.capacity})
    times = [_times(store, device, size) for size in fitting]
    send, fetch, both = (sum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
    longer = sum(max(row[:2]) for row in times)
    latency = _times(store, device, BLOCK)[0] if store.capacity >= 2 * BLOCK else 0.0
    total = sum(fitting)
    is_one = both > (longer + send + fetch) / 2
    return Host(0, total / max(send, LEAST), total / max(fetch, LEAST), is_one, latency)


def _times(store: Store, device: torch.device, size: int) -> tuple[float, float, float]:
    """Seconds to send a block, to fetch one, and to do both at once."""
    # Two blocks: one to send, and one that is there to be fetched.
    near, far = -1, -2  # keys that no plan has
    first, second = (torch.empty(size, dtype=torch.uint8, device=device).untyped_storage() for _ in range(2))
    out, back = (store.send, near, first), (store.fetch, far, second)

    def seconds(*copies: tuple[Callable[[int, torch.UntypedStorage], None], int, torch.UntypedStorage]) -> float:
        _synchronize(device)
        begin = time.perf_counter()
        for start, key, storage in copies:
            start(key, storage)
        for _, key, _ in copies:
            store.wait(key)
        _synchronize(device)
        return time.perf_counter() - begin

    store.send(far, second)
    store.wait(far)
    rounds = []
    for _ in range(ROUNDS):
        sent = seconds(out)
        store.drop(near)
        rounds.append((sent, seconds(back), seconds(out, back)))
        store.drop(near)
    store.drop(far)
    sent, fetched, together = (median(column) for column in zip(*rounds, strict=True))
    return sent, fetched, together


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def known_links(where: str, device: torch.device, *, cache: bool = True) -> Host:
    """The links of a second memory, as `open_store` names it; with ``cache``, read from disk and kept there.

    Raises:
        HostError: if it cannot be had, or a copy fails.

    >>> known_links("file:", torch.device("cpu")) == known_links("file:", torch.device("cpu"))
    True
    """
    if not is_here(device):
        raise HostError(
            "The links of a GPU to a second memory are measured on it, and there is none here. Plan with those that it "
            "has: checkmate.trace(...).with_host(checkmate.Host(bytes, send, fetch)), rates in bytes per second."
        )
    kind, colon, folder = where.partition(":")
    medium = f"{kind}:{os.path.realpath(folder or tempfile.gettempdir())}" if colon else where
    place = f"{medium} beside {device.type} {kind_of(device).name(device)} of {platform.node()}"
    if place not in _measured:
        # Take the record on disk, where it is valid; else measure, and take the first record of those who did.
        links = _on_record(place) if cache else None
        if links is None:
            links = _measure(where, device)
            links = (_on_record(place, links) or links) if cache else links
        _measured[place] = links
    return _measured[place]


def _measure(where: str, device: torch.device) -> Host:
    try:
        store = open_store(where, 2 * rounded(max(BLOCKS)), device)
    except HostError:  # a small one, for a small host_budget
        store = open_store(where, 2 * rounded(min(BLOCKS)), device)
    try:
        links = measure(store, device)
    finally:
        store.close()
    log.info("%s: %.3g GB/s there, %.3g back", where, links.send / 1e9, links.fetch / 1e9)
    return links


def _on_record(place: str, measured: Host | None = None) -> Host | None:
    """The links on record; if there are none, record those that were measured."""
    try:
        with rows(TABLE, write=measured is not None) as table:
            for document in table.get([place]).values():
                try:
                    return Host(**document)
                except (TypeError, InvalidProblem) as error:
                    log.warning("The links to a second memory are measured anew: %s", error)
            if measured is not None:
                table.put({place: asdict(measured)})
    except OSError as error:
        log.warning("The links to a second memory cannot be read or kept for the next time: %s", error)
    return measured
