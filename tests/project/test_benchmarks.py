"""The benchmarks run, and measure what they say; their networks train, and the same seed gives the same numbers."""

from __future__ import annotations

import argparse
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import timing as measuring
from benchmarks.common.apart import LOCK, alone
from benchmarks.common.rows import add_names, append, latest, origin, read
from benchmarks.gpu import budgets
from benchmarks.gpu.__main__ import main, rows_of
from benchmarks.gpu.items import Asked
from benchmarks.networks import CASES
from checkmate.backends.tensor_state import differing
from tests.support.processes import run_fresh_python
from tests.support.simulated_cuda.install import environment, is_installed


def _run(folder: Path, module: str, *asked: str, **environment: str) -> tuple[str, list[Any]]:
    """Run a benchmark in a process of its own: its output, and all rows of its file."""
    out = folder / "rows.jsonl"
    return run_fresh_python("-m", module, "--out", str(out), *asked, **environment).stdout, read(out)


def _of_steps(rows: list[Any]) -> bool:
    exact = all(row["bitwise"] and row["measured_peak"] == row["predicted_peak"] <= row["budget"] for row in rows)
    return exact and rows[2]["overhead"] == 0.0


def _of_starts(rows: list[Any]) -> bool:
    """The second start takes its plans from disk; the seconds of a step are those of its parts."""
    cold, warm = rows[:2]
    parts = ("dynamo", "aot", "measure", "plan", "code", "second_step")
    assert sum(cold[f"{part}_seconds"] for part in parts) == pytest.approx(cold["step_seconds"])
    assert (cold["from"], warm["from"], warm["gap"]) == (None, "plan cache", cold["gap"])
    return warm["plan_seconds"] < 1 and cold["peak"] == warm["peak"] <= cold["budget"]


def _of_losses(rows: list[Any]) -> bool:
    ours = [row for row in rows if row["way"].startswith("checkmate")]
    exact = all(row["same_bits"] and row["peak"] == row["planned"] <= row["budget"] for row in ours)
    return exact and not rows[1]["same_bits"] and max(row["peak"] for row in ours) < 0.5 * rows[0]["peak"]


def _of_arenas(rows: list[Any]) -> bool:
    (row,) = rows
    assert min(row[f"{kind}_seconds"] for kind in ("plain", "allocator", "arena")) > 0
    return (
        row["fallbacks"] == 0
        and row["live_peak"] <= row["planned_bytes"]
        and row["arena_bytes"] <= 1.02 * row["live_peak"]
    )


SCRIPTS = {  # what is asked of each, how many rows it writes at least, and what these promise
    "step": ("mlp --quick", 3, _of_steps),
    "start": ("mlp --time-limit 1", 6, _of_starts),
    "loss": ("--quick --rounds 2", 4, _of_losses),
    "arena": ("demo-text --share 0.7 --time-limit 2 --rounds 3", 1, _of_arenas),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_small_and_its_rows_keep_what_they_promise(name: str, tmp_path: Path) -> None:
    asked, count, promise = SCRIPTS[name]
    _, rows = _run(tmp_path / "results", f"benchmarks.{name}", *asked.split())
    assert len(rows) >= count
    assert promise(rows)


@pytest.mark.long
def test_the_benchmark_for_a_gpu_runs_small_on_the_cpu(tmp_path: Path) -> None:
    asked = "--device", "cpu", "--small", "--seconds", "600", "--jobs", "2"
    items = "machine", "unet", "whole", "second", "largest", "peers gpt2"
    printed, rows = _run(tmp_path, "benchmarks.gpu", *asked, "--only", *items)
    within = [row for row in rows if row["item"].startswith("unet ") and "share" in row]
    assert {row["item"] for row in within} == {"unet float32", "unet bfloat16"}
    assert len(within) == 2 * 3
    assert all(row["bitwise"] and row["plain_repeats"] for row in within)
    assert [row["measured_peak"] for row in within] == [row["predicted_peak"] for row in within]
    assert {row["item"] for row in rows if row.get("ended") == "at its end"} == {row["item"] for row in rows}
    assert printed.count("ended=at its end") == len({row["item"] for row in rows})
    assert {row["way"] for row in rows if "way" in row} == {"plain", "each block", "planned", "planned, by its plans"}
    shown = run_fresh_python("-m", "benchmarks.gpu", "--table", str(tmp_path / "rows.jsonl")).stdout
    assert len(shown.splitlines()) == len(rows)


@pytest.mark.long
def test_what_fails_in_an_item_is_a_row_and_no_item_begins_without_time(tmp_path: Path) -> None:
    asked = Asked(torch.device("cpu"), small=True, pairs=2, time_limit=1.0, seconds=60.0)
    failed, *others = rows_of("no such item", asked, time.monotonic() + 60, str(tmp_path / "lock"))
    assert not others
    assert failed["error"].startswith("KeyError")
    assert "items.py" in failed["traceback"]
    (late,) = rows_of("machine", asked, time.monotonic() + 1, str(tmp_path / "lock"))
    assert late["ended"] == "not begun: no time was left"


@pytest.mark.slow
def test_what_is_timed_waits_for_others_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCK, str(tmp_path / "lock"))
    order: list[str] = []

    def other() -> None:
        with alone():
            order.append("other")

    with alone():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


