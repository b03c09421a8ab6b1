"""Measured costs on disk: nothing is lost, nothing damaged is believed, nothing in a file runs."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from checkmate import InvalidProblem
from checkmate.core import files
from checkmate.profiling import cost_cache as cache
from checkmate.profiling.cost_cache import Conditions, OpCost, OpTable, load, path_of, read, store, write

CONDITIONS = Conditions("cpu Some Processor (R) @ 3 GHz", "2.13.0+cpu", 2)
COSTS = {"aten.mm (float32[2, 3])": OpCost(1.25e-6, 24), "aten.sort": OpCost(0.5, 2**40), "aten.odd": None}


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "costs"))


def test_what_is_stored_is_loaded_exactly() -> None:
    assert load(CONDITIONS) == {}
    store(CONDITIONS, COSTS)
    assert load(CONDITIONS) == COSTS
    assert read(path_of(CONDITIONS)) == OpTable(CONDITIONS, COSTS)


def test_tests_do_not_touch_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.folder() == tmp_path / "costs"
    monkeypatch.undo()
    assert files.VARIABLE in os.environ  # set for the whole session, examples in docstrings included
    monkeypatch.delenv(files.VARIABLE)
    assert files.folder().name == "checkmate"


def test_ops_are_added_and_the_latest_counts() -> None:
    store(CONDITIONS, COSTS)
    store(CONDITIONS, {"aten.sort": OpCost(0.25, 1), "new": None})
    assert load(CONDITIONS) == {**COSTS, "aten.sort": OpCost(0.25, 1), "new": None}


@pytest.mark.parametrize("other", [{"threads": 1}, {"torch": "2.14.0"}, {"device": "cuda A"}, {"settings": "x"}])
def test_all_conditions_have_a_file_of_their_own(other: dict[str, object]) -> None:
    store(CONDITIONS, COSTS)
    assert load(replace(CONDITIONS, **other)) == {}


def test_file_names_are_safe() -> None:
    name = path_of(Conditions("cuda ../../NVIDIA \0 <b>|π", "2/1:0", 1)).name
    assert "/" not in name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert path_of(Conditions("..", "..", 1)).parent == files.folder()


GOOD = {"format": cache.FORMAT, "version": 1, "place": {"device": "d", "torch": "t", "threads": 1}, "ops": {}}
DAMAGED = {
    "empty": "",
    "half": '{"format": "checkmate-op-costs", "ver',
    "list": "[]",
    "another": '{"format": "other"}',
    "later": json.dumps({**GOOD, "version": cache.VERSION + 1}),
    "place": json.dumps({**GOOD, "place": {"device": 1, "torch": "t", "threads": 1}}),
    "no place": json.dumps({**GOOD, "place": {"torch": "t"}}),
    "ops": json.dumps({**GOOD, "ops": [1]}),
    "negative": json.dumps({**GOOD, "ops": {"a": [-1.0, 1]}}),
    "nan": json.dumps({**GOOD, "ops": {"a": [float("nan"), 1]}}),
    "text": json.dumps({**GOOD, "ops": {"a": ["1", 1]}}),
    "half a byte": json.dumps({**GOOD, "ops": {"a": [1.0, 0.5]}}),
    "no position": json.dumps({**GOOD, "ops": {"a": [1.0, 1, [-1, 1]]}}),
    "over half a byte": json.dumps({**GOOD, "ops": {"a": [1.0, 1, [0, 0.5]]}}),
    "three": json.dumps({**GOOD, "ops": {"a": [1.0, 1, 1]}}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_when_read_and_replaced_when_found(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(CONDITIONS)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(InvalidProblem):
        read(path)
    assert load(CONDITIONS) == {}
    assert "measured anew" in caplog.text
    store(CONDITIONS, COSTS)
    assert load(CONDITIONS) == COSTS


def test_a_good_file_is_read() -> None:
    path = path_of(CONDITIONS)
    path.parent.mkdir()
    path.write_text(json.dumps({**GOOD, "ops": {"a": [1, 2], "b": None}}))
    assert read(path).ops == {"a": OpCost(1.0, 2), "b": None}


@pytest.mark.parametrize(
    "change", [("1.25e-06,", "1.25e-09,"), ("1099511627776", "4"), ('"aten.odd": null', '"aten.odd": [1.0, 4]')]
)
def test_numbers_that_were_altered_are_noticed(change: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    store(CONDITIONS, COSTS)
    path = path_of(CONDITIONS)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(InvalidProblem, match="damaged: its checksum does not fit"):
        read(path)
    assert load(CONDITIONS) == {}
    assert "measured anew" in caplog.text


def test_files_from_before_there_were_checksums_are_read() -> None:
    store(CONDITIONS, COSTS)
    path = path_of(CONDITIONS)
    document = {**json.loads(path.read_text()), "version": cache.WITHOUT_CHECKSUM}
    del document["checksum"]
    path.write_text(json.dumps(document))
    assert load(CONDITIONS) == COSTS


def test_what_was_tried_is_kept_with_the_costs(tmp_path: Path) -> None:
    tried = {"add": OpCost(1.0, 8, {0: 0, 1: None}), "mm": OpCost(1.0, 8)}
    write(tmp_path / "ops.json", OpTable(CONDITIONS, tried))
    assert read(tmp_path / "ops.json").ops == tried


def test_a_file_of_other_conditions_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    path_of(CONDITIONS).parent.mkdir()
    write(path_of(CONDITIONS), OpTable(Conditions("cpu", "1.0", 9), COSTS))
    assert load(CONDITIONS) == {}
    assert "was measured at cpu, 9 threads" in caplog.text


def test_where_nothing_can_be_written_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "file"))
    store(CONDITIONS, COSTS)
    assert "not kept for the next time" in caplog.text


def _store_some(number: int) -> None:
    for i in range(10):
        store(CONDITIONS, {f"process {number} op {i}": OpCost(float(number), i)})


def test_many_processes_lose_nothing() -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_store_some, args=(number,)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert load(CONDITIONS) == {f"process {n} op {i}": OpCost(float(n), i) for n in range(6) for i in range(10)}
    assert {path.suffix for path in files.folder().iterdir()} == {".json", ".lock"}  # no half-written file


def test_a_held_lock_is_waited_for() -> None:
    path_of(CONDITIONS).parent.mkdir()
    thread = threading.Thread(target=store, args=(CONDITIONS, COSTS))
    with files.locked(path_of(CONDITIONS)):
        thread.start()
        time.sleep(0.1)
        assert load(CONDITIONS) == {}
    thread.join()
    assert load(CONDITIONS) == COSTS


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    store(CONDITIONS, COSTS)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(files.Path, "replace", fail)
        store(CONDITIONS, {"more": None})
    assert load(CONDITIONS) == COSTS
    assert {path.suffix for path in files.folder().iterdir()} == {".json", ".lock"}
