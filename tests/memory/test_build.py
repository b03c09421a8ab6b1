"""The library of the arena: built once, anew where it is damaged or of another PyTorch, and done without."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest
import torch

import checkmate
from checkmate.memory import native
from tests.support.bits import assert_same_bits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in a process that has loaded nothing yet."""
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_LIBRARY", native._Library())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "why"), [("nowhere++", "no C++ compiler was found"), ("false", "false fails")])
def test_without_a_compiler_that_works_a_step_runs_as_it_did(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, why: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    model = torch.nn.Linear(64, 64)
    x = torch.randn(64, 64)
    with caplog.at_level(logging.WARNING, "checkmate.memory"):
        step = checkmate.compile(lambda x: model(x).square().sum(), budget="1 MB", memory="arena")
        native.wait()
        for _ in range(3):
            loss = step(x)
    assert [r.name for r in caplog.records] == ["checkmate.memory"]
    assert caplog.records[0].getMessage().startswith("No arena: ")
    assert_same_bits(loss, model(x).square().sum())
    assert [captured.arena.counts.steps for captured in step._run.steps] == [0]
    assert why in (native.wait() or "")
    if compiler == "nowhere++":
        assert native.ARENA.state() == "cannot be had: no C++ compiler was found (CXX=nowhere++)"


@pytest.mark.slow
def test_what_is_damaged_is_built_anew_and_what_others_may_write_is_not_run(folder: Path) -> None:
    path = native.ARENA.path()
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no library")
    path.chmod(0o600)
    native.start()
    assert native.wait() is None
    assert native.library() is not None
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert native.ARENA.state() == "built"
    path.chmod(0o622)
    assert native.ARENA.state().startswith("built when first used, by /")


def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = native.ARENA.path()
    path.parent.mkdir()
    path.parent.chmod(0o770)
    with caplog.at_level(logging.WARNING, "checkmate.memory"):
        native.start()
        why = native.wait()
    assert why == f"others may write to {path.parent}, where it is kept. Delete that folder"
    assert native.ARENA.state() == f"cannot be had: {why}"
    assert caplog.messages == [f"No arena: {why}. Steps run with PyTorch's own allocator."]
    assert native.library() is None
    assert not path.exists()


@pytest.mark.slow
def test_what_was_looked_at_is_what_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that then takes its place is not run. Where nothing is to be kept, nothing is."""
    native.start(keep=False)
    assert native.wait() is None
    assert not list(folder.iterdir())
    monkeypatch.setattr(native, "_LIBRARY", native._Library())
    native.start()
    assert native.wait() is None
    monkeypatch.setattr(native, "_LIBRARY", native._Library())
    path, load = native.ARENA.path(), ctypes.PyDLL

    def exchanged(name: str) -> ctypes.PyDLL:
        other = path.with_name("other")
        other.write_bytes(b"no library")
        other.replace(path)
        return load(name)

    monkeypatch.setattr(native.ctypes, "PyDLL", exchanged)
    monkeypatch.setattr(native.Source, "_compile", lambda self, target: pytest.fail("it is built anew"))
    native.start()
    assert native.wait() is None
    assert native.library() is not None


def test_another_pytorch_has_another_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.ARENA.path()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert native.ARENA.path() != before
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="Unknown memory 'heap'; there are arena, allocator"):  # at once
        checkmate.compile(torch.nn.Linear(2, 2), budget="1 MB", memory="heap")
