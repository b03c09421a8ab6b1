"""The benchmark that runs a selection of the suite on each version of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import versions
from benchmarks.common.rows import read
from checkmate.torch_internals import names
from checkmate.torch_internals.names import Name, Table
from checkmate.torch_internals.versions import TRIED
from noxfile import VERSIONS

ROWS = read(versions.RESULTS)
ROOT = versions.ROOT
TESTS = """
import pytest

def test_that_passes():
    pass

def test_that_fails():
    assert False

@pytest.mark.skip
def test_that_is_skipped():
    pass

@pytest.mark.slow
def test_that_is_slow():
    assert False
"""


def test_tests_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "test_tiny.py"
    path.write_text(TESTS)
    found = versions.tested({"not slow": [str(path)], "slow": [str(path)]}, jobs=0)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert [name.rpartition("::")[2] for name in found["names"]] == ["test_that_fails", "test_that_is_slow"]


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "TABLES", [*names.TABLES])
    Table(Name("Missing", "json", "an example", "examples are refused"), Name("loads", "json", "an example"))
    assert versions.examined()["missing"] == ["Missing: examples are refused"]


def test_the_tests_are_there() -> None:
    paths = [path for kind in (versions.SELECTION, versions.QUICK) for paths in kind.values() for path in paths]
    assert all((ROOT / path).exists() for path in paths)


def test_one_list_of_versions() -> None:
    """Of those that are tried, that have rows, that the documents show, and the one that all else is tested on."""
    minor = [version.rpartition(".")[0] for version in VERSIONS]
    assert tuple(minor) == TRIED
    assert {row["torch"].partition("+")[0] for row in ROWS} >= {*VERSIONS}
    assert versions.table(ROWS).markdown() in (ROOT / "docs" / "supported.md").read_text()
    assert f"torch>={minor[0]}" in (ROOT / "pyproject.toml").read_text()
    assert torch.__version__.partition("+")[0] in VERSIONS


def test_each_version_passes() -> None:
    last = {row["torch"]: row for row in ROWS}
    assert [(name, row["names"]) for name, row in last.items() if row["failed"] or row["missing"]] == []
