"""Copies to and from a file: bits, threads beside the step, and what is left when anything goes wrong."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkmate.errors import HostError
from checkmate.host import files, open_store
from checkmate.host.files import FileMover
from checkmate.host.store import BLOCK, Store
from tests.support.processes import run_fresh_python

CPU = torch.device("cpu")
TO_THE_END = 60.0  # seconds: nothing that is right waits so long


class Random:
    """Random bytes at an address so much above a multiple of 4096, with what a store asks of a storage."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        whole = torch.randint(0, 256, (nbytes + 2 * BLOCK,), dtype=torch.uint8)
        begin = -whole.data_ptr() % BLOCK + shift
        self.tensor = whole[begin : begin + nbytes]

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def nbytes(self) -> int:
        return self.tensor.numel()

    def bits(self) -> bytes:
        return self.tensor.numpy().tobytes()


def wait(store: Store, call: Callable[[int, Any], None], key: int, some: Any) -> None:
    call(key, some)
    store.wait(key)


def threads() -> set[threading.Thread]:
    """Those of stores: other tests' steps may have some too, for as long as PyTorch keeps their code."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkmate-")}


@pytest.fixture(params=["direct", "cached"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder; as if its file system had no way past the page cache, too. No file and no thread stays."""
    really = fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(fd, command, flags)

    if request.param == "cached":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    before = threads()
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert threads() <= before


