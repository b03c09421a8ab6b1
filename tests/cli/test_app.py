"""The command line: its output, its errors, and the code with which it ends."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest

import checkmate
from benchmarks.networks.dags import unit_chain
from checkmate import Problem, statusline
from checkmate.capture.fusion.kernels import Kernels
from checkmate.cli.arguments import LINES
from checkmate.demo import selftest, training
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.roofline import STATED
from checkmate.sizes.fits import fits
from checkmate.sizes.max_batch_size import max_batch_size
from checkmate.solvers.frontier import frontier
from checkmate.solvers.solve import solve
from tests.support.processes import own_cache, run_fresh_python
from tests.support.sampling import long

Patch = pytest.MonkeyPatch
Shell = Callable[..., Any]
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

def gated(n=4):
    model = torch.nn.Linear(8, 8)
    return (lambda x: (model(x).sigmoid() * 2 + x).square().sum()), torch.ones(n, 8)

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
ENDS = "import argparse; argparse.ArgumentParser().error('')"
FILES = {"my_step": STEP, "train": TRAINING, "ends": ENDS}
FILES |= {"lacking": "import nowhere_to_be_found", "leaves": "import sys; sys.exit(0)"}
SOLVE = "solve chain.json --budget 6"


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


@pytest.fixture
def answer(shell: Shell) -> Shell:
    return lambda command, code=0: json.loads(shell(f"{command} --json", code)[0])


def test_a_problem_is_solved(answer: Shell) -> None:
    found = answer(f"{SOLVE}B")
    assert (found["cost"], found["status"], found["peak"], found["budget"]) == (21.0, "optimal", 6, 6)
    assert sum(found["runs_again"].values()) == 4
    milp, heuristic = (answer(f"{SOLVE} --time-limit 5 --gap 0 --method {name}") for name in ("milp", "next-use"))
    assert milp["method"] == "milp"
    assert heuristic["cost"] >= 21


def test_a_refusal_says_what_works_and_is_json_too(shell: Shell) -> None:
    out, err = shell("solve chain.json --budget 2 --json", 1)
    assert "Smallest budget that works: 3 B" in err
    found = json.loads(out)
    assert (found["status"], found["min_budget"], found["gap"], found["cost"]) == ("infeasible", 3, None, None)
    out, err = shell("max-batch my_step:example --device h100 --budget 1kB --json", 1)
    assert "Not even size 1 fits 1.00 kB" in err
    assert json.loads(out)["error"] in err
    assert json.loads(out)["min_budget"] > 1000


def test_a_plan_is_written_step_by_step_and_as_a_page(shell: Shell, folder: Path) -> None:
    out, err = shell(f"{SOLVE} --save-plan plan.json --report plan.html")
    assert out.startswith("optimal (auto)")
    assert err == ""
    plan = json.loads((folder / "plan.json").read_text())
    runs = [step["run"] for step in plan["steps"] if "run" in step]
    assert len(runs) == plan["cost"] == 21
    assert {name for name in runs if runs.count(name) > 1} == set(plan["runs_again"])
    assert {"free": "v0"} in plan["steps"]
    assert "<title>" in (folder / "plan.html").read_text()


def test_a_page_of_a_problem_file(shell: Shell, answer: Shell, folder: Path, monkeypatch: Patch) -> None:
    """The page is that of `checkmate.report`, by default in the current folder under the problem's name."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    monkeypatch.setattr("checkmate.solvers.frontier.frontier", partial(frontier, jobs=1))  # no processes to wait for
    command = "report chain.json --budget 6"
    assert (*shell(command), opened) == (f"{folder / 'chain.html'}\n", "", [])
    text = (folder / "chain.html").read_text()
    solution = checkmate.solve(Problem.from_json("chain.json"), 6, time_limit=60, gap=1e-4)
    own = checkmate.report(solution, folder / "own.html").read_text()
    tiles = re.compile(r'<dl class="tiles".*?</dl>', re.DOTALL)
    assert tiles.findall(text) == tiles.findall(own)
    found = answer(f"{command} -o it.html --open --prices --frontier")
    assert (found["page"], found["cost"], found["budget"]) == (str(folder / "it.html"), 21.0, 6)
    assert opened == [(folder / "it.html").as_uri()]
    assert all(part in (folder / "it.html").read_text() for part in ('id="frontier"', "table-prices"))
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert "no browser was found here; open " in shell(f"{command} --open")[1]
    assert "Smallest budget that works: 3 B" in shell("report chain.json --budget 2", 1)[1]
    of_a_step = "my_step.py:example --budget 1MB"
    assert f"checkmate plan {of_a_step} --report plan.html" in shell(f"report {of_a_step}", 2)[1]


