"""Files that processes share: whole or not at all, one writer at a time, and nothing odd in the folder hangs a run."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from checkmate import InvalidProblem
from checkmate.core import files


def _read(path: Path) -> dict:
    return files.read_json(path, format="f", version=3, what="thing")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    document = {"format": "f", "version": 3, "seconds": [0.1, 1e-300], "text": "π"}
    files.write_json(tmp_path / "a.json", document)
    assert _read(tmp_path / "a.json") == document
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": "g", "version": 3}', '{"format": "f"}', "[" * 10**6])
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidProblem):
        _read(tmp_path / "a.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1" * 10_000])
def test_what_is_no_number_is_refused(tmp_path: Path, number: str) -> None:
    (tmp_path / "a.json").write_text(f'{{"format": "f", "version": 3, "x": {number}}}')
    with pytest.raises(InvalidProblem, match="not JSON"):
        _read(tmp_path / "a.json")


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"format": "f", "version": 3, "x": "\xff\xfe"}')
    with pytest.raises(InvalidProblem, match="not JSON"):
        _read(tmp_path / "a.json")


def test_a_pipe_a_folder_and_a_huge_file_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "huge.json").write_text(json.dumps({"format": "f", "version": 3}) + " " * 100)
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    for name in ("pipe", "folder", "huge"):
        with pytest.raises(InvalidProblem, match="is no file, or one of more than 100 bytes"):
            _read(tmp_path / f"{name}.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"format": "f", "version": 3})
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert _read(tmp_path / "a.json") == {"format": "f", "version": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def _hold_and_die(path: Path) -> None:
    with files.locked(path):
        os._exit(0)


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.get_context("fork").Process(target=_hold_and_die, args=(tmp_path / "a.json",))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    monkeypatch.setattr(files, "LOCK_SECONDS", 1.0)
    with files.locked(tmp_path / "a.json"):
        pass


@pytest.mark.long
def test_a_lock_that_is_not_let_go_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    with files.locked(tmp_path / "a.json"), pytest.raises(OSError, match=r"a\.lock"), files.locked(tmp_path / "a.json"):
        pass
