"""The library of the arena: built once, anew where it is damaged or of another PyTorch, and done without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import checkmate
from checkmate.memory import build
from tests.support.bits import assert_same_bits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in a process that has loaded nothing yet."""
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_LIBRARY", build._Library())
    return tmp_path


@pytest.mark.parametrize(("compiler", "why"), [("nowhere++", "no C++ compiler was found"), ("false", "false fails")])
def test_without_a_compiler_that_works_a_step_runs_as_it_did(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, why: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    model = torch.nn.Linear(64, 64)
    x = torch.randn(64, 64)
    with caplog.at_level(logging.WARNING, "checkmate.memory"):
        step = checkmate.compile(lambda x: model(x).square().sum(), budget="1 MB", memory="arena")
        build.wait()
        for _ in range(3):
            loss = step(x)
    assert [r.name for r in caplog.records] == ["checkmate.memory"]
    assert caplog.records[0].getMessage().startswith("No arena: ")
    assert_same_bits(loss, model(x).square().sum())
    assert [arena.counts.steps for arena in step._backend.arenas] == [0]
    assert why in (build.wait() or "")
    if compiler == "nowhere++":
        assert build.state() == "cannot be built: no C++ compiler was found (CXX=nowhere++)"


def test_what_is_damaged_is_built_anew_and_what_others_may_write_is_not_run(folder: Path) -> None:
    path = build._path()
    path.parent.mkdir()
    path.write_bytes(b"no library")
    path.chmod(0o600)
    build.start()
    assert build.wait() is None
    assert build.library() is not None
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert build.state() == "built"
    path.chmod(0o622)
    assert not build._is_ours(path)
    assert build.state().startswith("built when first used, by /")


@pytest.mark.slow
def test_nothing_is_kept_where_nothing_is_to_be_kept(folder: Path) -> None:
    build.start(keep=False)
    assert build.wait() is None
    assert not list(folder.iterdir())


def test_another_pytorch_has_another_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._path()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert build._path() != before
    assert not list(folder.iterdir())


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="Unknown memory 'heap'; there are arena, allocator"):
        checkmate.compile(torch.nn.Linear(2, 2), budget="1 MB", memory="heap")
    with pytest.raises(ValueError, match='memory="arena" is for backend="eager" so far'):
        checkmate.compile(torch.nn.Linear(2, 2), budget="1 MB", backend="inductor", memory="arena")
