"""The benchmark of ways to run ops: its rows and its tables."""

from __future__ import annotations

import pytest

from benchmarks import ways
from benchmarks.common.rows import read
from benchmarks.solve.comparison import FILES, HERE
from checkmate import Problem


def test_a_row_has_the_smallest_budget() -> None:
    chain = Problem.from_dag([[], [0], [1], [2, 1], [3, 0]], [1] * 5, [4] * 5, forward=3, over={3: [2], 4: [3]})
    row = ways.row_of(chain, 2.0)
    assert (row["ops"], row["ways"], row["keep_all_peak"], row["smallest"]) == (5, 2, 12, 8)


@pytest.fixture(scope="module")
def rows() -> list[ways.Row]:
    return read(ways.BENCHMARK.path)


def test_the_committed_table_is_of_the_committed_rows(rows: list[ways.Row]) -> None:
    assert ways.BENCHMARK.path.with_suffix(".md").read_text() == ways.markdown(rows)
    assert {(row["network"], row["form"]) for row in rows} >= {(name, form) for name in FILES for form in ways.FORMS}


def test_the_committed_rows_contradict_one_another_nowhere(rows: list[ways.Row]) -> None:
    for row in rows:
        assert row["smallest_bound"] <= row["smallest"] <= row["keep_all_peak"]
        assert row["smallest_in_parts"] <= row["smallest"]
    known = {(row["network"], row["form"]): row for row in rows}
    for name in FILES:
        file, ours = known[name, "file"], known[name, "ways"]
        assert ours["keep_all_peak"] <= file["keep_all_peak"]
        assert ours["smallest"] <= file["smallest"]


def test_the_figures_of_the_page_come_from_the_committed_rows(rows: list[ways.Row]) -> None:
    known = {(row["network"], row["form"]): row["smallest"] for row in rows}
    lower = {name: 1 - known[name, "ways"] / known[name, "file"] for name in FILES}
    said = " ".join((HERE.parent / "docs" / "figures.md").read_text().split())
    images = [lower[name] for name in ("vgg16", "unet", "resnet18", "mobilenetv2", "resnet50", "densenet121")]
    assert f"that of convolutional networks by {100 * min(images):.0f} to {100 * max(images):.0f} %" in said
    for text, name in (("GPT-2 of 12 layers falls", "gpt2-12"), ("BERT", "bert-base")):
        assert f"{text} from {known[name, 'file'] / 1e9:.2f} to {known[name, 'ways'] / 1e9:.2f} GB" in said
