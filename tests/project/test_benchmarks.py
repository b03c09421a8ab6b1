"""The benchmarks run, and measure what they say; their networks train, and the same seed gives the same numbers."""

from __future__ import annotations

import argparse
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common import timing as measuring
from benchmarks.common.apart import LOCK, alone, apart
from benchmarks.common.rows import add_names, append, latest, origin, read
from benchmarks.gpu import budgets
from benchmarks.gpu.__main__ import main, rows_of
from benchmarks.gpu.items import Asked
from benchmarks.networks import CASES
from benchmarks.start.script import started
from checkmate.backends.tensor_state import differing
from checkmate.demo.training import train
from tests.support.bits import assert_same_bits
from tests.support.processes import run_fresh_python
from tests.support.simulated_cuda.install import environment, is_installed


def _run(folder: Path, module: str, *asked: str, **environment: str) -> tuple[str, list[Any]]:
    """Run a benchmark in a process of its own: its output, and all rows of its file."""
    out = folder / "rows.jsonl"
    return run_fresh_python("-m", module, "--out", str(out), *asked, **environment).stdout, read(out)


@pytest.mark.long
def test_the_benchmark_appends_a_row_for_each_budget(tmp_path: Path) -> None:
    _, rows = _run(tmp_path / "results", "benchmarks.step", "mlp", "--quick")
    _, more = _run(tmp_path / "results", "benchmarks.step", "mlp", "--quick")
    again = 0 if not rows[0]["commit"].endswith("-dirty") else 3  # of a commit what has a row is not measured again
    assert (len(rows), len(more), more[:3]) == (3, 3 + again, rows)
    assert all(row["bitwise"] for row in rows)
    assert all(row["measured_peak"] == row["predicted_peak"] <= row["budget"] for row in rows)
    assert rows[2]["overhead"] == 0.0


@pytest.mark.long
def test_the_seconds_of_a_first_step_are_those_of_its_parts() -> None:
    asked = {"backend": "checkmate", "name": "mlp", "budget": 10**9, "time_limit": 1.0}
    (row,) = apart(partial(started, ["torch", "checkmate"], **asked))
    parts = [row[f"{part}_seconds"] for part in ("dynamo", "aot", "measure", "plan", "code", "second_step")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(row["step_seconds"])
    assert row["import_seconds"] > 0.1


@pytest.mark.long
def test_the_second_start_takes_its_plans_from_disk(tmp_path: Path) -> None:
    printed, rows = _run(tmp_path, "benchmarks.start", "mlp", "--time-limit", "1")
    assert [(row["by"], row["start"]) for row in rows] == [
        (by, start) for by in ("checkmate", "plain PyTorch", "aot_eager") for start in ("cold", "warm")
    ]
    cold, warm = rows[:2]
    assert (cold["from"], warm["from"], warm["gap"]) == (None, "plan cache", cold["gap"])
    assert warm["plan_seconds"] < 1
    assert cold["peak"] == warm["peak"] <= cold["budget"]
    assert printed.count("mlp ") == 2 * len(rows)


@pytest.mark.long
def test_a_loss_in_parts_is_measured_beside_other_ways(tmp_path: Path) -> None:
    _, (plain, by_hand, *others) = _run(tmp_path, "benchmarks.loss", "--quick", "--rounds", "2")
    ours = [row for row in others if row["way"].startswith("checkmate")]
    assert not by_hand["same_bits"]
    assert all(row["same_bits"] and row["peak"] == row["planned"] <= row["budget"] for row in ours)
    assert len(ours) >= 2
    assert max(row["peak"] for row in ours) < 0.5 * plain["peak"]


@pytest.mark.long
def test_what_the_machine_gives_is_measured_beside_the_allocator(tmp_path: Path) -> None:
    options = "--share", "0.7", "--time-limit", "2", "--rounds", "3"
    _, (row,) = _run(tmp_path, "benchmarks.arena", "demo-text", *options)
    assert row["fallbacks"] == 0
    assert row["live_peak"] <= row["planned_bytes"]
    assert row["arena_bytes"] <= 1.02 * row["live_peak"]
    assert min(row[f"{kind}_seconds"] for kind in ("plain", "allocator", "arena")) > 0


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


def test_adam_is_in_place_and_moved_nothing() -> None:
    module = torch.nn.Linear(3, 2)
    before = [parameter.clone() for parameter in module.parameters()]
    optimizer = budgets.adam(module)
    assert_same_bits(module.parameters(), before)
    assert all(optimizer.state[parameter]["exp_avg_sq"].shape == parameter.shape for parameter in module.parameters())


def test_training_repeats_bitwise_and_another_seed_does_not(one_thread: None) -> None:
    def trained(seed: int) -> list[torch.Tensor]:
        module, step, batch = CASES["mlp"].make(0)
        return train(module, step, [batch] * 2, seed)

    first = trained(0)
    assert_same_bits(trained(0), first)
    assert differing(trained(1), first)


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


@pytest.mark.long
def test_a_fraction_of_a_device_is_compared_with_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where the fraction is only noted: the plain step does not run out of memory, the losses are equal."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    setting = budgets.Setting(budgets.NETWORKS["gpt2"], torch.device("cpu"), amp=False, small=True)
    plain = budgets.measured_plain(setting)
    row = budgets.limited_row(setting, plain, time_limit=1.0)
    facts = plain["facts"]
    assert facts["min_budget"] < row["budget"] < row["limit"] < facts["plain_peak"]
    assert fractions == [row["limit"] / 10**9, 1.0]
    assert row["losses"] == row["plain_losses"]
    assert len(row["losses"]) == 2
    assert row["bitwise"]
    assert not row["plain_ran_out_of_memory"]


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
