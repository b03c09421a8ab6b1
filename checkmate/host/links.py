"""How fast a second memory is: bytes per second each way, measured on blocks like those that a step will send."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from checkmate.host.slots import BLOCK, rounded
from checkmate.host.store import Store

ROUNDS = 3  # of each measurement, whose median counts
BLOCKS = (1 << 20, 16 << 20)  # bytes, where none are given
LEAST = 1e-9  # seconds: below it no clock measures


@dataclass(frozen=True)
class Links:
    """The links to a second memory."""

    send: float  # bytes per second, out
    fetch: float  # bytes per second, back
    shared: bool  # both directions at once take closer to the sum of their times than to the longer
    latency: float  # seconds from the begin of the smallest copy to its end


def measure(store: Store, device: torch.device, sizes: Sequence[int] = BLOCKS) -> Links:
    """Measure a store in which nothing is, with two blocks of each size; what does not fit in it is left out.

    The blocks are allocated on the device meanwhile, and freed again.

    Raises:
        HostError: if a copy fails.

    >>> from checkmate.host import open_store
    >>> store = open_store("file:", 4 << 20, torch.device("cpu"))
    >>> measure(store, torch.device("cpu"), [1 << 20]).send > 0
    True
    """
    fitting = sorted({size for size in sizes if size and 2 * rounded(size) <= store.capacity})
    times = [_times(store, device, size) for size in fitting]
    send, fetch, both = (sum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
    longer = sum(max(took[:2]) for took in times)
    latency = _times(store, device, BLOCK)[0] if store.capacity >= 2 * BLOCK else 0.0
    total = sum(fitting)
    return Links(
        send=total / max(send, LEAST),
        fetch=total / max(fetch, LEAST),
        shared=both > (longer + send + fetch) / 2,
        latency=latency,
    )


def _times(store: Store, device: torch.device, size: int) -> tuple[float, float, float]:
    """Seconds to send a block, to fetch one, and for both at once."""
    near, far = -1, -2  # keys that no plan has
    first, second = (torch.empty(size, dtype=torch.uint8, device=device).untyped_storage() for _ in range(2))

    def send() -> None:
        store.send(near, first)
        store.wait(near)

    def fetch() -> None:
        store.fetch(far, second)
        store.wait(far)

    def both() -> None:
        store.send(near, first)
        store.fetch(far, second)
        store.wait(near)
        store.wait(far)

    store.send(far, second)
    store.wait(far)
    rounds = []
    for _ in range(ROUNDS):
        sent = _seconds(send, device)
        store.drop(near)
        rounds.append((sent, _seconds(fetch, device), _seconds(both, device)))
        store.drop(near)
    store.drop(far)
    sent, fetched, together = (median(column) for column in zip(*rounds, strict=True))
    return sent, fetched, together


def _seconds(copy: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    copy()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
