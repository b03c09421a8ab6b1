"""The benchmark that runs a selection of the suite on each version of PyTorch."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks import versions
from benchmarks.common.rows import read
from checkmate.torch_internals import names
from checkmate.torch_internals.names import Name, Table
from checkmate.torch_internals.versions import TRIED
from noxfile import OTHERS, PYTHONS, VERSIONS

ROWS = read(versions.RESULTS)
OF_OTHERS = read(versions.OTHERS)
ROOT = versions.ROOT


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "TABLES", [*names.TABLES])
    Table(Name("Missing", "json", "an example", "examples are refused"), Name("loads", "json", "an example"))
    assert versions.examined()["missing"] == ["Missing: examples are refused"]


def test_one_list_of_versions() -> None:
    """Versions are named alike where they are tried, in rows and in files that install one."""
    paths = [path for kind in (versions.SELECTION, versions.QUICK) for paths in kind.values() for path in paths]
    assert all((ROOT / path).exists() for path in paths)
    minor = [version.rpartition(".")[0] for version in VERSIONS]
    assert tuple(minor) == TRIED
    assert {row["torch"].partition("+")[0] for row in ROWS} >= {*VERSIONS}
    assert f"torch>={minor[0]}" in (ROOT / "pyproject.toml").read_text()
    assert f"torch='{VERSIONS[0]}'" in (ROOT / "Makefile").read_text()
    assert f"torch=={VERSIONS[-1]}\n" in (ROOT / "constraints.txt").read_text()
    assert torch.__version__.partition("+")[0] in VERSIONS


def test_each_version_passes_and_the_lowest_versions_that_are_named_have_a_row() -> None:
    """Run ``nox -s lowest`` when you raise or lower one."""
    last = {row["torch"]: row for row in ROWS} | {row["python"]: row for row in OF_OTHERS}
    assert [(name, row["names"]) for name, row in last.items() if row["failed"] or row["missing"]] == []
    row = [row for row in OF_OTHERS if not row["quick"]][-1]
    project = (ROOT / "pyproject.toml").read_text()
    for name in versions.needed():
        (named,) = re.findall(rf'^    "{name}>=([\d.]+)[",]', project, flags=re.MULTILINE)
        assert f"{row[name]}.".startswith(f"{named}."), name


def test_the_committed_document_is_of_the_committed_rows() -> None:
    assert versions.RESULTS.with_suffix(".md").read_text() == versions.markdown(ROWS, OF_OTHERS)


def test_one_list_of_pythons() -> None:
    """Pythons are named alike in rows and in the classifiers of the package."""
    assert ROOT / OTHERS == versions.OTHERS
    tried = {row["python"].rpartition(".")[0] for row in OF_OTHERS} | {row["python"].rpartition(".")[0] for row in ROWS}
    assert tried >= {python for python, _ in PYTHONS}
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert {*named} == tried
