"""The benchmark of fused kernels: ways in processes of their own, the tables and the picture of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.common.rows import append
from benchmarks.kernels import report
from benchmarks.kernels.comparison import rows_of
from benchmarks.peers.subjects import Network


class Tiny(nn.Module):
    """Two blocks of a product and pointwise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x)) * 2
        return nn.functional.cross_entropy(x, target)


ALL = {
    "tiny": Network(
        "tiny",
        lambda: (Tiny(), (torch.randn(256, 64), torch.randint(64, (256,)))),
        blocks=lambda module: [*module.blocks],
        loss=lambda module: lambda x, target: module(x, target),
    )
}


@pytest.mark.long
def test_ways_train_in_processes_of_their_own(tmp_path: Path) -> None:
    rows = {row["way"]: row for row in rows_of("tiny", rounds=2, time_limit=1.0, where=f"{__name__}:ALL")}
    worked = [row for row in rows.values() if "refused" not in row]
    assert all(row["ratio"] > 0 and row["peak"] > 0 for row in worked)
    assert [way for way, row in rows.items() if row.get("cold")] == [
        report.COMPILED, *(f"{kernels}, {report.KEEP}" for kernels in report.OURS)
    ]  # fmt: skip
    for kernels in report.OURS:
        mine = [row for row in worked if row["way"].startswith(f"{kernels},")]
        assert len(mine) >= 4
        assert all(row["peak"] == row["planned"] <= row["budget"] for row in mine)
        assert all(row["same_bits"] for row in mine if kernels != "fused")
        assert rows[f"{kernels}, {report.SMALLEST}"]["of_eager"] <= 1.5
    assert report.CHECKPOINTS in rows
    out = tmp_path / "rows.jsonl"
    append(out, *({"date": "d", **row, "model": report.DRAWN} for row in rows.values()))
    report.draw(out)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_table_has_the_last_run_of_each_network() -> None:
    about = {"model": "net", "peak": 2_000_000, "ratio": 1.0}
    rows = [
        {**about, "date": "1", "way": report.COMPILED},
        {**about, "date": "1", "way": f"fused, {report.COMPILED}"},
        {**about, "date": "2", "way": report.COMPILED, "ratio": 0.5},
    ]
    line = report.tables(rows)["time of a step"].splitlines()[-1]
    assert line == "| net | 0.50 at 2.0 MB | – | – | – | – | – | – | – |"