@pytest.mark.cuda
@pytest.mark.long
def test_the_benchmark_for_a_gpu_runs_small_on_one(tmp_path: Path) -> None:
    """Items side by side, each in a process of its own. ``make gpu`` runs it, on the simulated one too."""
    asked = "--small", "--seconds", "600", "--jobs", "2", "--only", "machine", "gpt2 f", "limit"
    _, rows = _run(tmp_path, "benchmarks.gpu", *asked, **environment())
    (limited,) = (row for row in rows if "limit" in row)
    assert limited["plain_ran_out_of_memory"]
    within = [row for row in rows if "share" in row]
    assert len(within) == 3
    assert all(row["within"] for row in within)
    (workspaces,) = (row["bytes"] for row in rows if "workspaces" in row)
    assert workspaces == sorted(workspaces)
    if is_installed():  # on a GPU attention's gradients need not repeat
        assert all(row["bitwise"] for row in within)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_benchmark_for_a_gpu_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match=r"^There is no CUDA device here\."):
        main()


def test_numbers_that_differ_are_held_against_the_spread_of_plain_runs() -> None:
    ones = torch.ones(3)
    same = budgets.compare([ones], [[ones], [ones.clone()]])
    assert same == {"plain_repeats": True, "bitwise": True, "difference": 0.0, "plain_spread": 0.0}
    spread = budgets.compare([ones * 1.5], [[ones], [ones * 2]])
    assert spread == {"plain_repeats": False, "bitwise": False, "difference": 0.25, "plain_spread": 1.0}


def test_steps_take_turns_and_the_first_round_does_not_count() -> None:
    told: list[str] = []
    steps = {name: partial(told.append, name) for name in "ab"}
    seconds = measuring.seconds_in_turn(steps, 2, lambda: told.append("-"))
    assert "".join(told) == "-b-a" + "-a-b" + "-b-a"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert measuring.median_ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0


def test_rows_are_appended_and_read_and_the_last_of_each_is_found(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    assert read(path) == []
    append(path, {"a": 1, "b": 1}, {"a": 2, "b": 1})
    append(path, {"a": 1, "b": 2})
    assert latest(read(path), "a") == [{"a": 1, "b": 2}, {"a": 2, "b": 1}]
    assert set(origin("numpy")) == {"date", "commit", "numpy", "python", "cpu"}


def test_a_network_that_there_is_not_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_names(parser, ("one", "two"))
    assert parser.parse_args([]).names == ["one", "two"]
    assert parser.parse_args(["two"]).names == ["two"]
    with pytest.raises(SystemExit):
        parser.parse_args(["three"])
    assert "there is no 'three'; there are one, two" in capsys.readouterr().err


def _losses(name: str) -> list[float]:
    module, step, batch = CASES[name].make(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        assert [key for key, parameter in module.named_parameters() if parameter.grad is None] == []
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_three_steps_change_the_loss_and_repeat_bitwise(name: str, one_thread: None) -> None:
    """And every parameter gets a gradient. Another seed gives another network."""
    modules = [CASES[name].make(seed)[0] for seed in (0, 1)]
    assert differing(*(module.parameters() for module in modules))
    first = _losses(name)
    assert len(set(first)) == 3
    assert first == _losses(name)
