"""The runner of benchmarks, and the count of tests that they run; no PyTorch, which each process would import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import runner
from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.rows import cell, read
from benchmarks.common.runner import Benchmark
from benchmarks.versions import counted, ended

TESTS = """
import os
import pytest

def test_that_passes():
    assert os.environ["HERE"] == "yes"

@pytest.mark.parametrize("number", [1])
def test_that_fails(number):
    assert number == 2

@pytest.mark.skip
def test_that_is_skipped():
    pass

@pytest.mark.slow
def test_that_is_slow():
    assert False
"""


def _squares(name: str, power: int, terms: list[int]) -> list[dict[str, Any]]:
    return [{"of": name, "sum": sum(term**power for term in terms)}]


def test_a_benchmark_measures_each_case_once_a_commit_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, written = tmp_path / "sums.jsonl", list[Path]()
    benchmark = Benchmark(
        "Sums of powers.",
        "sums.jsonl",
        _squares,
        {"of": "{of}", "sum": "{sum}"},
        names=("one", "two"),
        options={"power": ((2, 3), "of each term"), "terms": ([1, 2], "to add up")},
        quick={"names": ["two"], "terms": [3]},
        report=written.append,
    )
    commit = {"commit": "0123"}
    monkeypatch.setattr(runner, "origin", lambda *packages: commit)
    benchmark.run(["one", "--out", str(out)])
    assert [row["sum"] for row in read(out)] == [5, 9]
    assert read(out)[0]["asked"] == {"name": "one", "power": 2, "terms": [1, 2]}
    benchmark.run(["--power", "3", "--out", str(out)])  # one is there already
    assert [(row["of"], row["sum"]) for row in read(out)[2:]] == [("two", 9)]
    benchmark.run(["--quick", "--out", str(out)])
    assert [(row["of"], row["sum"]) for row in read(out)[3:]] == [("two", 9), ("two", 27)]
    benchmark.run(["--report", "--out", str(out)])
    assert written == [out] * 4
    assert "two  27" in capsys.readouterr().out
    commit["commit"] = "0123-dirty"
    with pytest.raises(SystemExit, match="commit first"):
        benchmark.run(["one"])


def test_a_column_has_what_stands_for_figures_that_are_not() -> None:
    row = {"peak": 2_000_000, "gap": None, "cost": 0.99999}
    shown = [cell(row, column) for column in ("{peak:bytes}", "{gap:.2%}|{none:bytes}|–", "{gap[0]}", "{cost:beyond}")]
    assert shown == ["2.00 MB", "–", "", "+0.00%"]
    assert cell(row, lambda row: f"{row['cost']:.1f}") == "1.0"


def _halves(name: str, part: float) -> Iterator[dict[str, Any]]:
    yield {"of": name, "part": part}
    if name == "gone":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_parts_of_a_name_and_a_process_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = Benchmark(
        "Parts.",
        "parts.jsonl",
        _halves,
        {"of": "{of}", "part": "{part}"},
        names=("here", "gone"),
        options={"part": ({"here": (0.5, 0.25), "gone": (1.0,)}, "of the name")},
        ended=lambda case, end: {"of": case["name"], "part": str(end)},
    )
    monkeypatch.setattr(runner, "origin", lambda *packages: {"commit": "0123"})
    out = tmp_path / "parts.jsonl"
    benchmark.run(["--out", str(out)])
    ended = f"the process ended with code -{int(signal.SIGKILL)}"
    assert [(row["of"], row["part"]) for row in read(out)] == [("here", 0.5), ("here", 0.25), ("gone", ended)]
    benchmark.run(["here", "--part", "2", "--out", str(out)])
    assert read(out)[-1]["asked"] == {"name": "here", "part": 2.0}


def _counted_up(how: str) -> Iterator[Any]:
    yield os.environ.get("HERE")
    if how == "error":
        raise ValueError("no\nreally")
    if how == "late":
        time.sleep(600)
    if how == "out of seconds":
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGVTALRM)
    yield how


def test_what_a_process_tells_arrives_and_what_ends_it_is_told() -> None:
    assert [*apart(partial(_counted_up, "end"), environment={"HERE": "yes"})] == ["yes", "end"]
    assert "HERE" not in os.environ
    _ends_early("error", "ValueError: no", late=False)
    _ends_early("out of seconds", f"the process ended with code -{int(signal.SIGVTALRM)}", late=True)


@pytest.mark.long
@pytest.mark.wall_clock
def test_a_process_is_heard_for_so_long() -> None:
    _ends_early("late", "nothing heard for 20 seconds", late=True, patience=20)


def _ends_early(how: str, why: str, *, late: bool, **options: Any) -> None:
    told = apart(partial(_counted_up, how), **options)
    assert next(told) is None
    with pytest.raises(EndedEarly) as caught:
        next(told)
    assert (str(caught.value), caught.value.late) == (why, late)


def test_a_process_that_nobody_hears_any_more_is_ended() -> None:
    told = apart(partial(_counted_up, "late"))
    next(told)
    (process,) = multiprocessing.active_children()
    told.close()
    assert not process.is_alive()


def test_each_kind_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "test_tiny.py"
    path.write_text(TESTS)
    kinds = {"not slow": [str(path)], "slow": [str(path)]}
    found = counted(kinds, "-q", environment={**os.environ, "HERE": "yes"})
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert [name.rpartition("::")[2] for name in found["names"]] == ["test_that_fails[1]", "test_that_is_slow"]
    assert ended(-4)["names"] == ["the process ended with -4"]