@pytest.mark.parametrize("tried", [(64, 512, BLOCK), (512, BLOCK), (BLOCK,)], ids="alignments {}".format)
def test_bits_come_back_in_any_order(tried: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever alignment of addresses a disk asks for: one that asks for less is served as well."""
    monkeypatch.setattr(files, "ALIGNMENTS", tried)
    monkeypatch.setattr(files, "BOUNCE", 2 * BLOCK)
    draw, capacity = random.Random(1), 64 * BLOCK
    store = open_store(f"file:{folder}", capacity, CPU)
    there: dict[int, bytes] = {}
    under_way: dict[int, Random | None] = {}

    def settle(key: int) -> None:
        if key in under_way:
            store.wait(key)
            landed = under_way.pop(key)
            assert landed is None or landed.bits() == there[key]

    for key in range(150):
        nbytes = draw.choice([0, 1, 63, 4095, 4096, 4097, 4096 + 511, draw.randrange(12 * BLOCK)])
        while store.bytes_there + nbytes + BLOCK > capacity:
            other = draw.choice([*there])
            settle(other)
            store.drop(other)
            del there[other]
        some = Random(nbytes, draw.choice([0, 64, 448, 512, 1]))
        store.send(key, some)
        there[key], under_way[key] = some.bits(), None
        for other in draw.sample([*there], min(2, len(there))):
            settle(other)
            under_way[other] = Random(len(there[other]), draw.choice([0, 64, 448, 512, 1]))
            store.fetch(other, under_way[other])
    for key in there:
        settle(key)
    store.close()


def test_threads_share_a_store(folder: Path) -> None:
    store, wrong = open_store(f"file:{folder}", 100 * BLOCK, CPU), []

    def step(first: int) -> None:
        draw = random.Random(first)
        for key in range(first, first + 40):
            some, landing = (Random(nbytes) for nbytes in [draw.randrange(20 * BLOCK)] * 2)
            wait(store, store.send, key, some)
            wait(store, store.fetch, key, landing)
            store.drop(key)
            wrong.extend([key] * (some.bits() != landing.bits()))

    steps = [threading.Thread(target=step, args=(100 * n,)) for n in range(4)]
    for one in steps:
        one.start()
    for one in steps:
        one.join()
    assert wrong == []
    assert store.bytes_there == 0
    store.close()


class Gate:
    """Where a thread stops, in a call of the file, until it is let on."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        call = getattr(os, name)
        patch.setattr(os, name, lambda *args: (self.reach(), call(*args))[1])

    def reach(self) -> None:
        self.reached.set()
        assert self.open.wait(TO_THE_END)


def test_copies_run_beside_the_step_and_in_both_directions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file:{folder}", 10 * BLOCK, CPU)
    first, second, landing = (Random(2 * BLOCK + 9, 64) for _ in range(3))
    wait(store, store.send, 0, first)
    writes = Gate(monkeypatch, "pwrite")
    store.send(1, second)
    assert writes.reached.wait(TO_THE_END)  # the thread is in the midst of it
    torch.rand(100, 100) @ torch.rand(100, 100)  # and so is the step
    wait(store, store.fetch, 0, landing)  # the other direction does not stand behind
    assert landing.bits() == first.bits()
    waited = threading.Thread(target=store.wait, args=(1,))
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()  # for the copy that is still under way
    writes.open.set()
    waited.join(TO_THE_END)
    assert not waited.is_alive()
    store.close()


def test_nothing_is_freed_while_it_is_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file:{folder}", 10 * BLOCK, CPU)
    writes = Gate(monkeypatch, "pwrite")
    values = [Random(BLOCK), Random(BLOCK)]
    for key in (0, 1):
        store.send(key, values[key])
    assert writes.reached.wait(TO_THE_END)
    over = threading.Event()
    end = threading.Thread(target=lambda: (store.reset(), over.set()))
    end.start()
    assert not over.wait(0.05)  # one copy is under way: the step's end waits
    writes.open.set()
    end.join(TO_THE_END)
    assert over.is_set()
    assert store.bytes_there == 0
    wait(store, store.send, 1, values[0])
    landing, reads = Random(BLOCK), Gate(monkeypatch, "preadv")
    store.fetch(1, landing)
    assert reads.reached.wait(TO_THE_END)
    threading.Timer(0.01, reads.open.set).start()
    store.close()  # in the middle of a copy, which ends first
    assert landing.bits() == values[0].bits()
    with pytest.raises(HostError, match="closed"):
        store.wait(1)


def test_a_deleted_store_ends_its_copies_threads_and_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads()
    store = open_store(f"file:{folder}", BLOCK, CPU)
    assert sorted(thread.name for thread in threads() - before) == ["checkmate-back_0", "checkmate-out_0"]
    writes = Gate(monkeypatch, "pwrite")
    store.send(0, Random(BLOCK))
    threading.Timer(0.01, writes.open.set).start()
    del store
    assert threads() <= before


def failing(code: int) -> Callable[..., int]:
    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_errors_of_the_disk_reach_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file:{folder}", 10 * BLOCK, CPU)
    wait(store, store.send, 0, Random(5000))
    for key, name, call, says in (
        (0, "preadv", failing(errno.EIO), "from the file in .* failed: .*Input/output"),
        (1, "pwrite", failing(errno.EIO), "to the file in .* failed"),
        (0, "preadv", lambda *args: 0, r"0 of .* bytes were moved at byte 0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            (store.send if key else store.fetch)(key, Random(5000))
            with pytest.raises(HostError, match=says):
                store.wait(key)
    store.reset()  # and then all goes on
    there_and_back(store, Random(9000, 64), Random(9000, 64))


def there_and_back(store: Store, some: Random, landing: Random) -> None:
    wait(store, store.send, 0, some)
    wait(store, store.fetch, 0, landing)
    assert landing.bits() == some.bits()
    store.close()


def test_calls_that_move_less_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read, short = os.pwrite, os.preadv, 2 * BLOCK
    store = open_store(f"file:{folder}", 10 * BLOCK, CPU)
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, at: write(fd, memoryview(piece)[:short], at))
    monkeypatch.setattr(os, "preadv", lambda fd, pieces, at: read(fd, [memoryview(pieces[0])[:short]], at))
    there_and_back(store, Random(7 * BLOCK + 5), Random(7 * BLOCK + 5))


KILLED = "store.send(1, torch.rand(100000).untyped_storage()); os.kill(os.getpid(), 9)"
ENDED = "store.send(1, torch.rand(100000).untyped_storage())"
FORKED = """
child = os.fork()
try:
    store.fetch(0, torch.UntypedStorage(4000))
except Exception as error:
    assert child == 0 and "forked" in str(error)
else:
    assert child and os.waitpid(child, 0)[1] == 0
    store.wait(0)
if child == 0:
    file = f"/proc/self/fd/{store._mover._file.fd}"
    assert os.path.lexists(file)
    del store
    assert not os.path.lexists(file)
"""
ENDINGS = f"""
import os, sys, torch
from checkmate.host import open_store
codes = []
for ending in {[KILLED, ENDED, FORKED]!r}:
    if (child := os.fork()) == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(codes)
    sys.exit()
store = open_store("file:" + sys.argv[1], 1 << 20, torch.device("cpu"))
store.send(0, torch.rand(1000).untyped_storage())
store.wait(0)
exec(ending)
"""


@pytest.mark.slow
def test_a_process_leaves_no_file_however_it_ends(tmp_path: Path) -> None:
    """Killed, at its end, or forked: forks of one process, as each would import PyTorch for longer than it runs."""
    assert run_fresh_python("-c", ENDINGS, str(tmp_path)).stdout == "[-9, 0, 0]\n"
    assert list(tmp_path.iterdir()) == []


def test_threads_hold_no_storage(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}", BLOCK, CPU)
    storage = torch.UntypedStorage(8)
    held = sys.getrefcount(storage)
    wait(store, store.send, 0, storage)
    assert sys.getrefcount(storage) == held
    store.close()


def test_its_bytes_are_taken_and_it_has_no_name(tmp_path: Path) -> None:
    mover = FileMover(tmp_path, 100 * BLOCK)
    about = os.fstat(mover._file.fd)
    assert about.st_blocks * 512 >= 100 * BLOCK
    assert about.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    mover.close()
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(HostError, match=rf"{2 * free:_} bytes\) in {tmp_path}: .* are free there .*host_budget"):
        FileMover(tmp_path, 2 * free)


def test_a_limit_of_files_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(HostError, match=r"this process may have 1.05 MB \(1_048_576 bytes\) \(ulimit -f\)"):
            FileMover(tmp_path, (1 << 20) + BLOCK)
        FileMover(tmp_path, 1 << 20).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(HostError, match=f"No file can be made in {tmp_path / name}: .*host='file:"):
            FileMover(tmp_path / name, BLOCK)


def test_a_file_system_that_refuses_every_alignment_is_used_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.EINVAL))
        mover = FileMover(tmp_path, 4 * BLOCK)
    assert not fcntl.fcntl(mover._file.fd, fcntl.F_GETFL) & os.O_DIRECT
    there_and_back(Store(mover, 4 * BLOCK), Random(9000, 1), Random(9000, 64))
