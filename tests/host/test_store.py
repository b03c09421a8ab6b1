"""What a store promises, with a mover whose copies end when the test says so."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from checkmate.errors import CheckmateError, HostError
from checkmate.host.store import BLOCK, Ending, Store, StoredValue, rounded


class ByHand:
    """A mover that notes what it is asked."""

    name = "the test's memory"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.finish, self.close = (partial(self.asked.append, n) for n in ("finish", "close"))
        self.extents: list[tuple[range, ...]] = []  # of what was sent
        self.error: BaseException | None = None

    def out(self, storage: torch.UntypedStorage, value: StoredValue) -> Ending:
        self.extents.append(value.extents)
        return self.copied("out")

    def back(self, value: StoredValue, storage: torch.UntypedStorage) -> Ending:
        return self.copied("back")

    def copied(self, way: str) -> Ending:
        self.asked.append(way)
        error = self.error

        def wait() -> BaseException | None:
            if isinstance(error, KeyboardInterrupt):
                raise error
            return error

        return wait


def sent(store: Store, key: int, nbytes: int) -> None:
    store.send(key, torch.UntypedStorage(nbytes))
    store.wait(key)


def blocks(first: int, end: int) -> tuple[range, ...]:
    return (range(first * BLOCK, end * BLOCK),)


def test_bytes_there_are_counted_from_send_to_drop() -> None:
    store = Store(ByHand(), 10 * BLOCK)
    store.send(0, torch.UntypedStorage(2 * BLOCK + 1))
    assert store.bytes_there == 3 * BLOCK
    sent(store, 1, 0)
    sent(store, 2, 1)
    store.wait(0)
    store.drop(0)
    assert store.bytes_there == BLOCK
    store.fetch(2, torch.UntypedStorage(1))
    store.wait(2)
    assert store.bytes_there == BLOCK


def _under_way(call: Callable[[int, torch.UntypedStorage], None]) -> weakref.ref[torch.UntypedStorage]:
    """A storage that only the store holds, in a call for value 0."""
    storage = torch.UntypedStorage(8)
    call(0, storage)
    return weakref.ref(storage)


def test_storages_live_until_the_wait_and_go_with_it() -> None:
    store = Store(mover := ByHand(), BLOCK)
    for call in (store.send, store.fetch):
        alive = _under_way(call)
        assert alive() is not None
        store.wait(0)
        assert alive() is None
    store.drop(0)
    mover.error = KeyboardInterrupt()
    alive = _under_way(store.send)
    with pytest.raises(KeyboardInterrupt):
        store.wait(0)
    assert alive() is not None  # the wait is broken off: its copy may be under way
    store.reset()
    assert alive() is None


REFUSED = [
    (lambda store: store.fetch(7, torch.UntypedStorage(1)), "Value 7 is not in the test's memory"),
    (lambda store: store.drop(7), "Value 7 is not in the test's memory"),
    (lambda store: store.wait(7), "Nothing of value 7 is under way"),
    (lambda store: store.wait(0), "Nothing of value 0 is under way"),
    (lambda store: store.send(0, torch.UntypedStorage(1)), "Value 0 is in the test's memory already"),
    (lambda store: store.fetch(0, torch.UntypedStorage(9)), "Value 0 has 8 B there, and 9 B here"),
    (lambda store: store.fetch(1, torch.UntypedStorage(8)), "Value 1 is under way"),
    (lambda store: store.drop(1), "Value 1 is under way .* before it is dropped"),
    (lambda store: store.send(2, torch.UntypedStorage(BLOCK)), r"No room for value 2 .* 8.19 kB .* are taken"),
]


def test_what_a_plan_must_not_do_is_refused() -> None:
    store = Store(mover := ByHand(), 2 * BLOCK)
    sent(store, 0, 8)
    store.send(1, torch.UntypedStorage(8))
    for call, says in REFUSED:
        with pytest.raises(HostError, match=says):
            call(store)
        assert mover.asked == ["out", "out"]
        assert store.bytes_there == 2 * BLOCK


def test_what_went_wrong_in_a_copy_is_told_by_its_wait() -> None:
    store = Store(mover := ByHand(), 10 * BLOCK)
    sent(store, 0, 8)
    mover.error = OSError(5, "Input/output error")
    store.fetch(0, torch.UntypedStorage(8))
    with pytest.raises(CheckmateError, match=r"The copy of 8 B from the test's memory failed: .*Input/output error"):
        store.wait(0)
    store.send(1, torch.UntypedStorage(8))
    with pytest.raises(CheckmateError, match="The copy of 8 B to the test's memory failed") as raised:
        store.wait(1)
    assert raised.value.__cause__ is mover.error
    assert store.bytes_there == BLOCK  # what was not copied whole is not there
    with pytest.raises(HostError, match="Value 1 is not in"):
        store.fetch(1, torch.UntypedStorage(8))


def test_a_step_that_broke_off_leaves_nothing() -> None:
    store = Store(mover := ByHand(), 3 * BLOCK)
    sent(store, 0, 8)
    alive = _under_way(lambda _, source: store.send(1, source))
    mover.finish = lambda: mover.asked.append("finish" if alive() is not None else "too late")
    store.reset()
    assert mover.asked == ["out", "out", "finish"]
    assert (store.bytes_there, alive()) == (0, None)
    sent(store, 0, 3 * BLOCK)


def test_a_store_is_closed_once_by_hand_or_when_it_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(mover := ByHand(), BLOCK)
    store.close()
    store.close()
    with pytest.raises(HostError, match="is closed"):
        store.send(0, torch.UntypedStorage(1))
    with pytest.raises(HostError, match="is closed"):
        store.wait(0)
    del store
    assert mover.asked == ["finish", "close"]
    other = Store(mover, BLOCK)
    del other
    assert mover.asked == ["finish", "close"] * 2
    store, parent = Store(forked := ByHand(), BLOCK), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(HostError, match=f"opened by process {parent}. This one was forked"):
        store.send(0, torch.UntypedStorage(1))
    del store
    assert forked.asked == []


def test_a_value_lies_in_pieces_where_no_gap_holds_it() -> None:
    store = Store(mover := ByHand(), 5 * BLOCK)
    for key in range(5):
        sent(store, key, BLOCK)
    for key in (0, 2, 3):
        store.drop(key)
    sent(store, 5, 2 * BLOCK)
    store.drop(4)
    sent(store, 6, BLOCK + 1)
    sent(store, 7, 0)
    assert mover.extents[-3:] == [blocks(2, 4), (*blocks(0, 1), *blocks(4, 5)), ()]


def test_any_order_finds_room_for_as_many_bytes_as_there_are() -> None:
    draw = random.Random(0)
    for capacity in (0, 1, 7 * BLOCK, 40 * BLOCK):
        mover, taken = ByHand(), dict[int, tuple[range, ...]]()
        store = Store(mover, capacity)
        for key in range(400):
            if taken and draw.random() < 0.5:
                other = draw.choice([*taken])
                store.drop(other)
                del taken[other]
                continue
            nbytes, free = draw.randrange(6 * BLOCK), store.capacity - store.bytes_there
            if rounded(nbytes) > free:
                with pytest.raises(HostError, match="No room"):
                    sent(store, key, nbytes)
                continue
            sent(store, key, nbytes)
            taken[key] = mover.extents[-1]
            assert sum(map(len, taken[key])) == rounded(nbytes)
            parts = [part for extents in taken.values() for extent in extents for part in extent[::BLOCK]]
            assert len(parts) == len({*parts}) == store.bytes_there // BLOCK
            assert all(part in range(0, store.capacity, BLOCK) for part in parts)
        for key in taken:
            store.drop(key)
        sent(store, 400, store.capacity)
        assert mover.extents[-1] == (blocks(0, store.capacity // BLOCK) if capacity else ())
