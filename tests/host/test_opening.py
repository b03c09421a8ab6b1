"""Second memories by their names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from checkmate.errors import HostError
from checkmate.host import open_store

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_no_folder_is_the_one_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(HostError, match=f"No file can be made in {tmp_path / 'temporary'}"):
        open_store("file:", 1, CPU)


@pytest.mark.parametrize(
    ("where", "device", "says"),
    [
        ("file:", CUDA, "A file is for steps on the CPU, not on cuda:0: write host='pinned'"),
        ("pinned", CPU, "Pinned memory is for steps on CUDA, not on cpu: write host='file:"),
        ("memory", CPU, "Pinned memory is for steps on CUDA"),
        ("file", CPU, "Unknown second memory 'file'"),
        ("/fast/disk", CPU, "Unknown second memory '/fast/disk': write 'file:/fast/disk'"),
    ],
)
def test_what_cannot_be_is_refused(where: str, device: torch.device, says: str) -> None:
    with pytest.raises(HostError, match=says):
        open_store(where, 1, device)
