"""The benchmark of budgets close to the smallest: its rows, its table and the lines of its picture."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks import tight
from benchmarks.common.rows import read
from benchmarks.solve.comparison import HERE, load
from checkmate.solvers.common.incumbent import TOLERANCE
from tests.support.processes import run_fresh_python


def test_a_row_is_of_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tight, "count_own_seconds", lambda: None)  # it is for the whole process
    (row,) = tight.rows_of("chain-16", [1.5], 2.0)
    assert (row["smallest"], row["budget"], row["cost_ratio"], row["gap"]) == (3, 4, 67 / 33, 0.0)
    assert row["second_ratio"] >= row["cost_ratio"]


def test_the_table_and_the_lines_show_the_last_rows_of_the_longest_limit() -> None:
    about = {"commit": "abc", "cpu": "a processor", "network": "net", "ops": 7, "status": "feasible", "seconds": 3.0}
    rows = [
        {**about, "times": times, "time_limit": limit, "cost_ratio": cost, "gap": gap, "first_plan_seconds": 0.5}
        for times, limit, cost, gap in (
            (1.1, 60.0, 1.2, 0.1),
            (1.1, 10.0, 1.3, 0.2),
            (1.1, 60.0, 1.25, 0.05),
            (1.02, 60.0, None, None),
            (1.5, 60.0, 1.0, 0.0),
        )
    ]
    rows[2]["second_ratio"] = 1.6  # older rows have none
    text = [line for line in tight.markdown(rows).splitlines() if line.startswith("| net |")]
    assert text == [
        "| net | 7 | 1.02 | 60 s | feasible | – | – | 0.5 s | 3.0 s |",
        "| net | 7 | 1.10 | 10 s | +30.00% | – | 20.00% | 0.5 s | 3.0 s |",
        "| net | 7 | 1.10 | 60 s | +25.00% | +60.00% | 5.00% | 0.5 s | 3.0 s |",
        "| net | 7 | 1.50 | 60 s | +0.00% | – | 0.00% | 0.5 s | 3.0 s |",
    ]
    ((network, distances, gaps),) = tight.lines_of(rows)
    assert network == "net"
    assert distances == pytest.approx([0.1, 0.5])
    assert gaps == [0.05, tight.LEAST_GAP]


@pytest.mark.slow
@pytest.mark.long
def test_the_command_appends_rows_and_draws_them(tmp_path: Path) -> None:
    out = tmp_path / "tight.jsonl"
    run_fresh_python("-m", "benchmarks.tight", "vgg16", "--times", "1.5", "1.1", "--time-limit", "1", "--out", str(out))
    rows = read(out)
    assert [(row["network"], row["times"], row["gap"] < 0.01) for row in rows] == [
        ("vgg16", 1.5, True),
        ("vgg16", 1.1, True),
    ]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert out.with_suffix(".md").read_text() == tight.markdown(rows)


@pytest.mark.slow
def test_the_committed_rows_contradict_one_another_nowhere() -> None:
    rows, network = read(tight.BENCHMARK.path), cache(load)
    assert tight.BENCHMARK.path.with_suffix(".md").read_text() == tight.markdown(rows)
    for row in rows:
        assert row["smallest_bound"] <= row["smallest"] <= row["budget"]
        assert row["peak"] is None or row["peak"] <= row["budget"]
        assert row["keep_all_peak"] == network(row["network"]).keep_all_peak
        if row["cost_ratio"] is not None:
            same = [other for other in rows if (other["network"], other["budget"]) == (row["network"], row["budget"])]
            assert all(other["bound_ratio"] <= row["cost_ratio"] * (1 + TOLERANCE) for other in same)


def test_the_page_says_how_wide_the_gaps_are() -> None:
    rows = tight.in_order(read(tight.BENCHMARK.path))
    gaps = {row["network"]: row["gap"] for row in rows if row["times"] == 1.1}  # of several limits the longest is last
    close = [name for name, gap in gaps.items() if gap < 0.004]
    wide = sorted((gap, name) for name, gap in gaps.items() if name not in close)
    assert (len(close), len(gaps)) == (7, 11)
    assert [name for _, name in wide] == ["unet", "densenet121", "resnet50", "vit-b16"]
    said = " ".join((HERE.parent / "docs" / "figures.md").read_text().split())
    assert "seven of eleven graphs are within 0.4% of the best plan after a minute" in said
    assert f"are {wide[0][0]:.0%}"[:-1] + f" to {wide[-1][0]:.0%} there" in said
