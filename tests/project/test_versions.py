"""The benchmark that runs a selection of the suite on each version of PyTorch."""

from __future__ import annotations

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
    assert f"torch='{VERSIONS[0]}'" in (ROOT / "Makefile").read_text()
    assert f"torch=={VERSIONS[-1]}\n" in (ROOT / "constraints.txt").read_text()
    assert torch.__version__.partition("+")[0] in VERSIONS


def test_each_version_passes() -> None:
    last = {row["torch"]: row for row in ROWS}
    assert [(name, row["names"]) for name, row in last.items() if row["failed"] or row["missing"]] == []
