"""Files and what is kept on disk: nothing is lost, damaged or odd files are refused, and none hangs a run."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkmate.core import files
from checkmate.core.files import DATABASE, rows
from checkmate.errors import InvalidProblem
from tests.support.sampling import in_turn


def _read(path: Path) -> dict[str, Any]:
    return files.read_json(path, format="f", versions=[3], what="thing", most=2**20)


def test_a_document_is_read(tmp_path: Path) -> None:
    document = {"format": "f", "version": 3, "seconds": [0.1, 1e-300], "text": "π"}
    for name, packed in (("a.json", bytes), ("a.json.gz", gzip.compress)):
        (tmp_path / name).write_bytes(packed(json.dumps(document).encode()))
        assert _read(tmp_path / name) == document


NUMBERS = ["NaN", "Infinity", "-Infinity", "1" * 10_000]
REFUSED = {
    "not JSON": ["", "{", "[" * 10**6, *(f'{{"format": "f", "version": 3, "x": {number}}}' for number in NUMBERS)],
    "is no thing": ["[]", "3", '{"format": "g", "version": 3}'],
    "this checkmate reads 3": ['{"format": "f"}'],
}


@in_turn(says=REFUSED)
def test_what_is_no_such_document_is_refused(says: str, tmp_path: Path) -> None:
    for text in REFUSED[says]:
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(InvalidProblem, match=says):
            _read(tmp_path / "a.json")


def test_odd_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "huge.json").write_text(json.dumps({"format": "f", "version": 3}) + " " * 2**20)
    (tmp_path / "bytes.json").write_bytes(b'{"format": "f", "version": 3, "x": "\xff\xfe"}')
    (tmp_path / "half.json.gz").write_bytes(gzip.compress(b" " * 1000)[:-8])
    for name, says in (
        ("pipe.json", "it is no file"),
        ("folder.json", "it is no file"),
        ("huge.json", "holds more than 1_048_576 bytes"),
        ("bytes.json", "not JSON"),
        ("half.json.gz", "no gzip file"),
    ):
        with pytest.raises(InvalidProblem, match=says):
            _read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        _read(tmp_path / "none.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


DOCUMENTS: dict[str, Any] = {"one": [1.25e-6, 24], "two": {"a": 0.1}, "none": None, "π ' \0 \"": "text"}


@pytest.fixture(autouse=True)
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept" / DATABASE


def _put(documents: dict[str, Any]) -> None:
    with rows("things_1", write=True) as kept:
        kept.put(documents)


def _all() -> dict[str, Any]:
    with rows("things_1") as kept:
        return kept.beginning("")


def test_what_is_put_is_got_exactly(database: Path) -> None:
    assert _all() == {}
    assert not database.parent.exists()
    _put(DOCUMENTS)
    assert _all() == DOCUMENTS
    with rows("things_1") as kept:
        assert kept.get(["none", "unknown", "one"]) == {"none": None, "one": [1.25e-6, 24]}
        with pytest.raises(ValueError, match="not JSON compliant"):
            kept.put({"no number": float("nan")})
    with rows("things_2") as kept:
        assert kept.beginning("") == {}
    assert [path.name for path in database.parent.iterdir()] == [DATABASE]
    assert database.stat().st_mode & 0o077 == 0  # for this user alone


def test_what_begins_alike_comes_by_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    for key in ("ab-1", "ab-2", "a", "ab-3", "ac-1", "ab-2"):
        _put({key: key})
    with rows("things_1", write=True) as kept:
        assert [*kept.beginning("ab-")] == ["ab-2", "ab-3", "ab-1"]
        kept.note_use("ab-1")
        assert [*kept.beginning("ab-", 2)] == ["ab-1", "ab-2"]
        kept.prune(most=3, most_bytes=1000)
        assert [*kept.beginning("")] == ["ab-1", "ab-2", "ac-1"]
        kept.prune(most=3, most_bytes=len('"ab-1""ab-2"'))
        assert [*kept.beginning("")] == ["ab-1", "ab-2"]


def test_a_transaction_that_fails_changes_nothing() -> None:
    _put(DOCUMENTS)
    with pytest.raises(KeyError), rows("things_1", write=True) as kept:  # noqa: PT012  # the second call raises
        kept.put({"one": "other"})
        raise KeyError("of ours")
    assert _all() == DOCUMENTS
    with rows("things_1", write=True) as kept:  # and one that does not, replaces and drops
        kept.put({"one": 3})
        kept.drop([*DOCUMENTS, "unknown"][1:])
    assert _all() == {"one": 3}


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0 and no more", b"[]" * 3000])
def test_a_damaged_database_is_removed_with_an_error(content: bytes, database: Path) -> None:
    database.parent.mkdir()
    database.write_bytes(content)
    if content:
        with pytest.raises(OSError, match=r"cache\.sqlite: file is not a database"):
            _all()
        assert not database.exists()
    _put(DOCUMENTS)
    assert _all() == DOCUMENTS


def test_half_a_database_gives_nothing_wrong(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever page is missing or overwritten: a key has the document that was put, or none."""
    documents = {f"key {i}": i for i in range(500)}
    _put(documents)
    whole = database.read_bytes()
    page = int.from_bytes(whole[16:18], "big")
    assert len(whole) > 10 * page
    lost = 0
    for begin in range(0, len(whole), page):
        for rest in (b"", b"\x5a" * page + whole[begin + page :]):
            database.write_bytes(whole[:begin] + rest)
            try:
                found = _all()
            except OSError:
                found = {}
            assert found.items() <= documents.items()
            lost += len(found) < len(documents)
    assert lost > 20


