"""The problem files: real training steps at full size, and how they are made."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.rows import read
from benchmarks.solve import report as solve_report
from benchmarks.solve import stages
from benchmarks.solve.comparison import BENCHMARK, FILES, PROBLEMS, SHARES, facts, least, load, rows_of
from checkmate import Problem, solve
from checkmate.solvers.common.incumbent import TOLERANCE
from tests.support import layered
from tests.support.processes import run_fresh_python
from tests.support.versions import needs

ROOT = Path(__file__).parents[2]
GRAPHS = {  # ops, and parameters as published, in millions
    "vgg16": (91, 138.4),
    "unet": (158, None),
    "resnet18": (164, 11.7),
    "mobilenetv2": (401, 3.5),
    "resnet50": (409, 25.6),
    "vit-b16": (754, 86.6),
    "bert-base": (850, None),
    "gpt2-12": (992, 124.4),
    "densenet121": (1462, 8.0),
    "t5-base": (3531, 222.9),
    "gpt2-48": (3836, 1557.6),
}


def test_there_is_a_file_for_each() -> None:
    assert set(FILES) == set(GRAPHS)
    assert sum(path.stat().st_size for path in PROBLEMS.iterdir()) < 1e6


@pytest.mark.parametrize("name", GRAPHS)
def test_a_file_is_a_valid_step_with_its_loss(name: str) -> None:
    """And names no place on a machine."""
    problem, (ops, millions) = load(name), GRAPHS[name]
    assert len(problem.graph.ops) == ops
    assert problem.profile.source == "roofline estimate for NVIDIA H100 SXM"
    assert all(value.size_bytes % 512 == 0 for value in problem.graph.values)
    assert problem.unavoidable_bytes.max() < 0.65 * problem.keep_all_peak
    results = {problem.graph.ops[problem.graph.values[v].producer].phase for v in problem.graph.outputs}
    assert results == {"forward", "backward"}
    assert any("loss" in op.target for op in problem.graph.ops)
    parameters = sum(value.size_bytes for value in problem.graph.values if value.role == "parameter")
    assert millions is None or parameters / 4e6 == pytest.approx(millions, abs=0.06)
    for op in problem.graph.ops:
        assert not re.search(r"[/\\]|0x", f"{op.name} {op.target} {op.where}"), op


@pytest.mark.slow
@needs("2.12", "Dynamo has the inputs of a graph in another order")
@pytest.mark.parametrize("name", ["vgg16", "resnet18"])
def test_a_file_is_what_is_traced_now(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs by the roofline alone, as they were when the files were made."""
    from benchmarks.estimates.comparison import as_before
    from benchmarks.graphs import DEVICE, plain_problem_of
    from checkmate.profiling.data_sheets import DEVICES

    monkeypatch.setitem(DEVICES, DEVICE, as_before(DEVICES[DEVICE]))
    traced, kept = plain_problem_of(name), load(name)
    graphs = (replace(p.graph, ops=tuple(replace(op, where=None) for op in p.graph.ops)) for p in (traced, kept))
    assert next(graphs) == next(graphs)
    assert traced.seconds.tolist() == kept.seconds.tolist()
    assert traced.resident == kept.resident


@pytest.mark.long
def test_the_command_writes_a_file(tmp_path: Path) -> None:
    run = run_fresh_python("-m", "benchmarks.graphs", "vgg16", "--device", "laptop", "--out", str(tmp_path))
    assert "vgg16   93" in run.stdout
    assert Problem.from_json(tmp_path / "vgg16.json.gz").profile.source == "roofline estimate for laptop CPU"


def test_budgets_that_no_schedule_meets_and_models_too_large_are_left_out() -> None:
    asked = {"time_limit": 1.0, "memory_limit": "16 GB"}
    assert list(rows_of("vgg16", 0.6, "next-use", **asked)) == []
    assert list(rows_of("gpt2-12", 0.8, "milp", **asked)) == []
    assert list(rows_of("vgg16", 0.8, "min_budget", **asked)) == list(rows_of("vgg16", 0.0, "auto", **asked)) == []


