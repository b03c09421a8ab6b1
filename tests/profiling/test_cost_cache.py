"""Measured costs on disk: nothing is lost, nothing damaged is believed, nothing in a file runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkmate.core import files
from checkmate.errors import InvalidProblem
from checkmate.profiling import cost_cache as cache
from checkmate.profiling.cost_cache import Conditions, OpCost, OpTable, load, read, store, write
from tests.support.sampling import in_turn

CONDITIONS = Conditions("cpu Some Processor (R) @ 3 GHz", "2.13.0+cpu", 2)
COSTS = {"aten.mm (float32[2, 3])": OpCost(1.25e-6, 24), "aten.sort": OpCost(0.5, 2**40), "aten.odd": None}


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "costs"))


def test_what_is_stored_is_loaded_exactly_and_the_latest_counts() -> None:
    assert load(CONDITIONS) == {}
    store(CONDITIONS, COSTS)
    assert load(CONDITIONS) == COSTS
    assert load(CONDITIONS, ["aten.odd", "unknown"]) == {"aten.odd": None}
    for name, other in {"threads": 1, "torch": "2.14.0", "device": "cuda A", "settings": "x"}.items():
        assert load(replace(CONDITIONS, **{name: other})) == {}, name  # all conditions have costs of their own
    store(CONDITIONS, {"aten.sort": OpCost(0.25, 1), "new": None})
    assert load(CONDITIONS) == {**COSTS, "aten.sort": OpCost(0.25, 1), "new": None}
    store(CONDITIONS, {}, without={"aten.sort", "new", "unknown"})
    assert load(CONDITIONS) == {key: cost for key, cost in COSTS.items() if key != "aten.sort"}


def test_tests_do_not_touch_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.folder() == tmp_path / "costs"
    monkeypatch.undo()
    assert files.VARIABLE in os.environ  # set for the whole session, examples in docstrings included
    monkeypatch.delenv(files.VARIABLE)
    assert files.folder().name == "checkmate"


GOOD = {"format": cache.FORMAT, "version": 1, "place": {"device": "d", "torch": "t", "threads": 1}, "ops": {}}
DAMAGED: dict[str, Any] = {
    "half": '{"format": "checkmate-op-costs", "ver',
    "another": {"format": "other"},
    "later": {**GOOD, "version": cache.VERSION + 1},
    "place": {**GOOD, "place": {"device": 1, "torch": "t", "threads": 1}},
    "no place": {**GOOD, "place": {"torch": "t"}},
    "ops": {**GOOD, "ops": [1]},
    "negative": {**GOOD, "ops": {"a": [-1.0, 1]}},
    "nan": {**GOOD, "ops": {"a": [float("nan"), 1]}},
    "text": {**GOOD, "ops": {"a": ["1", 1]}},
    "half a byte": {**GOOD, "ops": {"a": [1.0, 0.5]}},
    "no position": {**GOOD, "ops": {"a": [1.0, 1, [-1, 1]]}},
    "over half a byte": {**GOOD, "ops": {"a": [1.0, 1, [0, 0.5]]}},
    "three": {**GOOD, "ops": {"a": [1.0, 1, 1]}},
}


@in_turn(damage=DAMAGED)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text(DAMAGED[damage] if damage == "half" else json.dumps(DAMAGED[damage]))
    with pytest.raises(InvalidProblem):
        read(path)


def test_a_good_file_is_read_of_earlier_versions_too(tmp_path: Path) -> None:
    """What was tried is kept with the costs."""
    path = tmp_path / "ops.json"
    path.write_text(json.dumps({**GOOD, "ops": {"a": [1, 2], "b": None}}))
    assert read(path).ops == {"a": OpCost(1.0, 2), "b": None}
    tried = {"add": OpCost(1.0, 8, {0: 0, 1: None}), "mm": OpCost(1.0, 8)}
    write(path, OpTable(CONDITIONS, tried))
    assert read(path).ops == tried
    for version in (2, 3):
        write(path, OpTable(CONDITIONS, COSTS))
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": version, "checksum": "0"}))
        assert read(path) == OpTable(CONDITIONS, COSTS), version


def test_where_nothing_can_be_written_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path / "file"))
    store(CONDITIONS, COSTS)
    assert "not kept for the next time" in caplog.text
