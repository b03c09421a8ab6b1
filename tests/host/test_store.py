"""What a store promises, with a mover whose copies end when the test says so."""

from __future__ import annotations

import os
import random
import weakref

import pytest
import torch

from checkmate.errors import CheckmateError, HostError
from checkmate.host.store import BLOCK, Extent, FreeSpace, Slot, Store, Wait, rounded


class ByHand:
    """A mover that notes what it is asked."""

    name = "the test's memory"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: BaseException | None = None

    def out(self, storage: torch.UntypedStorage, slot: Slot) -> Wait:
        self.asked.append("out")
        return self.copied(self.error)

    def back(self, slot: Slot, storage: torch.UntypedStorage) -> Wait:
        self.asked.append("back")
        return self.copied(self.error)

    def copied(self, error: BaseException | None) -> Wait:
        def wait() -> BaseException | None:
            if isinstance(error, KeyboardInterrupt):
                raise error
            return error

        return wait

    def finish(self) -> None:
        self.asked.append("finish")

    def close(self) -> None:
        self.asked.append("close")

    def abandon(self) -> None:
        self.asked.append("abandon")


def sent(store: Store, key: int, nbytes: int) -> None:
    store.send(key, torch.UntypedStorage(nbytes))
    store.wait(key)


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


def test_storages_live_until_the_wait_and_go_with_it() -> None:
    store = Store(ByHand(), BLOCK)
    source, landing = torch.UntypedStorage(8), torch.UntypedStorage(8)
    alive = [weakref.ref(storage) for storage in (source, landing)]
    store.send(0, source)
    del source
    assert alive[0]() is not None
    store.wait(0)
    assert alive[0]() is None
    store.fetch(0, landing)
    del landing
    assert alive[1]() is not None
    store.wait(0)
    assert alive[1]() is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda store: store.fetch(7, torch.UntypedStorage(1)), "Value 7 is not in the test's memory"),
        (lambda store: store.drop(7), "Value 7 is not in the test's memory"),
        (lambda store: store.wait(7), "Nothing of value 7 is under way"),
        (lambda store: store.wait(0), "Nothing of value 0 is under way"),
        (lambda store: store.send(0, torch.UntypedStorage(1)), "Value 0 is in the test's memory already"),
        (lambda store: store.fetch(0, torch.UntypedStorage(9)), "Value 0 has 8 B, and is to land in 9 B"),
        (lambda store: store.fetch(1, torch.UntypedStorage(8)), "Value 1 is under way"),
        (lambda store: store.drop(1), "Value 1 is under way .* before it is dropped"),
        (lambda store: store.send(2, torch.UntypedStorage(BLOCK)), r"No room for value 2 .* 8.19 kB .* are taken"),
    ],
)
def test_what_a_plan_must_not_do_is_refused(call: object, says: str) -> None:
    mover = ByHand()
    store = Store(mover, 2 * BLOCK)
    sent(store, 0, 8)
    store.send(1, torch.UntypedStorage(8))
    with pytest.raises(HostError, match=says):
        call(store)
    assert mover.asked == ["out", "out"]
    assert store.bytes_there == 2 * BLOCK


def test_what_went_wrong_in_a_copy_is_told_by_its_wait() -> None:
    mover = ByHand()
    store = Store(mover, 10 * BLOCK)
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
    mover = ByHand()
    store = Store(mover, 3 * BLOCK)
    sent(store, 0, 8)
    source = torch.UntypedStorage(8)
    alive = weakref.ref(source)
    store.send(1, source)
    del source
    mover.finish = lambda: mover.asked.append("finish" if alive() is not None else "too late")
    store.reset()
    assert mover.asked == ["out", "out", "finish"]
    assert (store.bytes_there, alive()) == (0, None)
    sent(store, 0, 3 * BLOCK)


def test_a_wait_that_is_broken_off_keeps_the_storage_until_the_reset() -> None:
    mover = ByHand()
    store = Store(mover, BLOCK)
    mover.error = KeyboardInterrupt()
    source = torch.UntypedStorage(8)
    alive = weakref.ref(source)
    store.send(0, source)
    del source
    with pytest.raises(KeyboardInterrupt):
        store.wait(0)
    assert alive() is not None  # its copy may be under way
    store.reset()
    assert alive() is None


def test_a_store_is_closed_once_by_hand_or_when_it_is_deleted() -> None:
    mover = ByHand()
    store = Store(mover, BLOCK)
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


def test_a_forked_child_must_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = ByHand()
    store, parent = Store(mover, BLOCK), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(HostError, match=f"opened by process {parent}. This one was forked"):
        store.send(0, torch.UntypedStorage(1))
    del store
    assert mover.asked == ["abandon"]


def test_a_value_lies_in_pieces_where_no_gap_holds_it() -> None:
    space = FreeSpace(5 * BLOCK)
    values = [space.take(BLOCK) for _ in range(5)]
    space.give(values[0])
    space.give(values[2])
    space.give(values[3])
    assert space.take(2 * BLOCK) == (Extent(2 * BLOCK, 2 * BLOCK),)
    space.give(values[4])
    assert space.take(2 * BLOCK) == (Extent(0, BLOCK), Extent(4 * BLOCK, BLOCK))
    assert space.take(1) is None
    assert space.take(0) == ()


def test_any_order_finds_room_for_as_many_bytes_as_there_are() -> None:
    draw = random.Random(0)
    for capacity in (0, 1, 7 * BLOCK, 40 * BLOCK):
        space, taken = FreeSpace(capacity), []
        for _ in range(400):
            if taken and draw.random() < 0.5:
                space.give(taken.pop(draw.randrange(len(taken))))
                continue
            nbytes, free = draw.randrange(6 * BLOCK), space.free
            extents = space.take(nbytes)
            assert (extents is None) == (rounded(nbytes) > free)
            if extents is not None:
                assert sum(extent.nbytes for extent in extents) == rounded(nbytes)
                taken.append(extents)
            blocks = [b for extents in taken for extent in extents for b in range(extent.begin, extent.end, BLOCK)]
            assert len(blocks) == len({*blocks}) == (space.capacity - space.free) // BLOCK
            assert all(0 <= block < space.capacity for block in blocks)
        for extents in taken:
            space.give(extents)
        assert space.take(capacity) == ((Extent(0, rounded(capacity)),) if capacity else ())
