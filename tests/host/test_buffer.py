"""The file of a second memory: where it cannot be had, the error says what is missing."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.errors import HostError
from checkmate.host.buffer import Buffer
from checkmate.host.slots import BLOCK


def test_its_bytes_are_taken_and_it_has_no_name(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, 100 * BLOCK)
    assert os.fstat(buffer.fd).st_blocks * 512 >= 100 * BLOCK
    assert os.fstat(buffer.fd).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    buffer.close()


def test_a_full_disk_is_known_at_once(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(HostError, match=rf"{2 * free:_} bytes\) in {tmp_path}: .* are free there .*host_budget"):
        Buffer(tmp_path, 2 * free // BLOCK * BLOCK + (2 * free % BLOCK))


@pytest.fixture
def largest_file() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_of_files_is_named(tmp_path: Path, largest_file: int) -> None:
    with pytest.raises(HostError, match=rf"this process may have 1.05 MB \({largest_file:_} bytes\) \(ulimit -f\)"):
        Buffer(tmp_path, largest_file + BLOCK)
    Buffer(tmp_path, largest_file).close()


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_that_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=f"No file can be made in {tmp_path / name}: .*host='file:"):
        Buffer(tmp_path / name, BLOCK)


def test_a_file_system_that_refuses_every_alignment_is_used_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def refuse(*args: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refuse)
    buffer = Buffer(tmp_path, BLOCK)
    assert (buffer.direct, buffer.alignment) == (False, 1)
    assert write(buffer.fd, b"odd", 1) == 3
    buffer.close()
