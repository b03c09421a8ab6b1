"""Second memories by their names; how fast their links are, by a clock that the test moves, and that this is kept."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from checkmate.core import files
from checkmate.core.files import rows
from checkmate.core.host import Host
from checkmate.errors import HostError, InvalidProblem
from checkmate.host import BLOCK, known_links, measure, open_store, opening
from checkmate.host.store import Ending, Store, StoredValue

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for where, device, says in (
        ("file:", CUDA, "A file is for steps on the CPU, not on cuda:0: write host='pinned'"),
        ("file:", CPU, f"No file can be made in {tmp_path / 'temporary'}"),  # no folder is that for temporary files
        ("pinned", CPU, "Pinned memory is for steps on CUDA, not on cpu: write host='file:"),
        ("memory", CPU, "Pinned memory is for steps on CUDA"),
        ("file", CPU, "Unknown second memory 'file'"),
        ("/fast/disk", CPU, "Unknown second memory '/fast/disk': write 'file:/fast/disk'"),
    ):
        with pytest.raises(HostError, match=says):
            open_store(where, 1, device)


def test_a_small_disk_is_measured_with_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, room = os.posix_fallocate, 4 * MIB

    def small(file: int, offset: int, nbytes: int) -> None:
        if nbytes > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", small)
    monkeypatch.setattr(opening, "_measured", {})
    assert known_links(f"file:{tmp_path}", CPU, cache=False).send > 0
    monkeypatch.setattr(opening, "_measured", {})
    room = MIB
    with pytest.raises(HostError, match=r"No room for a file of 2\.10 MB .* Name another folder, .*free so much there"):
        known_links(f"file:{tmp_path}", CPU, cache=False)


class Timed:
    """A mover whose copies take seconds of a clock of its own: so many bytes per second each way."""

    name = "the test's memory"
    finish = close = lambda self: None

    def __init__(self, send: float, fetch: float, shared: bool) -> None:
        self.now, self.speeds, self.shared = 0.0, (send, fetch), shared
        self.ends = [0.0, 0.0]

    def out(self, storage: torch.UntypedStorage, value: StoredValue) -> Ending:
        return self.begin(0, value)

    def back(self, value: StoredValue, storage: torch.UntypedStorage) -> Ending:
        return self.begin(1, value)

    def begin(self, way: int, value: StoredValue) -> Ending:
        behind = self.ends if self.shared else self.ends[way : way + 1]
        self.ends[way] = max(self.now, *behind) + value.nbytes / self.speeds[way]
        return partial(self.reach, self.ends[way])

    def reach(self, end: float) -> None:
        self.now = max(self.now, end)


@pytest.mark.parametrize("shared", [False, True])
def test_speeds_and_whether_a_link_is_shared(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Timed(2e9, 3e9, shared)
    monkeypatch.setattr(time, "perf_counter", lambda: mover.now)
    store = Store(mover, 8 * MIB)
    links = measure(store, CPU, [MIB, 2 * MIB, 100 * MIB, 0])
    assert (links.send, links.fetch, links.latency) == pytest.approx((2e9, 3e9, BLOCK / 2e9))
    assert (links.budget, links.one_link) == (0, shared)
    assert store.bytes_there == 0
    with pytest.raises(InvalidProblem, match="send is a positive"):  # without room
        measure(Store(mover, 0), CPU)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(opening, "_measured", {})
    return tmp_path


def _forget(monkeypatch: pytest.MonkeyPatch, links: Host | None = None) -> list[str]:
    """As another process, which would measure other links; what is measured."""
    measured: list[str] = []

    def measure(where: str, device: torch.device) -> Host:
        measured.append(where)
        return links or Host(0, 1e9, 2e9)

    monkeypatch.setattr(opening, "_measured", {})
    monkeypatch.setattr(opening, "_measure", measure)
    return measured


def test_the_next_process_takes_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = known_links(f"file:{folder}", CPU)
    assert first.send > 0
    measured = _forget(monkeypatch)
    assert known_links(f"file:{folder}/.", CPU) == first
    assert measured == []
    known_links(f"file:{folder.parent}", CPU)
    assert measured == [f"file:{folder.parent}"]


def test_without_the_cache_it_is_measured_anew_and_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _forget(monkeypatch)
    known_links("file:", CPU, cache=False)
    assert (measured, [*folder.iterdir()]) == (["file:"], [])


@pytest.mark.parametrize("wrong", [{"send": 0.0}, {"fetch": "fast"}, {"latency": -1.0}, {"more": 1}])
def test_a_damaged_record_is_measured_anew_with_a_warning(
    folder: Path, wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _forget(monkeypatch)
    known_links("file:", CPU)
    with rows(opening.TABLE, write=True) as kept:
        ((place, document),) = kept.beginning("").items()
        kept.put({place: document | wrong})
    other = Host(0, 3e9, 4e9, one_link=True, latency=1e-3)
    _forget(monkeypatch, other)
    assert known_links("file:", CPU) == other
    assert "measured anew" in caplog.text
    _forget(monkeypatch)
    assert known_links("file:", CPU) == other
