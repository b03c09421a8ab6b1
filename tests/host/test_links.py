"""How fast links are, by a clock and a store that the test moves."""

from __future__ import annotations

import time

import pytest
import torch

from checkmate.host.links import Links, measure
from checkmate.host.slots import BLOCK
from checkmate.host.store import Place, Store, Transfer

CPU = torch.device("cpu")
MIB = 1 << 20


class Timed:
    """A mover whose copies take seconds of a clock of its own: so many bytes per second each way."""

    name, own_bytes = "the test's memory", 0

    def __init__(self, send: float, fetch: float, shared: bool) -> None:
        self.now, self.speeds, self.shared = 0.0, (send, fetch), shared
        self.ends = [0.0, 0.0]

    def out(self, storage: torch.UntypedStorage, place: Place) -> Transfer:
        return self.begin(0, place)

    def back(self, place: Place, storage: torch.UntypedStorage) -> Transfer:
        return self.begin(1, place)

    def begin(self, way: int, place: Place) -> Transfer:
        behind = self.ends if self.shared else self.ends[way : way + 1]
        self.ends[way] = max(self.now, *behind) + place.nbytes / self.speeds[way]
        return Copy(self, self.ends[way])

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Copy:
    def __init__(self, mover: Timed, end: float) -> None:
        self.mover, self.end, self.ended = mover, end, False

    def wait(self) -> None:
        self.mover.now = max(self.mover.now, self.end)


@pytest.mark.parametrize("shared", [False, True])
def test_speeds_and_whether_a_link_is_shared(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Timed(2e9, 3e9, shared)
    monkeypatch.setattr(time, "perf_counter", lambda: mover.now)
    store = Store(mover, 8 * MIB)
    links = measure(store, CPU, [MIB, 2 * MIB, 100 * MIB, 0])
    assert links == Links(pytest.approx(2e9), pytest.approx(3e9), shared, pytest.approx(BLOCK / 2e9))
    assert store.bytes_there == 0


def test_a_store_without_room_measures_nothing() -> None:
    assert measure(Store(Timed(1, 1, False), 0), CPU) == Links(0.0, 0.0, False, 0.0)
