"""What the answer of a search for the largest batch shows."""

from __future__ import annotations

import json
from dataclasses import replace

from checkmate import Problem, solve
from checkmate.sizes.largest_batch import LargestBatch, SizePoint


def _points() -> tuple[SizePoint, ...]:
    points = []
    for size in (2, 3):
        problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [size] * 4, forward=2)
        points.append(SizePoint.of(size, solve(problem, 8 + size % 2)))
    return tuple(points)


def _found() -> LargestBatch:
    small, large = _points()
    about = "proven", {"ap-greedy": small, "chen-sqrt": None}, (), 9, 0.25, ""
    return LargestBatch(3, large.solution, 9, "one-forward", (small, large), 2, large, *about)


def test_what_is_different_is_said() -> None:
    """Beside the golden answers."""
    assert "one more   no schedule fits: proven" in repr(_found())
    assert "ended by" not in repr(_found())
    for change, says in (
        ({"max_overhead": None}, "any recomputation"),
        ({"max_overhead": 0.25}, "25.0% recomputation at most"),
        ({"keep_all": None}, "fits at no size"),
        ({"ended": "time limit"}, "ended by time limit"),
        ({"cut_short": ("ap-greedy",)}, "2; its search was cut short"),
        ({"cut_short": ("checkpoint-all",)}, "times as large; its search was cut short"),
        ({"next_size": "not found"}, "not proven"),
    ):
        assert says in repr(replace(_found(), **change))


def test_it_goes_to_json_and_is_a_row_of_points() -> None:
    found = _found()
    summary = json.loads(json.dumps(found.summary()))
    assert (summary["size"], summary["ended"], summary["cut_short"]) == (3, "", [])
    assert summary["points"] == found.records() == [point.record() for point in found]
    assert summary["baselines"]["chen-sqrt"] is None
    assert found.proven
    assert not replace(found, next_size="not found").proven
    assert found.to_pandas()["size"].tolist() == [2, 3]
