"""The benchmark of ops that run a graph or a kernel: its rows, and what the pages say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import higher_order
from benchmarks.common.rows import Row, read
from checkmate.capture.higher_order.table import AGAIN
from checkmate.solvers.common.incumbent import TOLERANCE
from tests.support.processes import run_fresh_python


@pytest.mark.slow
@pytest.mark.long
def test_the_benchmark_plans_both_forms(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "rows.jsonl"
    run_fresh_python("-m", "benchmarks.higher_order", "llama, both", "--quick", "--out", str(out))
    before, now = read(out)
    assert (before["form"], now["form"]) == ("pinned", "free")
    assert before["higher"] == now["higher"] == 2 * 2 + 2 * (2 * 2 + 1)  # attention and norms, forward and backward
    assert now["bound"] <= now["smallest"] <= before["smallest"] <= before["keep_all"] == now["keep_all"]


PAGE = Path(__file__).parents[2] / "docs" / "supported.md"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    return {(row["network"], row["form"]): row for row in read(higher_order.BENCHMARK.path)}


def test_the_committed_rows_contradict_one_another_nowhere(rows: dict[tuple[str, str], Row]) -> None:
    assert rows.keys() == {(name, form) for name in higher_order.NETWORKS for form in higher_order.FORMS}
    for name in higher_order.NETWORKS:
        before, now = (rows[name, form] for form in higher_order.FORMS)
        assert (before["keep_all"], before["seconds"], before["ops"]) == (now["keep_all"], now["seconds"], now["ops"])
        assert now["bound"] <= now["smallest"] < before["bound"] <= before["smallest"] <= before["keep_all"]
        costs = [1 + row["overhead"] for row in (now, before)]
        assert costs[0] * (1 - now["gap"]) <= costs[1] * (1 + TOLERANCE)


def test_the_figures_of_the_page_come_from_the_committed_rows(rows: dict[tuple[str, str], Row]) -> None:
    said = " ".join(PAGE.read_text().split())
    flex, triton, both = ([rows[name, form] for form in higher_order.FORMS] for name in higher_order.NETWORKS)
    (was, smallest), (cost, costs) = ([row[key] for row in both] for key in ("smallest", "overhead"))
    assert f"smallest budget is {smallest / 1e9:.2f} GB, and it was {was / 1e9:.2f} GB when these ops ran once" in said
    assert f"the step takes {costs:.1%} longer, and it was {cost:.1%}." in said
    one, other = (rows_of[0]["smallest"] / 1e9 for rows_of in (flex, triton))
    assert f"falls from {one:.2f} GB (`flex_attention`) and {other:.2f} GB (norms) to the same" in said
    assert len({f"{rows_of[1]['smallest'] / 1e9:.2f}" for rows_of in (flex, triton, both)}) == 1
    assert f"batch of {both[0]['batch']} x {both[0]['length']} words" in said


def test_the_page_names_all_ops_that_may_run_again() -> None:
    called = {"map_impl": "`map`", "flex_attention_backward": "`flex_attention` and its backward"}
    page = PAGE.read_text()
    assert [name for name in AGAIN if called.get(name, f"`{name}`") not in page] == []
