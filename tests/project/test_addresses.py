"""The benchmark of addresses: a row for each problem in MiniMalloc's form, and for each plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import addresses
from benchmarks.common.rows import read
from tests.support.processes import run_fresh_python


def test_a_problem_of_minimalloc_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "two.96.csv"
    path.write_text("id,lower,upper,size\n0,0,2,64\n1,2,3,32\n2,1,3,32\n")
    row = addresses.file_row(path, time_limit=60)
    assert row.pop("seconds") >= 0
    assert row.pop("capacity_seconds") >= 0
    within = {"name": "two", "capacity": 96, "within_capacity": True}
    assert row == {**within, "blocks": 3, "live_peak": 96, "height": 96, "bound": 96, "first_fit": 96}
    assert addresses.cells({**row, "seconds": 1.0}) == ["two", "3", "96", "96", "96", "1.00000", "1.00", "lowest"]
    assert addresses.capacity_of(Path("two.csv")) is addresses.capacity_of(Path("7.csv")) is None


@pytest.mark.slow
@pytest.mark.long
def test_what_plans_make_is_placed(tmp_path: Path) -> None:
    out = tmp_path / "addresses.jsonl"
    printed = run_fresh_python("-m", "benchmarks.addresses", "minimalloc", "vgg16", "--out", str(out)).stdout
    rows = read(out)
    assert [row["name"] for row in rows[:7]] == [*"ABCDEF", "vgg16 1"]
    assert all(row["within_capacity"] for row in rows[:6])
    assert all(row["live_peak"] <= row["bound"] <= row["height"] <= row["first_fit"] for row in rows)
    assert printed.count("\n") == 2 * len(rows) + 2