def test_a_frontier(shell: Shell, answer: Shell) -> None:
    command = "frontier chain.json --jobs 1 --budget"
    rows = answer(f"{command} 2 6 8")
    assert [(row["budget"], row["cost"]) for row in rows] == [(2, None), (6, 21.0), (8, 19.0)]
    assert shell(f"{command} 8 --methods auto,chen-sqrt")[0].count("8 B") >= 2
    shell(f"{command} 1", 1)


def test_version_and_methods(shell: Shell, answer: Shell) -> None:
    assert shell("--version")[0].strip() == f"checkmate {checkmate.__version__}"
    assert list(answer("methods")) == list(checkmate.methods())
    assert shell("methods")[0].strip() == repr(checkmate.methods())


def test_the_help_names_the_defaults_of_the_calls(shell: Shell) -> None:
    def default(call: Callable[..., Any], name: str) -> Any:
        return signature(call).parameters[name].default

    for command, words in {
        "solve": f"stop at this gap, by default {default(solve, 'gap')}",
        "frontier": f"by default {default(frontier, 'methods')[0]}",
        "max-batch": f"{default(max_batch_size, 'max_overhead')} (default)",
        "demo": f"by default {training.STEPS}",
    }.items():
        assert words in shell(f"{command} --help")[0]
    calls: dict[str, Any] = {"solve": solve, "frontier": frontier, "max-batch": max_batch_size, "fits": fits}
    seconds = {name: default(call, "time_limit") for name, call in calls.items()} | {"selftest": selftest.SECONDS}
    for command, limit in seconds.items():
        assert re.search(rf"--time-limit S +by default {limit:g} s\n", shell(f"{command} --help")[0])


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
        ("plan my_step:example --budget 8", 2, "Did you mean '8 GB'?"),
        ("fits my_step.py:example --budget 8", 2, "Did you mean '8 GB'?"),
        ("max-batch my_step:example --budget 8", 2, "Did you mean '8 GB'?"),
        ("fits train.py", 2, "TARGET is train.py:function; train.py has main, "),
        ("fits my_step.py:example --device 4900", 2, "Did you mean 'rtx4090'"),
        ("fits leaves.py:example", 1, "ends the process when it is imported (SystemExit: 0)"),
        ("fits leaves.py:example", 1, 'under if __name__ == "__main__"'),
        ("fits ends.py:example", 1, "ends the process when it is imported (SystemExit: 2)"),
        ("", 2, "COMMAND"),
        ("dance", 2, "dance"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(command: str, code: int, says: str, shell: Shell) -> None:
    out, err = shell(command, code)
    assert out == ""
    assert says in err
    assert "Traceback" not in err


DEVICE = "--device rtx4090"


@pytest.mark.parametrize(
    ("target", "options", "code", "says"),
    [
        ("main", DEVICE, 1, r"RuntimeError: .*\n.*train.py:\d+ in main: print.*\nWith --device tensors are made"),
        ("on_a_gpu", DEVICE, 1, r"train.py:\d+ in on_a_gpu.*\nWith --device .* leave out .cuda\(\)"),
        ("leaves", "", 1, r"SystemExit: 0.*\n.*train.py:\d+ in leaves"),
        ("quietly", "", 2, "quietly returns NoneType"),
        ("swapped", "", 2, r"swapped returns \(Tensor, Model\)"),
        ("of_options", "", 2, r"fails: missing a required argument: 'options' \(--size N gives it N\)"),
        ("Model", DEVICE, 2, "Model is a module"),
        ("model", "", 2, "model is a module"),
        ("train", "", 2, "has no function 'train'"),
    ],
)
def test_what_trains_is_told_the_lines_to_write(target: str, options: str, code: int, says: str, shell: Shell) -> None:
    _, err = shell(f"fits train.py:{target} {options}", code)
    assert re.search(says, err, re.DOTALL)
    assert "TARGET is a function that returns (step, batch), and trains nothing itself. In train.py write" in err


def test_the_lines_to_write_are_what_fits_takes(folder: Path, shell: Shell) -> None:
    lines = [line[4:] for line in shell("fits train.py:train", 2)[1].splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    (folder / "train.py").write_text("\n".join([TRAINING, *lines]))
    shell("fits train.py:example")


@pytest.mark.parametrize("name", ["types", "random", "torch"])
def test_a_script_may_be_named_as_a_module_in_use(name: str, folder: Path, shell: Shell) -> None:
    (folder / f"{name}.py").write_text(FILES["my_step"])
    before = sys.modules[name]
    try:
        assert "It fits" in shell(f"fits {name}.py:example --device rtx4090")[0]
        assert sys.modules[name] is before
    finally:
        sys.modules[name] = before


def test_a_script_in_a_folder_finds_the_module_beside_it(folder: Path, shell: Shell) -> None:
    (folder / "deeper").mkdir()
    (folder / "deeper" / "beside_the_step.py").write_text(FILES["my_step"])
    (folder / "deeper" / "step_in_folder.py").write_text("from beside_the_step import example")
    try:
        assert "It fits" in shell("fits deeper/step_in_folder.py:example --device rtx4090")[0]
    finally:
        for name in ("beside_the_step", "step_in_folder"):
            sys.modules.pop(name, None)


def test_debug_shows_where_an_error_comes_from(shell: Shell) -> None:
    with pytest.raises(IndexError, match="no data"):
        shell("plan my_step:fails --budget 8GB --debug")


def test_budgets_of_a_card(shell: Shell, answer: Shell) -> None:
    """A budget of the whole card is told what it leaves out; a share is of the card's room."""
    command = "plan my_step:example --device rtx3060 --size 32 --budget"
    for budget, told in (
        ("12GB", "12.00 GB leaves too little of the 12.88 GB of NVIDIA GeForce RTX 3060"),
        ("10GB", ""),
    ):
        out, err = shell(f"{command} {budget}")
        assert told in err
        assert bool(told) == ("plan for 10.88 GB at most" in err)
        assert f"roofline estimate for NVIDIA GeForce RTX 3060, {STATED}" in out
    whole, half = (answer(f"{command} {budget}")["budget"] for budget in ("fit", "50%"))
    assert (whole, half) == (DEVICES["rtx3060"].room, DEVICES["rtx3060"].room // 2)


def test_a_step_is_traced_planned_and_saved(answer: Shell, folder: Path) -> None:
    on_a_gpu = "--device h100 --budget 100kB"
    found = answer(f"plan my_step:example {on_a_gpu} --size 32 --save-problem problem.json.gz")
    assert found["source"].startswith("roofline")
    assert found["peak"] <= 100_000
    problem = Problem.from_json(folder / "problem.json.gz")
    assert problem.keep_all_peak == found["keep_all_peak"]
    assert answer("solve problem.json.gz --budget 100kB")["cost"] == found["cost"]
    # a file is as good as a module, and costs are measured
    assert answer("plan my_step.py:named --budget 1MB")["source"].startswith("measured on cpu")
    # a whole training step is planned with its updates
    answer(f"plan my_step:whole {on_a_gpu} --save-problem whole.json")
    assert Problem.from_json(folder / "whole.json").graph.ops[-1].target == "checkmate.update_parameter"


def test_groups_of_ops_are_kernels_where_that_is_asked_for(answer: Shell, folder: Path) -> None:
    assert f"{{{','.join(get_args(Kernels))}}}" in LINES["--kernels"]
    for kernels in get_args(Kernels):
        answer(f"plan my_step:gated --device h100 --budget 1MB --kernels {kernels} --save-problem problem.json")
        targets = [op.target for op in Problem.from_json(folder / "problem.json").graph.ops]
        assert any(target.startswith("checkmate.fused") for target in targets) == (kernels != "eager")


@pytest.mark.slow
def test_the_largest_batch(shell: Shell, answer: Shell) -> None:
    command = "max-batch my_step:example --device h100 --budget 100kB --largest 40"
    found = answer(f"{command} --max-overhead none --time-limit 20")
    assert (found["size"], found["next_size"], found["max_overhead"]) == (40, "asked for no more", None)
    assert found["points"][-1]["peak"] <= 100_000
    out, err = shell(f"{command} --verbose")
    assert out.startswith("largest size within 100.00 kB")
    assert "size 16 traced" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "option", "says"),
    [
        (False, "", r"checkmate: looking for the largest size, for 120 s at most .*\n"),
        long(False, "--quiet", ""),
        (True, "", r"[^\n]*size \d+ fits[^\n]*"),
        long(True, "--quiet", ""),
    ],
)
def test_the_largest_batch_shows_one_line(
    terminal: bool, option: str, says: str, shell: Shell, monkeypatch: Patch
) -> None:
    """The line moves on a terminal; in a file it says what is done and how to see more."""
    import_module("tqdm.auto")
    monkeypatch.setattr(statusline, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(statusline, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert re.fullmatch(says, shell(f"max-batch my_step:unhurried --device h100 --budget 9kB --largest 9 {option}")[1])


def test_an_interrupted_plan_is_printed_and_known_by_the_code(monkeypatch: Patch, shell: Shell) -> None:
    solution = replace(checkmate.solve(unit_chain(8), 6), interrupted=True)
    for effect, printed in (((KeyboardInterrupt,), ("", "checkmate: interrupted\n")), ((solution,), ("optimal", ""))):
        monkeypatch.setattr("checkmate.solvers.solve.solve", Mock(side_effect=effect))
        out, err = shell(SOLVE, 130)
        assert (out[: len("optimal")], err) == printed


def test_the_module_runs_and_what_needs_no_pytorch_loads_none(folder: Path) -> None:
    shown = run_fresh_python("-m", "checkmate", "--help").stdout
    assert all(command in shown for command in ("plan", "solve", "frontier", "max-batch", "methods", "doctor"))
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


def test_rules_hold_and_a_wrong_one_is_the_users(shell: Shell, answer: Shell) -> None:
    asked = "solve chain.json --budget"
    record = answer(f"{asked} 1kB --rule op=once")
    assert (record["rules"], record["runs_again"]) == ({"op": "once"}, {})
    record = answer(f"{asked} 5B --rule op=once --time-limit 1", 1)
    assert record["min_budget_without"]["op"] < record["min_budget"]
    said = {rule: shell(f"{asked} 1kB --json --rule {rule}", 2)[1] for rule in ("opp=once", "op=onec", "once")}
    assert "'opp': 'once' names nothing in this step. Near it: 'op'" in said["opp=once"]


def test_a_second_memory_is_taken(answer: Shell, folder: Path) -> None:
    memory = "--host-budget 100B --host-rate 4B/s,2B/s"
    found = answer(f"{SOLVE}B {memory} --host-one-link --save-plan plan.json")
    assert found["host"] == {"budget": 100, "send": 4.0, "fetch": 2.0, "one_link": True, "latency": 0.0}
    assert found["cost"] < 21
    assert found["second_memory"]["values"] > 0
    steps = json.loads((folder / "plan.json").read_text())["steps"]
    assert {kind for step in steps for kind in step} == {"run", "free", "send", "wait", "fetch", "drop"}
    assert answer(f"frontier chain.json --budget 6 --jobs 1 {memory}")[0]["cost"] < 21
