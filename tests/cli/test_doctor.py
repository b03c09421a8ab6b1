"""The doctor finds what an installation lacks, with the way out."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from checkmate.cli import doctor
from checkmate.errors import SolverError
from checkmate.solvers.catalogue import METHODS

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_says_what_there_is(cache: Path, shell: Any) -> None:
    found = json.loads(shell("doctor --json")[0])
    assert found["ok"]
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert (found["cache"], found["cache size"], found["cache writable"]) == (str(cache), "0 B in 0 files", "yes")
    assert not list(cache.iterdir())
    (cache / "plans").mkdir()
    (cache / "plans" / "a.json").write_text("12345")
    assert "5 B in 1 files" in shell("doctor")[0]


def test_what_is_missing_is_named(monkeypatch: Patch, shell: Any) -> None:
    version = importlib.metadata.version
    without = lambda name: version("none such" if name in ("highspy", "pandas") else name)  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", without)
    out, err = shell("doctor", 1)
    assert err == "checkmate: highspy is not installed: pip install highspy\n"  # pandas is an extra
    assert "pandas" in out


def test_another_project_of_the_name_is_told(tmp_path: Path, monkeypatch: Patch, shell: Any) -> None:
    """The other project has files of the same names; a checkout that is installed under its name has none."""
    monkeypatch.syspath_prepend(tmp_path)
    about = tmp_path / "checkmate-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: checkmate\nVersion: 0.2.0\n")
    (about / "RECORD").write_text("__editable__.checkmate-0.2.0.pth,,\n")
    shell("doctor")
    (about / "RECORD").write_text("checkmate/__init__.py,sha256=x,1\n")
    assert "checkmate 0.2.0 is installed in the folder of checkmate-torch" in shell("doctor", 1)[1]


def test_a_solver_that_fails_and_a_cache_that_cannot_be_written_are_named(monkeypatch: Patch, tmp_path: Path) -> None:
    fails = Mock(side_effect=SolverError("no license"))
    monkeypatch.setitem(METHODS, "milp", replace(METHODS["milp"], run=fails))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    facts, wrong = doctor.examine()
    assert facts["cache writable"] == "no"
    assert all(any(part in said for said in wrong) for part in ("no license", "CHECKMATE_CACHE_DIR"))
