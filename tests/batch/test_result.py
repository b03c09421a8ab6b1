"""What the answer of a search for the largest batch shows."""

from __future__ import annotations

import json
from dataclasses import replace

from checkmate import Problem, solve
from checkmate.batch.result import LargestBatch, SizePoint


def _points() -> tuple[SizePoint, ...]:
    points = []
    for size in (2, 3):
        problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [size] * 4, forward=2)
        points.append(SizePoint.of(size, solve(problem, 8 + size % 2), traced=size == 3))
    return tuple(points)


def _found() -> LargestBatch:
    points = _points()
    asked = {"budget": 9, "max_overhead": "one-forward", "seconds": 0.25, "ended": "", "cut_short": ()}
    answer = {"size": 3, "solution": points[1].solution, "next_size": "proven", "measured_peak": 9}
    baselines = {"ap-greedy": points[0], "chen-sqrt": None}
    return LargestBatch(**asked, **answer, points=points, keep_all=2, fastest=points[1], baselines=baselines)


def test_a_point_is_what_its_solution_says() -> None:
    small, large = _points()
    assert (small.throughput, small.seconds, small.overhead, small.peak) == (0.5, 4.0, 0.0, 6)
    assert (large.throughput, large.peak, large.traced) == (0.75, 9, True)
    figures = {"size": 3, "throughput": 0.75, "seconds": 4.0, "overhead": 0.0, "peak": 9, "gap": 0.0}
    assert large.record() == {**figures, "method": "checkpoint-all", "traced": True}


def test_the_text_says_what_a_person_asks() -> None:
    shown = repr(_found())
    assert shown.splitlines()[0] == "largest size within 9 B, recomputing one forward at most: 3"
    facts = dict(line.strip().split("  ", 1) for line in shown.split("\n\n")[0].splitlines()[1:])
    assert {name: fact.strip() for name, fact in facts.items()} == {
        "one more": "no schedule fits: proven",
        "keep all": "2, so 1.50 times as large",
        "fastest": "3: 0.75 samples/s, +0.0% recomputation",
        "ap-greedy": "2",
        "chen-sqrt": "plans no size",
        "measured": "9 B at the largest",
        "found in": "250.0 ms",
    }
    assert shown.splitlines()[-1].split()[:3] == ["3", "0.75", "4.0"]
    assert "<table>" in _found()._repr_html_()


def test_what_is_different_is_said() -> None:
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
