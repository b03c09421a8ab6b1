"""What estimates say of themselves is what the rows say that others measured."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path

import pytest
import torch

from benchmarks.common.rows import latest, read
from benchmarks.estimates import ops
from benchmarks.estimates.comparison import BENCHMARK, kept_back, markdown, rows_of, summary
from benchmarks.estimates.steps import KEPT_BACK, STEPS
from checkmate.profiling import roofline
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.gpu_kernels import product_seconds


def test_what_is_stated_is_of_the_steps_that_were_kept_back() -> None:
    rows = kept_back(read(BENCHMARK.path))
    assert {row["case"] for row in rows} == KEPT_BACK
    found = summary(rows)
    percent = {key: math.ceil(100 * found[key]) / 100 for key in ("median", "worst")}
    stated = (roofline.STEPS, roofline.HALF_WITHIN, roofline.WORST)
    assert stated == (found["cases"], percent["median"], percent["worst"])


def test_there_is_a_row_for_each_step_and_the_page_is_of_the_rows() -> None:
    rows = read(BENCHMARK.path)
    steps = {row["case"]: row for row in latest(rows, "case") if row["kind"] == "step"}
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


def test_tables_of_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product and one addition of Vidur's, and what is too short or of other sizes left out."""
    monkeypatch.setenv(ops.FOLDER, str(tmp_path))
    path = tmp_path / "vidur" / "a100_llama2_7b_mlp.csv.gz"
    path.parent.mkdir()
    names = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "add")
    times = {f"time_stats.{name}.median": 0.004 for name in names}
    rows = [
        {**times, "num_tokens": 2048, "num_tensor_parallel_workers": 1, "time_stats.mlp_up_proj.median": 1.694},
        {**times, "num_tokens": 4096, "num_tensor_parallel_workers": 1, "time_stats.add.median": 0.055},
        {**times, "num_tokens": 2049, "num_tensor_parallel_workers": 1, "time_stats.add.median": 0.055},
    ]
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    product, addition = rows_of("vidur a100")
    assert (product["kind"], product["measured"]) == ("product", 1.694e-3)
    a100 = DEVICES["a100"]
    computing = product_seconds(a100, 1, 2048, 2 * 11008, 4096, a100.flops["float16"])
    assert product["estimated"] == pytest.approx(computing, rel=0.05)
    assert (addition["kind"], addition["measured"]) == ("pointwise", 55e-6)