def test_a_row_that_was_altered_is_left_out(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    for change, lost, named in (  # its document, or its key
        ("text = replace(text, '1.25e-06', '1.25e-09')", "one", "one"),
        ("key = 'three' WHERE key = 'two'", "two", "three"),
    ):
        database.unlink(missing_ok=True)
        _put(DOCUMENTS)
        with closing(sqlite3.connect(database)) as opened, opened:
            opened.execute(f"UPDATE things_1 SET {change}")
        caplog.clear()
        assert _all() == {key: document for key, document in DOCUMENTS.items() if key != lost}
        assert "damaged row of things_1" in caplog.text
        assert caplog.text.rstrip().endswith(named)


def _put_some(number: int) -> None:
    for i in range(10):
        with rows("things_1", write=True) as kept:
            count = kept.get(["count"]).get("count", 0)
            kept.put({f"process {number} key {i}": i, "count": count + 1})


def _in_forks(*calls: Callable[[], None]) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_many_processes_lose_nothing() -> None:
    _in_forks(*(partial(_put_some, number) for number in range(6)))
    assert _all() == {f"process {n} key {i}": i for n in range(6) for i in range(10)} | {"count": 60}


def _hold_and_die() -> None:
    with rows("things_1", write=True) as kept:
        kept.put({"half": 1})
        os._exit(0)


def test_who_dies_while_writing_leaves_what_was_there() -> None:
    _put(DOCUMENTS)
    _in_forks(_hold_and_die)
    assert _all() == DOCUMENTS
    _put({"more": 1})


def test_whoever_writes_is_waited_for(database: Path) -> None:
    _put({})
    thread = threading.Thread(target=_put, args=(DOCUMENTS,))
    with rows("things_1", write=True):
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
    thread.join()
    assert _all() == DOCUMENTS


def test_a_database_that_stays_locked_is_waited_for_once(database: Path) -> None:
    waited: list[float] = []
    connect = sqlite3.connect

    def noting(*where: Any, timeout: float, **about: Any) -> sqlite3.Connection:
        waited.append(timeout)
        return connect(*where, timeout=timeout, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LOCK_SECONDS", 0.01)
        patch.setattr(sqlite3, "connect", noting)
        _put(DOCUMENTS)
        with rows("things_1", write=True):
            for _ in range(5):
                with pytest.raises(OSError, match="database is locked"):
                    _put({"more": 1})
        _put({"more": 1})
        _put({"more": 1})
    assert waited == [0.01, 0.01, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.01]


def test_what_cannot_be_written_is_an_oserror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _put(DOCUMENTS)
    with monkeypatch.context() as patch:
        patch.setattr(files, "LOCK_SECONDS", 0.01)
        with rows("things_1", write=True), pytest.raises(OSError, match="database is locked"):
            _put({"more": 1})
    with monkeypatch.context() as patch:
        (tmp_path / "file").write_text("")
        patch.setenv(files.VARIABLE, str(tmp_path / "file"))
        with pytest.raises(OSError, match="file"):
            _put({"more": 1})
    with monkeypatch.context() as patch:
        patch.setattr(files, "sqlite3", None)
        with pytest.raises(OSError, match="built without SQLite"):
            _put({"more": 1})
    # a folder that can only be read, as in an image that many users start from, is read
    connect = sqlite3.connect
    read_only: Any = lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options)  # noqa: E731
    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert _all() == DOCUMENTS
    with pytest.raises(OSError, match="readonly database"):
        _put({"more": 1})
