"""The command line: what it prints where, and with which code it ends."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import checkmate
from benchmarks.networks.dags import unit_chain
from checkmate import Problem, statusline
from checkmate.cli.app import main
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.roofline import STATED
from checkmate.solvers.frontier import frontier
from tests.support.processes import own_cache, run_fresh_python
from tests.support.sampling import long

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]
STEP = """
import time
import torch

def example(n=4):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return (lambda x: model(x).sum()), torch.ones(n, 8)

def unhurried(n=4):
    time.sleep(0.1)
    return example(n)

def named(n=4):
    step, x = example(n)
    return (lambda x, y: step(x) + step(y)), {"x": x, "y": x}

def whole(n=4):
    import checkmate
    model = torch.nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    return checkmate.training_step(lambda x: model(x).sum(), optimizer, budget="1 MB"), torch.ones(n, 8)

def fails(n=4):
    raise IndexError("no data")

def too_wide(n=4):
    return example()[0], torch.ones(n, 9)

def wrong(n=4):
    return 3

not_a_function = 3
"""
ENDS = "import argparse; argparse.ArgumentParser().error('')"
FILES = {"my_step": STEP, "lacking": "import nowhere_to_be_found", "leaves": "import sys; sys.exit(0)", "ends": ENDS}
SOLVE = ["solve", "chain.json", "--budget", "6"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """A current folder with a problem and a step, and a cache of its own; no progress, no modules left behind."""
    unit_chain(8).to_json(tmp_path / "chain.json")
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", own_cache(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_step", None)
    log = logging.getLogger("checkmate")
    log.setLevel(logging.NOTSET)
    log.handlers, log.propagate = [], True


def _json(capsys: Capture, *command: str) -> Any:
    assert main([*command, "--json"]) == 0
    out, _ = capsys.readouterr()
    return json.loads(out)


def test_a_problem_is_solved(capsys: Capture) -> None:
    found = _json(capsys, "solve", "chain.json", "--budget", "6B")
    assert (found["cost"], found["status"], found["peak"], found["budget"]) == (21.0, "optimal", 6, 6)
    assert sum(found["runs_again"].values()) == 4
    command = [*SOLVE, "--time-limit", "5", "--gap", "0", "--method"]
    assert _json(capsys, *command, "milp")["method"] == "milp"
    assert _json(capsys, *command, "next-use")["cost"] >= 21


def test_a_refusal_says_what_works_and_is_json_too(capsys: Capture) -> None:
    assert main(["solve", "chain.json", "--budget", "2", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "Smallest budget that works: 3 B" in err
    found = json.loads(out)
    assert (found["status"], found["min_budget"], found["gap"], found["cost"]) == ("infeasible", 3, None, None)


def test_a_plan_is_written_step_by_step_and_as_a_page(capsys: Capture, folder: Path) -> None:
    assert main([*SOLVE, "--save-plan", "plan.json", "--report", "plan.html"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("optimal (auto)")
    assert err == ""
    plan = json.loads((folder / "plan.json").read_text())
    runs = [step["run"] for step in plan["steps"] if "run" in step]
    assert len(runs) == plan["cost"] == 21
    assert {name for name in runs if runs.count(name) > 1} == set(plan["runs_again"])
    assert {"free": "v0"} in plan["steps"]
    assert "<title>" in (folder / "plan.html").read_text()


def test_a_page_of_a_problem_file(capsys: Capture, folder: Path, monkeypatch: Patch) -> None:
    """It is that of `checkmate.report`; by default beside where one stands, under the problem's name."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    monkeypatch.setattr("checkmate.solvers.frontier.frontier", partial(frontier, jobs=1))  # no processes to wait for
    command = ["report", *SOLVE[1:]]
    assert main(command) == 0
    assert (*capsys.readouterr(), opened) == (f"{folder / 'chain.html'}\n", "", [])
    text = (folder / "chain.html").read_text()
    solution = checkmate.solve(Problem.from_json("chain.json"), 6, time_limit=60, gap=1e-4)
    own = checkmate.report(solution, folder / "own.html").read_text()
    tiles = re.compile(r'<dl class="tiles".*?</dl>', re.DOTALL)
    assert tiles.findall(text) == tiles.findall(own)
    found = _json(capsys, *command, "-o", "it.html", "--open", "--prices", "--frontier")
    assert (found["page"], found["cost"], found["budget"]) == (str(folder / "it.html"), 21.0, 6)
    assert opened == [(folder / "it.html").as_uri()]
    assert all(part in (folder / "it.html").read_text() for part in ('id="frontier"', "table-prices"))
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert main([*command, "--open"]) == 0
    assert "no browser was found here; open " in capsys.readouterr().err
    assert main(["report", "chain.json", "--budget", "2"]) == 1
    assert "Smallest budget that works: 3 B" in capsys.readouterr().err
    assert main(["report", "my_step.py:example", "--budget", "1MB"]) == 2
    assert "checkmate plan my_step.py:example --budget 1MB --report plan.html" in capsys.readouterr().err


