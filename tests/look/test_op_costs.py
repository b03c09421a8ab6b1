"""The table of what each op costs: by hand, from a file without PyTorch, and from a network."""

from __future__ import annotations

import importlib.util
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import checkmate
from checkmate import Problem, Profile
from tests.project.test_import_without_torch import BLOCK, _python

# three ops in a row and one that reads the first and the last; the second is estimated
GRAPH = Problem.from_dag([[], [0], [1], [0, 2]], [0] * 4, [100, 10, 50, 1]).graph
SOURCE = "measured on cpu, 2 threads; 1 op estimated"
PROBLEM = Problem(GRAPH, Profile([1.0, 2.0, 3.0, 4.0], [0, 500, 0, 0], 0, SOURCE, (1,)))


def test_figures_by_hand() -> None:
    costs = checkmate.costs(PROBLEM)
    assert [row.seconds for row in costs] == [1.0, 2.0, 3.0, 4.0]
    assert [row.share for row in costs] == [0.1, 0.2, 0.3, 0.4]
    assert [row.output_bytes for row in costs] == [100, 10, 50, 1]
    assert [row.workspace_bytes for row in costs] == [0, 500, 0, 0]
    assert [row.byte_seconds for row in costs] == [100 * 10.0, 10 * 5.0, 50 * 7.0, 1 * 4.0]
    assert [row.estimated for row in costs] == [False, True, False, False]
    assert (costs.seconds, costs.peak) == (10.0, 610)
    assert [row.op for row in costs.by_time()] == [3, 2, 1, 0]
    assert [row.op for row in costs.by_bytes()] == [1, 0, 2, 3]
    assert [row.op for row in costs.by_lifetime()] == [0, 2, 1, 3]
    result = Problem.from_dag([[], [0], [1]], [1.0, 1.0, 1.0], [1, 1, 1], outputs=[0, 2])  # stays to the end
    assert [row.byte_seconds for row in checkmate.costs(result)] == [3.0, 2.0, 1.0]
    assert [row.share for row in checkmate.costs(Problem.from_dag([[]], [0.0], [1]))] == [0.0]  # of no seconds


def test_the_printed_tables_show_what_is_estimated_and_rows_do_not_change() -> None:
    costs = checkmate.costs(PROBLEM, top=1)
    title, _, size, lifetime = repr(costs).split("\n\n")
    assert title == f"4 ops, 10.0 s and at most 610 B a step ({SOURCE})"
    assert "estimated" in size
    assert "estimated" not in lifetime
    with pytest.raises(FrozenInstanceError):
        costs[0].seconds = 1.0
    with pytest.raises(TypeError, match="already traced"):
        checkmate.costs(PROBLEM, 1)


@pytest.mark.skipif(importlib.util.find_spec("pandas") is not None, reason="pandas is installed")
def test_without_pandas_there_are_records() -> None:
    costs = checkmate.costs(PROBLEM)
    with pytest.raises(ImportError, match="pip install pandas"):
        costs.to_pandas()
    assert costs.records()[1]["estimated"] is True


def test_a_file_is_shown_without_pytorch(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    PROBLEM.to_json(path)
    code = f"import checkmate; print(checkmate.costs(checkmate.Problem.from_json({str(path)!r}), top=2))"
    assert _python(BLOCK + code) == repr(checkmate.costs(PROBLEM, top=2))


def test_a_network_shows_modules_and_lines() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    costs = checkmate.costs(lambda x: net(x).sum(), torch.ones(8, 64), profile="roofline:laptop")
    assert costs[0].target == "aten.addmm.default"
    assert costs[0].where.startswith("0 (Linear, test_op_costs.py:")
    assert all(row.estimated for row in costs)
    assert "roofline estimate for laptop CPU" in repr(costs)
