"""Links are measured once for a place: plans of the next start are made for the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkmate.core import files
from checkmate.host import Links, known_links

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they are kept, and the place."""
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(known_links, "_measured", {})
    return tmp_path


def _forget(monkeypatch: pytest.MonkeyPatch, links: Links | None = None) -> list[str]:
    """As another process, which would measure other links; what is measured."""
    measured: list[str] = []

    def measure(where: str, device: torch.device) -> Links:
        measured.append(where)
        return links or Links(1e9, 2e9, shared=False, latency=0.0)

    monkeypatch.setattr(known_links, "_measured", {})
    monkeypatch.setattr(known_links, "_measure", measure)
    return measured


def test_the_next_process_takes_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = known_links.known_links(f"file:{folder}", CPU)
    assert first.send > 0
    measured = _forget(monkeypatch)
    assert known_links.known_links(f"file:{folder}/.", CPU) == first
    assert measured == []
    known_links.known_links(f"file:{folder.parent}", CPU)
    assert measured == [f"file:{folder.parent}"]


def test_without_the_cache_it_is_measured_anew_and_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _forget(monkeypatch)
    known_links.known_links("file:", CPU, cache=False)
    assert measured == ["file:"]
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("wrong", [{"send": 0.0}, {"fetch": "fast"}, {"latency": -1.0}, {"more": 1}])
def test_a_damaged_file_is_measured_anew_with_a_warning(
    folder: Path, wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _forget(monkeypatch)
    known_links.known_links("file:", CPU)
    (path,) = (folder / "links").glob("*.json")
    document = json.loads(path.read_text())
    document["links"] |= wrong
    path.write_text(json.dumps(document))
    other = Links(3e9, 4e9, shared=True, latency=1e-3)
    _forget(monkeypatch, other)
    assert known_links.known_links("file:", CPU) == other
    assert "measured anew" in caplog.text
    _forget(monkeypatch)
    assert known_links.known_links("file:", CPU) == other