def test_a_frontier(capsys: Capture) -> None:
    rows = _json(capsys, "frontier", "chain.json", "--budget", "2", "6", "8", "--jobs", "1")
    assert [(row["budget"], row["cost"]) for row in rows] == [(2, None), (6, 21.0), (8, 19.0)]
    command = ["frontier", "chain.json", "--budget", "8", "--jobs", "1", "--methods", "auto,chen-sqrt"]
    assert main(command) == 0
    assert capsys.readouterr().out.count("8 B") >= 2
    assert main(["frontier", "chain.json", "--budget", "1", "--jobs", "1"]) == 1


def test_version_and_methods(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"checkmate {checkmate.__version__}"
    assert list(_json(capsys, "methods")) == list(checkmate.methods())
    assert main(["methods"]) == 0
    assert capsys.readouterr().out.strip() == repr(checkmate.methods())


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("solve none.json --budget 1GB", 2, "cannot read none.json: No such file"),
        ("solve my_step.py --budget 1GB", 1, "not JSON"),
        ("solve chain.json --budget many", 2, "Cannot read the budget 'many'"),
        ("solve chain.json --budget 0.5", 2, "at least one byte"),
        ("solve chain.json --budget 8 --method chen", 2, "there is no method 'chen'"),
        ("solve chain.json --budget 8 --time-limit -1", 2, "time_limit"),
        ("solve chain.json --budget 8 --gap 2", 2, "gap"),
        ("solve chain.json", 2, "--budget"),
        ("frontier chain.json --methods chen", 2, "no method 'chen'"),
        ("solve chain.json --budget 8 --save-plan no/folder/plan.json", 2, "no/folder"),
        ("solve chain.json --budget 8 --report no/folder/plan.html", 2, "no/folder"),
        ("solve chain.json --budget 6 --host-budget 1GB", 2, "needs --host-rate, too"),
        ("solve chain.json --budget 6 --host-rate 1GB/s", 2, "needs --host-budget, too"),
        ("solve chain.json --budget 6 --host-budget 1GB --host-rate 1,2,3", 2, "one rate, or one there and one back"),
        ("solve chain.json --budget 6 --host-budget 1GB --host-rate fast", 2, "such as '55 GB/s', not 'fast'"),
        ("plan my_step --budget 8GB", 2, "module:function"),
        ("plan none:example --budget 8GB", 2, "no module none"),
        ("plan none.py:example --budget 8GB", 2, "no file none.py"),
        ("plan lacking:example --budget 8GB", 1, "lacking cannot be imported: No module named 'nowhere_to_be_found'"),
        ("plan my_step:none --budget 8GB", 2, "example"),
        ("plan my_step:not_a_function --budget 8GB", 2, "no function"),
        ("plan my_step:wrong --budget 8GB", 2, "wrong returns int. TARGET is a function that"),
        ("plan my_step:too_wide --budget 8GB", 1, "mat1 and mat2 shapes cannot be multiplied"),
        ("plan my_step:fails --budget 8GB --method chen", 2, "there is no method 'chen'"),
        ("plan my_step:fails --budget 8GB", 1, "IndexError: no data"),
        ("plan my_step:example --budget 8GB --device abacus", 2, "no device 'abacus'"),
        ("plan my_step:example --budget fit", 2, "--budget fit is of the memory of a device: --device names"),
        ("max-batch my_step:example --budget 70% --device laptop", 2, "--device names one of"),
        ("plan my_step:example --budget 170% --device h100", 2, "100% at most"),
        ("plan my_step:example --budget 8GB --size 0", 2, "whole number"),
        ("plan my_step:example --budget 8GB --profile ops.txt", 2, ".json"),
        ("max-batch my_step:example --budget 8GB --max-overhead two", 2, "one-forward"),
        ("max-batch my_step:fails --budget 8GB", 1, "called with (1) failed"),
        ("fits leaves.py:example", 1, "ends the process when it is imported (SystemExit: 0)"),
        ("fits leaves.py:example", 1, 'under if __name__ == "__main__"'),
        ("fits ends.py:example", 1, "ends the process when it is imported (SystemExit: 2)"),
        ("", 2, "COMMAND"),
        ("dance", 2, "dance"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(command: str, code: int, says: str, capsys: Capture) -> None:
    assert main(command.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


TRAINING = """
import argparse
import sys
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 5)

model, loss_fn = Model(), torch.nn.functional.cross_entropy

def main():
    loss = Model()(torch.ones(2, 3)).sum()
    loss.backward()
    print(loss.item())

def quietly():
    model(torch.ones(2, 3)).sum().backward()

def of_options(options):
    return model, options.batch

def on_a_gpu():
    return Model(), torch.ones(2, 3).cuda()

def leaves():
    sys.exit(0)

def swapped():
    return torch.ones(2, 3), model
"""
DEVICE = ["--device", "rtx4090"]


@pytest.mark.parametrize(
    ("target", "options", "code", "says"),
    [
        ("main", DEVICE, 1, r"RuntimeError: .*\n.*train.py:\d+ in main: print.*\nWith --device tensors are made"),
        ("on_a_gpu", DEVICE, 1, r"train.py:\d+ in on_a_gpu.*\nWith --device .* leave out .cuda\(\)"),
        ("leaves", [], 1, r"SystemExit: 0.*\n.*train.py:\d+ in leaves"),
        ("quietly", [], 2, "quietly returns NoneType"),
        ("swapped", [], 2, r"swapped returns \(Tensor, Model\)"),
        ("of_options", [], 2, r"fails: missing a required argument: 'options' \(--size N gives it N\)"),
        ("Model", DEVICE, 2, "Model is a module"),
        ("model", [], 2, "model is a module"),
        ("train", [], 2, "has no function 'train'"),
    ],
)
def test_what_trains_is_told_the_lines_to_write(
    target: str, options: list[str], code: int, says: str, folder: Path, capsys: Capture
) -> None:
    (folder / "train.py").write_text(TRAINING)
    assert main(["fits", f"train.py:{target}", *options]) == code
    err = capsys.readouterr().err
    assert re.search(says, err, re.DOTALL)
    assert "TARGET is a function that returns (step, batch), and trains nothing itself. In train.py write" in err


def test_the_lines_to_write_are_what_fits_takes(folder: Path, capsys: Capture) -> None:
    (folder / "train.py").write_text(TRAINING)
    assert main(["fits", "train.py:train"]) == 2
    lines = [line[4:] for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    (folder / "train.py").write_text("\n".join([TRAINING, *lines]))
    assert main(["fits", "train.py:example"]) == 0


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(IndexError, match="no data"):
        main(["plan", "my_step:fails", "--budget", "8GB", "--debug"])


def test_budgets_of_a_card(capsys: Capture) -> None:
    """One of all of it is told what it leaves out; a share is of its room."""
    command = ["plan", "my_step:example", "--device", "rtx3060", "--size", "32", "--budget"]
    for budget, told in (("12GB", "12GB leaves too little of the 12.88 GB of NVIDIA GeForce RTX 3060"), ("10GB", "")):
        assert main([*command, budget]) == 0
        printed = capsys.readouterr()
        assert told in printed.err
        assert bool(told) == ("plan for 10.88 GB at most" in printed.err)
        assert f"roofline estimate for NVIDIA GeForce RTX 3060, {STATED}" in printed.out
    whole, half = (_json(capsys, *command, budget)["budget"] for budget in ("fit", "50%"))
    assert (whole, half) == (DEVICES["rtx3060"].room, DEVICES["rtx3060"].room // 2)


def test_a_step_is_traced_planned_and_saved(capsys: Capture, folder: Path) -> None:
    command = ["plan", "my_step:example", "--device", "h100", "--budget", "100kB", "--size", "32"]
    found = _json(capsys, *command, "--save-problem", "problem.json.gz")
    assert found["source"].startswith("roofline")
    assert found["peak"] <= 100_000
    problem = Problem.from_json(folder / "problem.json.gz")
    assert problem.keep_all_peak == found["keep_all_peak"]
    assert _json(capsys, "solve", "problem.json.gz", "--budget", "100kB")["cost"] == found["cost"]
    # a file is as good as a module, and costs are measured
    assert _json(capsys, "plan", "my_step.py:named", "--budget", "1MB")["source"].startswith("measured on cpu")
    # a whole training step is planned with its updates
    _json(capsys, "plan", "my_step:whole", *command[2:6], "--save-problem", "whole.json")
    assert Problem.from_json(folder / "whole.json").graph.ops[-1].target == "checkmate.update_parameter"


@pytest.mark.slow
def test_the_largest_batch(capsys: Capture) -> None:
    command = ["max-batch", "my_step:example", "--device", "h100", "--budget", "100kB", "--largest", "40"]
    found = _json(capsys, *command, "--max-overhead", "none", "--time-limit", "20")
    assert (found["size"], found["next_size"], found["max_overhead"]) == (40, "asked for no more", None)
    assert found["points"][-1]["peak"] <= 100_000
    assert main([*command, "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("largest size within 100.00 kB")
    assert "size 1 traced" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "words", "says"),
    [
        (False, [], r"checkmate: looking for the largest size, for 120 s at most .*\n"),
        long(False, ["--quiet"], ""),
        (True, [], r"[^\n]*size \d+ fits[^\n]*"),
        long(True, ["--quiet"], ""),
    ],
)
def test_the_largest_batch_shows_one_line(
    terminal: bool, words: list[str], says: str, capsys: Capture, monkeypatch: Patch
) -> None:
    """One that moves on a terminal, and in a file one that says what is done and how to see more."""
    import_module("tqdm.auto")
    monkeypatch.setattr(statusline, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(statusline, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    command = ["max-batch", "my_step:unhurried", "--device", "h100", "--budget", "9kB", "--largest", "9"]
    assert main([*command, *words]) == 0
    assert re.fullmatch(says, capsys.readouterr().err)


def test_a_budget_too_small_for_any_batch(capsys: Capture) -> None:
    assert main(["max-batch", "my_step:example", "--device", "h100", "--budget", "1kB", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "Not even size 1 fits 1.00 kB" in err
    assert json.loads(out)["error"] in err
    assert json.loads(out)["min_budget"] > 1000


def test_an_interrupted_plan_is_printed_and_known_by_the_code(monkeypatch: Patch, capsys: Capture) -> None:
    solution = replace(checkmate.solve(unit_chain(8), 6), interrupted=True)
    for effect, printed in (((KeyboardInterrupt,), ("", "checkmate: interrupted\n")), ((solution,), ("optimal", ""))):
        monkeypatch.setattr("checkmate.solvers.solve.solve", Mock(side_effect=effect))
        assert main(SOLVE) == 130
        out, err = capsys.readouterr()
        assert (out[: len("optimal")], err) == printed


def test_the_module_runs_and_what_needs_no_pytorch_loads_none(folder: Path) -> None:
    shown = run_fresh_python("-m", "checkmate", "--help")
    for command in ("plan", "solve", "frontier", "max-batch", "methods", "doctor"):
        assert command in shown.stdout
    code = f"""
import sys
from checkmate.cli.app import main
path = {str(folder / "chain.json")!r}
commands = [["methods"], ["solve", path, "--budget", "6"], ["frontier", path, "--budget", "6", "--jobs", "1"]]
codes = [main(command) for command in commands]
sys.stderr.write(str(codes) + str("torch" in sys.modules))
"""
    assert run_fresh_python("-c", code).stderr == "[0, 0, 0]False"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m checkmate methods | head -n 1; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("auto")
    assert run.stderr == ""


def test_rules_hold_and_a_wrong_one_is_the_users(capsys: Capture) -> None:
    asked = ["solve", "chain.json", "--json", "--budget"]
    assert main([*asked, "1 kB", "--rule", "op=once"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["rules"], record["runs_again"]) == ({"op": "once"}, {})
    assert main([*asked, "5 B", "--rule", "op=once", "--time-limit", "1"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["min_budget_without"]["op"] < record["min_budget"]
    for rule in ("opp=once", "op=onec", "once"):
        assert main([*asked, "1 kB", "--rule", rule]) == 2
    assert "'opp': 'once' names nothing in this step. Near it: 'op'" in capsys.readouterr().err


def test_a_second_memory_is_taken(capsys: Capture, folder: Path) -> None:
    command = ["solve", "chain.json", "--budget", "6B", "--host-budget", "100B", "--host-rate", "4B/s,2B/s"]
    found = _json(capsys, *command, "--host-one-link", "--save-plan", "plan.json")
    assert found["host"] == {"budget": 100, "send": 4.0, "fetch": 2.0, "one_link": True, "latency": 0.0}
    assert found["cost"] < 21
    assert found["second_memory"]["values"] > 0
    steps = json.loads((folder / "plan.json").read_text())["steps"]
    assert {kind for step in steps for kind in step} == {"run", "free", "send", "wait", "fetch", "drop"}
    rows = _json(capsys, "frontier", "chain.json", "--budget", "6", "--jobs", "1", *command[4:])
    assert rows[0]["cost"] < 21