def test_the_budgets_of_chains_are_whole_bytes() -> None:
    for graph, known in (("chain-8", [8, 6, 5, 4, 3, 0]), ("chain-16", [12, 10, 8, 6, 5, 4, 0])):
        problem = load(graph)
        assert [share * problem.keep_all_peak for share in SHARES[graph]] == known
        arguments = BENCHMARK.parser().parse_args([graph, "--method", "auto"])
        assert [case["share"] for case in BENCHMARK.cases(arguments)] == [*SHARES[graph]]


def test_figures_of_a_solution_are_relative_to_running_each_op_once() -> None:
    problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[1, 1, 1, 1])
    solution = solve(problem, 4)
    details = {"trajectory": [(0.5, float("inf"), 10.0), (1, 20, 11)]}
    told = facts(replace(solution, cost=15.0, bound=12.0, details=details))
    assert (told["cost_ratio"], told["bound_ratio"], told["gap"]) == (1.5, 1.2, 0.2)
    assert told["first_plan_seconds"] == 1
    assert told["trajectory"] == [[0.5, None, 1.0], [1, 2.0, 1.1]]
    assert facts(replace(solution, cost=float("inf"), plan=None))["cost_ratio"] is None
    assert json.loads(json.dumps(told)) == told


def _row(method: str, cost: float | None, bound: float, seconds: float) -> dict[str, object]:
    about = {"commit": "abc", "cpu": "a processor", "profile": "given", "graph": "net", "ops": 10, "share": 0.5}
    about |= {"budget": 50, "keep_all_peak": 100, "keep_all_seconds": 1.0, "method": method, "time_limit": 60.0}
    about |= {"status": "feasible" if cost else "not found", "cost_ratio": cost, "bound_ratio": bound}
    about |= {"gap": (cost - bound) / cost if cost else None, "seconds": seconds, "first_plan_seconds": 0.5}
    about |= {"trajectory": [[0.5, 2.0, 1.0]] if cost else [], "loaded_rss": 1_000_000, "peak_rss": 5_000_000}
    return about


def test_the_report_has_the_last_row_of_each_and_the_gap_to_the_best_bound(tmp_path: Path) -> None:
    rows = [_row("fast", 1.5, 1.0, 1.0), _row("fast", 1.25, 1.0, 2.0), _row("slow", None, 1.2, 3.0)]
    failed = {key: rows[0][key] for key in ("commit", "cpu", "graph", "share", "time_limit")}
    rows.append({**failed, "method": "large", "status": "failed", "message": "MemoryError"})
    path = tmp_path / "solve.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    solve_report.draw_beside(path)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert solve_report.page(rows).splitlines()[-3:] == [
        "| net | 10 | 0.50 | fast | 1.2500 | 1.0000 | 20.00% | 4.00% | 0.5 s | 2.0 s | 4 MB | feasible |",
        "| net | – | 0.50 | large | – | – | – | – | – | – | – | failed |",
        "| net | 10 | 0.50 | slow | – | 1.2000 | – | – | 0.5 s | 3.0 s | 4 MB | not found |",
    ]


def test_the_report_has_the_smallest_budgets_where_they_were_looked_for() -> None:
    problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    figures = least(problem, time_limit=1.0)
    assert (figures["peak"], figures["peak_bound"], figures["gap"], figures["status"]) == (3, 3, 0.0, "proven")
    rows = [_row("fast", 1.5, 1.0, 1.0), {**_row("min_budget", None, 1.0, 1.0), **figures, "share": None, "seconds": 2}]
    assert solve_report.page(rows).splitlines()[-1] == "| net | 4 | 1.0000 | 1.0000 | 0.00% | 2.0 s |"


