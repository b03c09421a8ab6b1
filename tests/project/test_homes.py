"""The choice of others for a model at home in the host's memory is a plan that the checker passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.common.rows import read
from benchmarks.homes import measured as beside
from benchmarks.homes.measured import LAYERS, there, with_shares
from benchmarks.homes.planned import large_values, traced
from benchmarks.homes.theirs import Measured, layer_of, layers_of, measured, of_layers, plan_of, sets_of
from checkmate.core.problem import Problem
from checkmate.core.simulator import check_plan, simulate
from tests.support.processes import run_fresh_python

ROW = Measured("h100", 40, 24, 1024, 0, 0, 0, here=1, calls=1, tokens_per_second=1.0)


def test_each_row_says_what_is_sent_of_each_layer() -> None:
    rows = measured()
    assert len(rows) == len({(row.device, row.host_gib, row.gib, row.length) for row in rows}) == 336
    for row in rows:
        told = {"input": row.inputs, "attention": row.attentions, "whole": row.whole}
        assert Counter(sets_of(row, 32)) == Counter(told), row
        assert sum(told.values()) + row.here == 32


@pytest.fixture(scope="module")
def step() -> Problem:
    return traced(1, 1024, 2, "h100", middle=True)


@pytest.mark.long
def test_the_choice_of_others_is_a_plan_that_recomputes_what_it_does_not_send(step: Problem) -> None:
    problem = there(step, of_layers(step, large_values(step)), ROW)
    graph, layers = problem.graph, layers_of(problem)
    assert {value.role for value in graph.values if value.producer is None} >= {"parameter", "state"}
    assert {graph.values[v].role for v in problem.homes} == {"parameter", "state"}
    assert len(problem.homes) == 2 * 2 * 7  # parameters and sums of the products of two layers

    def times(plan_runs: Counter[int], target: str, layer: int) -> set[int]:
        ops = range(graph.forward_length)
        return {plan_runs[k] for k in ops if target in graph.ops[k].target and layer_of(graph.ops[k]) == layer}

    # op of the first layer -> how often it runs where each set is sent
    for kind, attention, products in (("inputs", {2}, {1, 2}), ("attentions", {1}, {1, 2}), ("whole", {1}, {1})):
        row = replace(ROW, **{kind: 1})
        plan = plan_of(problem, row)
        assert check_plan(plan, problem, row.gib * 2**30) == []
        assert simulate(plan, problem).host_peak > problem.homes_bytes
        runs, (chosen,) = Counter(plan.runs), sets_of(row, 2)
        assert plan.sent - problem.homes == set(layers[0].sets[chosen])
        assert (times(runs, "scaled_dot_product", 0), times(runs, "mm", 0)) == (attention, products), kind
        assert (times(runs, "scaled_dot_product", 1), times(runs, "mm", 1)) == ({1}, {1})


@pytest.mark.long
def test_plans_are_made_beside_the_measured_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run_fresh_python("-m", "benchmarks.homes.measured", "--quick", "--out", str(out))
    rows = read(out)
    assert [(row["gib"], row["at_home"]) for row in rows] == [(24, LAYERS), (78, LAYERS)]
    assert all(row["bound"] <= row["cost"] <= row["their_cost"] for row in rows)
    assert "| h100 | 16384 | 75 | 24 |" in out.with_suffix(".md").read_text()


def test_plans_are_never_slower_than_the_choice_of_others() -> None:
    rows = with_shares(read(beside.BENCHMARK.path))
    assert {(row["device"], row["length"]) for row in rows} >= {*product(("h100", "a100"), (1024, 4096, 16384))}
    for row in rows:
        assert row["peak"] <= row["gib"] * 2**30, row
        assert row["bound"] <= row["cost"] <= row["their_cost"], row
        assert row["they_fit"], row
        assert row.get("share", 1) >= row.get("measured_share", 0) or row["their_share"] > 0.999, row
