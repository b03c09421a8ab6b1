"""Benchmarks beside the main ones: their rows and tables, and what committed rows promise.

Ops that run a graph or a kernel, a second memory, budgets close to the smallest, ways to run ops, whole training steps,
and estimates.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import higher_order, tight, ways, whole_steps
from benchmarks.common.rows import Row, latest, read
from benchmarks.estimates import comparison as estimates
from benchmarks.estimates.steps import KEPT_BACK, STEPS
from benchmarks.homes import measured as homes
from benchmarks.kernels import comparison as kernels
from benchmarks.second_memory import measured, planned
from benchmarks.solve import stages
from benchmarks.solve.comparison import FILES, HERE, load
from checkmate import Problem
from checkmate.capture.higher_order.table import AGAIN
from checkmate.profiling import roofline
from checkmate.solvers.common.incumbent import TOLERANCE
from tests.support.processes import run_fresh_python

SUPPORTED = (HERE.parent / "docs" / "supported.md").read_text()
TRANSFORMERS = ("bert-base", "gpt2-12", "gpt2-48", "t5-base", "vit-b16")
OURS = "checkmate.training_step, "


def _rows(module: Any, *keys: str) -> dict[Any, Row]:
    """The last row for each value of these keys."""
    return {tuple(row[key] for key in keys): row for row in latest(read(module.BENCHMARK.path), *keys)}


@pytest.mark.parametrize(
    "module",
    [planned, measured, stages, tight, ways, whole_steps, estimates, kernels, homes],
    ids=lambda module: module.__name__,
)
def test_a_committed_document_is_of_the_committed_rows(module: Any) -> None:
    path = module.BENCHMARK.path
    assert module.BENCHMARK.page is not None
    assert path.with_suffix(".md").read_text() == module.BENCHMARK.page(read(path))


# ---------------------------------------------------------------- ops that run a graph or a kernel


@pytest.mark.long
def test_the_benchmark_of_ops_that_run_a_graph_plans_both_forms(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "rows.jsonl"
    run_fresh_python("-m", "benchmarks.higher_order", "llama, both", "--quick", "--out", str(out))
    before, now = read(out)
    assert (before["form"], now["form"]) == ("pinned", "free")
    assert before["higher"] == now["higher"] == 2 * 2 + 2 * (2 * 2 + 1)  # attention and norms, forward and backward
    assert now["bound"] <= now["smallest"] <= before["smallest"] <= before["keep_all"] == now["keep_all"]


def test_ops_that_run_a_graph_save_memory_and_the_page_names_each() -> None:
    rows = _rows(higher_order, "network", "form")
    assert rows.keys() == {(name, form) for name in higher_order.NETWORKS for form in higher_order.FORMS}
    for name in higher_order.NETWORKS:
        before, now = (rows[name, form] for form in higher_order.FORMS)
        assert (before["keep_all"], before["seconds"], before["ops"]) == (now["keep_all"], now["seconds"], now["ops"])
        assert now["bound"] <= now["smallest"] < before["bound"] <= before["smallest"] <= before["keep_all"]
        costs = [1 + row["overhead"] for row in (now, before)]
        assert costs[0] * (1 - now["gap"]) <= costs[1] * (1 + TOLERANCE)
    called = {"map_impl": "`map`", "flex_attention_backward": "`flex_attention` and its backward"}
    assert [name for name in AGAIN if called.get(name, f"`{name}`") not in SUPPORTED] == []


# ---------------------------------------------------------------- a second memory


def test_with_a_second_memory_ours_is_never_slower_than_recomputation_alone_or_than_others() -> None:
    """Half of the recomputation is gone on transformers, or no plan does that."""
    found = planned.in_order(read(planned.BENCHMARK.path))
    rows = {(row["network"], row["share"], row["method"]): row for row in found}
    assert rows.keys() >= {*product(TRANSFORMERS, planned.BUDGETS, (planned.ALONE,))}
    for (network, share, method), row in rows.items():
        ours = rows[network, share, "auto"]
        assert ours["peak"] <= ours["budget"]
        assert ours["bound_ratio"] <= ours["cost_ratio"]
        if row["cost_ratio"] is not None:
            assert ours["cost_ratio"] <= row["cost_ratio"] * (1 + 1e-9), (network, share, method)
            assert ours["bound_ratio"] <= row["cost_ratio"] * (1 + 1e-6)
        if network in TRANSFORMERS and method == planned.ALONE:
            assert ours["gap"] <= 0.02, (network, share)
            half = 1 + 0.5 * ((row["cost_ratio"] or float("inf")) - 1)
            assert ours["cost_ratio"] <= half or ours["bound_ratio"] > half, (network, share)


def test_measured_steps_keep_their_promises() -> None:
    whole = [row for row in read(whole_steps.BENCHMARK.path) if row["way"].startswith(OURS)]
    assert len(whole) >= 6
    for row in (*whole, *_rows(measured, "network", "way").values()):
        assert row["same_bits"]
        assert row["peak"] == row["predicted_peak"] <= row["budget"]
    steps = read(HERE / "results" / "step.jsonl")
    assert all(row["bitwise"] and row["measured_peak"] == row["predicted_peak"] <= row["budget"] for row in steps)


# ---------------------------------------------------------------- budgets close to the smallest


def test_a_row_is_of_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tight, "count_own_seconds", lambda: None)  # it is for the whole process
    (row,) = tight.rows_of("chain-16", [1.5], 2.0)
    assert (row["smallest"], row["budget"], row["cost_ratio"], row["gap"]) == (3, 4, 67 / 33, 0.0)
    assert row["second_ratio"] >= row["cost_ratio"]


def test_the_table_and_the_lines_show_the_last_rows_of_the_longest_limit() -> None:
    about = {"commit": "abc", "cpu": "a processor", "network": "net", "ops": 7, "status": "feasible", "seconds": 3.0}
    cases = [
        (1.1, 60, 1.2, 0.1),
        (1.1, 10, 1.3, 0.2),
        (1.1, 60, 1.25, 0.05),
        (1.02, 60, None, None),
        (1.5, 60, 1.0, 0.0),
    ]
    rows = [
        {**about, "times": times, "time_limit": limit, "cost_ratio": cost, "gap": gap, "first_plan_seconds": 0.5}
        for times, limit, cost, gap in cases
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


@pytest.mark.long
def test_the_command_appends_rows_and_draws_them(tmp_path: Path) -> None:
    out = tmp_path / "tight.jsonl"
    run_fresh_python("-m", "benchmarks.tight", "vgg16", "--times", "1.5", "1.1", "--time-limit", "1", "--out", str(out))
    rows = read(out)
    assert [(row["network"], row["times"]) for row in rows] == [("vgg16", 1.5), ("vgg16", 1.1)]
    assert all(row["gap"] < 0.01 for row in rows)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert out.with_suffix(".md").read_text() == tight.markdown(rows)


@pytest.mark.slow
def test_the_rows_of_close_budgets_contradict_one_another_nowhere() -> None:
    rows, network = read(tight.BENCHMARK.path), cache(load)
    for row in rows:
        assert row["smallest_bound"] <= row["smallest"] <= row["budget"]
        assert row["peak"] is None or row["peak"] <= row["budget"]
        assert row["keep_all_peak"] == network(row["network"]).keep_all_peak
        if row["cost_ratio"] is not None:
            same = [other for other in rows if (other["network"], other["budget"]) == (row["network"], row["budget"])]
            assert all(other["bound_ratio"] <= row["cost_ratio"] * (1 + TOLERANCE) for other in same)


# ---------------------------------------------------------------- ways to run ops


def test_a_row_of_ways_has_the_smallest_budget() -> None:
    chain = Problem.from_dag([[], [0], [1], [2, 1], [3, 0]], [1] * 5, [4] * 5, forward=3, over={3: [2], 4: [3]})
    row = ways.row_of(chain, 2.0)
    assert (row["ops"], row["ways"], row["keep_all_peak"], row["smallest"]) == (5, 2, 12, 8)


def test_ways_raise_no_smallest_budget() -> None:
    for row in read(ways.BENCHMARK.path):
        assert row["smallest_bound"] <= row["smallest"] <= row["keep_all_peak"]
        assert row["smallest_in_parts"] <= row["smallest"]
    known = _rows(ways, "network", "form")
    assert known.keys() >= {(name, form) for name in FILES for form in ways.FORMS}
    for name, key in product(FILES, ("keep_all_peak", "smallest")):
        assert known[name, "ways"][key] <= known[name, "file"][key], name


# ---------------------------------------------------------------- estimates


def test_what_is_stated_of_estimates_is_of_the_steps_that_were_kept_back() -> None:
    """Estimates are nearer than those of the roofline alone."""
    rows = estimates.kept_back(read(estimates.BENCHMARK.path))
    assert {row["case"] for row in rows} == KEPT_BACK
    found, before = (estimates.summary(of) for of in (rows, [{**row, "estimated": row["plain"]} for row in rows]))
    assert found["median"] < before["median"]
    assert found["worst"] < before["worst"]
    percent = [math.ceil(100 * found[key]) / 100 for key in ("median", "worst")]
    assert [found["cases"], *percent] == [roofline.STEPS, roofline.HALF_WITHIN, roofline.WORST]


def test_there_is_a_row_for_each_step() -> None:
    steps = _rows(estimates, "case")
    assert {name for (name,) in steps} == set(STEPS)
    for (name,), row in steps.items():
        assert row["measured"] == pytest.approx(STEPS[name].milliseconds / 1e3, rel=1e-5), name
        assert row["kept_back"] != STEPS[name].looked_at, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a CUDA device")
@pytest.mark.long
def test_a_row_is_what_is_estimated_now() -> None:
    name = "rtx3090 vgg11"
    (now,), committed = estimates.rows_of(name), _rows(estimates, "case")[name,]
    for key in ("ops", "estimated", "plain"):
        assert now[key] == pytest.approx(committed[key], rel=1e-3), key
