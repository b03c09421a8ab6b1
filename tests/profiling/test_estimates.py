"""What estimates say of themselves is what the rows say that others measured."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.common.rows import latest, read
from benchmarks.estimates.comparison import BENCHMARK, kept_back, markdown, rows_of, summary
from benchmarks.estimates.steps import KEPT_BACK, STEPS
from checkmate.profiling import roofline


def test_what_is_stated_is_of_the_steps_that_were_kept_back() -> None:
    rows = kept_back(read(BENCHMARK.path))
    assert {row["case"] for row in rows} == KEPT_BACK
    found = summary(rows)
    percent = {key: math.ceil(100 * found[key]) / 100 for key in ("median", "worst")}
    stated = (roofline.STEPS, roofline.HALF_WITHIN, roofline.WORST)
    assert stated == (found["cases"], percent["median"], percent["worst"])


def test_there_is_a_row_for_each_step_and_the_page_is_of_the_rows() -> None:
    rows = read(BENCHMARK.path)
    steps = {row["case"]: row for row in latest(rows, "case")}
    assert set(steps) == set(STEPS)
    for name, row in steps.items():
        assert row["measured"] == pytest.approx(STEPS[name].milliseconds / 1e3, rel=1e-5), name
        assert row["kept_back"] != STEPS[name].looked_at, name
    assert BENCHMARK.path.with_suffix(".md").read_text() == markdown(rows)


def test_estimates_are_nearer_than_those_of_the_roofline_alone() -> None:
    rows = kept_back(read(BENCHMARK.path))
    before = summary([{**row, "estimated": row["plain"]} for row in rows])
    now = summary(rows)
    assert now["median"] < before["median"]
    assert now["worst"] < before["worst"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")
@pytest.mark.long
def test_a_row_is_what_is_estimated_now() -> None:
    name = "rtx3090 vgg11"
    (committed,) = (row for row in latest(read(BENCHMARK.path), "case") if row["case"] == name)
    (now,) = rows_of(name)
    for key in ("ops", "estimated", "plain"):
        assert now[key] == pytest.approx(committed[key], rel=1e-3), key