@pytest.mark.long
def test_the_benchmark_appends_rows_from_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "results" / "solve.jsonl"
    command = ["-m", "benchmarks.solve", "resnet18", "--share", "0.6", "--out", str(out)]
    run_fresh_python(*command, "--method", "next-use", "auto", "--time-limit", "3")
    rows = read(out)
    assert [row["method"] for row in rows] == ["next-use", "auto"]
    for row in rows:
        assert row["peak"] <= row["budget"]
        assert 1 < row["bound_ratio"] <= row["cost_ratio"] < 1.2 or row["method"] == "next-use"
        assert 20e6 < row["loaded_rss"] <= row["peak_rss"] < 1e9
    run_fresh_python(*command, "--method", "auto", "--memory-limit", "1 MB")
    last = read(out)[-1]
    assert last["status"] == "failed"
    assert last["message"]


def test_the_committed_rows_of_stages_are_of_the_code_and_contradict_one_another_nowhere() -> None:
    found = stages.latest(read(stages.BENCHMARK.path))
    asked = stages.BENCHMARK.cases(stages.BENCHMARK.parser().parse_args([]))
    cases = {(case["name"], case["share"], case["time_limit"], case["without"]) for case in asked}
    assert cases <= {(*case, stage) for case, by_stage in found.items() for stage in by_stage}
    for (graph, share, _), by_stage in found.items():
        assert set(stages.LEFT_OUT) >= {*by_stage} >= {""}
        budget = int(share * load(graph).keep_all_peak)
        planned = [row for row in by_stage.values() if row["cost_ratio"] is not None]
        assert {row["budget"] for row in by_stage.values()} == {budget}
        assert all(row["peak"] <= budget for row in planned)
        least = min(row["cost_ratio"] for row in planned)  # a plan within the budget, whichever stage was left out
        assert all(1 <= row["bound_ratio"] <= least * (1 + TOLERANCE) for row in by_stage.values())


def test_a_row_of_a_stage_and_what_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LEFT_OUT", ("", "exact at once", "detours"))
    monkeypatch.setattr(stages, "count_own_seconds", lambda: None)  # it is for the whole process
    rows = [row for stage in stages.LEFT_OUT for row in stages.rows_of("chain-8", 0.6, stage, 1.0)]
    assert [row["cost_ratio"] for row in rows] == [21 / 17] * 3
    rows[1] |= {"cost_ratio": 2.0, "gap": 0.5, "seconds": 3 * rows[0]["seconds"]}
    rows[2] |= {"cost_ratio": None, "gap": None, "status": "not found", "first_plan_seconds": None}
    for row in rows:
        row |= {"commit": "abc", "cpu": "a processor"}
    text = stages.markdown(rows)
    worth = [line.split(" | ")[1:5] for line in text.splitlines() if line.startswith(("| exact at once", "| detours"))]
    assert worth == [["1 (76.47%)", "–", "1 (50.00%)", "–"], ["1 (no plan)", "–", "1 (100.00%)", "–"]]
    assert re.search(r"^\| chain-8 \| 17 \| 60% \| detours \| not found \| 100.00% \|", text, flags=re.MULTILINE)


def test_a_random_graph_is_connected_and_the_same_from_one_seed() -> None:
    problem, again = layered.layered(250, seed=3), layered.layered(250, seed=3)
    assert problem.graph == again.graph
    assert problem.seconds.tolist() == again.seconds.tolist()
    assert layered.layered(250, seed=4).graph != problem.graph
    read, made = [len(op.inputs) for op in problem.graph.ops], [len(users) for users in problem.graph.users]
    assert (read.index(0), read.count(0)) == (0, 1)  # one source and one result
    assert (made.index(0), made.count(0)) == (249, 1)
    assert 2 <= sum(read) / 250 <= 6
    assert problem.seconds.max() <= layered.MS
    assert problem.sizes.min() >= 100 * layered.KB
