"""Copies to pinned memory: what waits for what, with a stand-in for CUDA, and on a device the bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from checkmate.devices import kind_of
from checkmate.errors import HostError
from checkmate.host import measure, open_store, pinned
from checkmate.host.store import BLOCK, Store
from tests.support.simulated_cuda.install import is_installed

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


class Cuda:
    """What stands for CUDA: streams, the first of which computes, and a device whose memory is the host's.

    Streams do what they were given as late as the host says, as early or as late beside each other as events let them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: dict[int, int] = {}
        self.status = 0
        self.streams = [Stream(self)]
        self.inside = [self.streams[0]]
        self.synchronized = 0
        self.eager = 0  # which stream goes first of those that can: 0 the one that computes, -1 the last
        monkeypatch.setattr(torch, "Stream", self.make)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self.inside[-1])
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(pinned, "kind_of", lambda device: kind_of(CUDA))
        monkeypatch.setattr(pinned, "_streams", pinned._streams.__wrapped__)  # of this stand-in alone
        monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source, non_blocking: self.copy(to, source, non_blocking))

    def make(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.inside[-1].queue.append(lambda: to.numpy().__setitem__(slice(None), source.numpy()))

    def run(self) -> None:
        """Do all there is to do."""
        while ready := [stream for stream in self.streams if stream.queue and stream.goes_on()]:
            done = ready[self.eager].queue.pop(0)
            if not isinstance(done, list):
                done()
        assert not any(stream.queue for stream in self.streams)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Stream:
    """Calls, and events to wait for, in order. An event is a list, in which something is once it has happened."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.queue = cuda, []

    def __enter__(self) -> None:
        self.cuda.inside.append(self)

    def __exit__(self, *error: object) -> None:
        self.cuda.inside.pop()

    def record_event(self) -> list[bool]:
        event: list[bool] = []
        self.queue.append(partial(event.append, True))
        return event

    def wait_event(self, event: list[bool]) -> None:
        self.queue.append(event)

    def goes_on(self) -> bool:
        return self.queue[0] != []

    def synchronize(self) -> None:
        self.cuda.synchronized += 1
        self.cuda.run()


def pinned_store(nbytes: int) -> Store:
    return Store(pinned.PinnedMover(CPU, nbytes), nbytes)


@pytest.mark.parametrize("eager", [0, -1], ids=["compute", "copies"])
def test_copies_are_ordered_by_the_compute_stream_alone(eager: int, cuda: Cuda) -> None:
    """The source is written before its copy out, and again after the wait; the landing likewise."""
    cuda.eager = eager
    store, compute = pinned_store(3 * BLOCK), cuda.streams[0]
    nbytes = BLOCK + 5
    value, landing, seen = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(3))
    compute.queue.append(lambda: value.fill_(7))
    store.send(0, value.untyped_storage())
    store.wait(0)
    compute.queue.append(lambda: value.fill_(9))  # the memory is another value's now
    compute.queue.append(lambda: landing.fill_(1))  # and this was another's before
    store.fetch(0, landing.untyped_storage())
    store.wait(0)
    compute.queue.append(lambda: seen.numpy().__setitem__(slice(None), landing.numpy()))
    store.drop(0)
    other = torch.full((3 * BLOCK,), 5, dtype=torch.uint8)
    store.send(1, other.untyped_storage())  # into the bytes that were just fetched from
    store.wait(1)
    assert cuda.synchronized == 0
    cuda.run()
    store.close()
    assert {*seen.tolist()} == {7}
    assert {*value.tolist()} == {9}


def test_a_value_in_pieces(cuda: Cuda) -> None:
    store = pinned_store(3 * BLOCK)

    def moved(call: Any, key: int, value: torch.Tensor) -> None:
        call(key, value.untyped_storage())
        store.wait(key)

    for key in range(3):
        moved(store.send, key, torch.zeros(BLOCK, dtype=torch.uint8))
    store.drop(0)
    store.drop(2)
    value = torch.randint(0, 256, (BLOCK + 9,), dtype=torch.uint8)
    landing = torch.zeros_like(value)
    moved(store.send, 3, value)
    moved(store.fetch, 3, landing)
    cuda.run()
    store.close()
    assert landing.tolist() == value.tolist()


def test_pinned_memory_is_as_large_as_asked_and_let_go_after_all_copies(cuda: Cuda) -> None:
    store = pinned_store(5 * BLOCK)
    assert [*cuda.registered.values()] == [5 * BLOCK]
    store.send(0, torch.zeros(8, dtype=torch.uint8).untyped_storage())
    store.close()
    assert cuda.synchronized == 2  # both streams
    assert cuda.registered == {}


def test_memory_that_cannot_be_pinned(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is not left for the next kernel."""
    left = ["CUDA error: invalid argument"]

    def kernel(*args: Any, **kwargs: Any) -> None:
        if left:
            raise RuntimeError(left.pop())

    cuda.status = 2
    with pytest.raises(HostError, match="The host does not give"):
        pinned_store(1 << 60)
    monkeypatch.setattr(torch, "zeros", kernel)
    with pytest.raises(HostError, match=r"8.19 kB .* cannot be pinned: CUDA error 2.*ulimit -l"):
        pinned_store(2 * BLOCK)
    assert not left


def test_a_home_is_copied_from_and_to_its_own_memory(cuda: Cuda) -> None:
    store, own, landing = (
        pinned_store(0),
        torch.full((BLOCK + 5,), 3, dtype=torch.uint8),
        torch.zeros(BLOCK + 5, dtype=torch.uint8),
    )
    store.adopt(0, pinned.Pinned(BLOCK + 5, "pinned memory", own, (range(BLOCK + 5),), torch.device(CUDA)))
    store.fetch(0, landing.untyped_storage())
    store.wait(0)
    cuda.streams[0].queue.append(lambda: landing.add_(4))
    store.send(0, landing.untyped_storage())
    store.wait(0)
    store.reset()
    assert set(own.tolist()) == {7}


@pytest.mark.cuda
def test_two_streams_serve_all_stores_of_a_process() -> None:
    stores = [open_store("pinned", 2 * BLOCK, CUDA) for _ in range(2)]
    streams = {(store._mover._out, store._mover._back) for store in stores}
    for store in stores:
        store.close()
    assert len(streams) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_come_back_on_a_device() -> None:
    store = open_store("pinned", 64 << 20, CUDA)
    for round_ in range(4 if is_installed() else 20):  # what a device does at once, the simulated one does in turn
        values: dict[int, Any] = {key: torch.randn(1_000_003, device=CUDA) for key in range(8)}
        before = {key: value.cpu() for key, value in values.items()}
        for key, value in values.items():
            store.send(key, value.untyped_storage())
        for key in [*values]:
            store.wait(key)
            del values[key]  # its memory is the next one's, on the compute stream
            torch.randn(1_000_003, device=CUDA)
        for key in before:
            values[key] = torch.empty(1_000_003, device=CUDA)
            store.fetch(key, values[key].untyped_storage())
        for key in before:
            store.wait(key)
            store.drop(key)
            assert values[key].cpu().numpy().tobytes() == before[key].numpy().tobytes(), round_
    assert measure(store, CUDA).send > 0
    store.close()
