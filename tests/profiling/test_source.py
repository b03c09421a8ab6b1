"""Costs measured on one machine plan steps on another; what a table lacks is refused by name."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate import InvalidProblem, Profile, Unsupported
from checkmate.core.files import DATABASE, folder
from checkmate.devices import CUDA
from checkmate.profiling import measure
from checkmate.profiling.cost_cache import OpTable, conditions_on, read, write
from checkmate.profiling.measure import export
from tests.support.processes import own_cache, run_python


@pytest.fixture
def runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "call_of", lambda node: pytest.fail("an op runs"))


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("checkmate.profiling.cost_cache._known", {})
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", own_cache(tmp_path / "cache"))


def _step(device: str = "cpu") -> tuple[object, Tensor]:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    return (lambda x: net(x).sum()), torch.ones(4, 16, device=device)


@functools.cache
def _there() -> tuple[checkmate.Problem, str]:
    """A step measured on "the cluster", and the table of its ops."""
    problem = checkmate.trace(*_step())
    export(folder() / "there.json")
    return problem, (folder() / "there.json").read_text()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file that is taken home from there."""
    (tmp_path / "ops.json").write_text(_there()[1])
    return tmp_path / "ops.json"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_table_gives_the_costs_that_were_measured_and_runs_nothing(
    device: str, path: Path, runs_nothing: None
) -> None:
    there, (step, x) = _there()[0], _step(device)
    for choice in (path, str(path), read(path)):
        here = checkmate.trace(step, x, profile=choice)
        assert here.graph.ops == there.graph.ops or device == "meta"
        assert here.seconds.tolist() == there.seconds.tolist()
        assert here.workspace.tolist() == there.workspace.tolist()
        assert "measured on cpu" in here.profile.source
    assert checkmate.trace(step, x, profile=path).profile.source.startswith("ops.json: ")


def test_a_step_is_compiled_with_costs_of_another_machine(path: Path, runs_nothing: None) -> None:
    step, x = _step()
    compiled = checkmate.compile(step, budget="1 MB", profile=path)
    compiled(x).backward()
    assert compiled.plans[0].cost == _there()[0].keep_all_cost


def test_what_a_table_lacks_is_refused_by_name(path: Path) -> None:
    table = read(path)
    write(path, OpTable(table.conditions, {key: cost for key, cost in table.ops.items() if "tanh.default" not in key}))
    step, x = _step()
    says = r"ops\.json, measured on cpu.*lacks ops.*aten\.tanh\.default \(\(float32\[4, 16"
    with pytest.raises(Unsupported, match=says):
        checkmate.trace(step, x, profile=path)
    with pytest.raises(Unsupported, match=r"and \d+ more"):
        checkmate.trace(step, torch.ones(5, 16), profile=path)


def test_what_did_not_run_there_is_estimated_here(path: Path) -> None:
    table = read(path)
    write(path, OpTable(table.conditions, {k: None if "tanh.default" in k else cost for k, cost in table.ops.items()}))
    step, x = _step()
    profile = checkmate.trace(step, x, profile=path).profile
    assert len(profile.estimated) == 1
    assert profile.source.endswith("; 1 op estimated")


def test_a_profile_is_taken_as_it_is() -> None:
    step, x = _step()
    traced = checkmate.trace(step, x, profile="roofline:laptop")
    n = len(traced.graph.ops)
    problem = checkmate.trace(step, x, profile=Profile(range(n), range(n), 1, "mine"))
    assert problem.seconds.tolist() == problem.workspace.tolist() == [*range(n)]
    assert problem.resident == traced.resident
    assert problem.profile.source == "mine"
    with pytest.raises(Unsupported, match=f"costs of 2 ops, but this step has {n}"):
        checkmate.trace(step, x, profile=Profile([1, 1], [0, 0]))


def test_files_that_are_no_tables_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"format": "checkmate-problem"}))
    step, x = _step()
    with pytest.raises(InvalidProblem, match="no table of measured ops"):
        checkmate.trace(step, x, profile=path)
    with pytest.raises(FileNotFoundError):
        checkmate.compile(step, budget="1 MB", profile="missing.json")


def test_a_table_of_another_kind_of_device_is_refused(path: Path) -> None:
    """Another kind of device has other ops for the same step."""
    table = read(path)
    there = OpTable(replace(table.conditions, device="cuda NVIDIA L4"), table.ops)
    step, x = _step()
    with pytest.raises(Unsupported, match=r"the table was measured on cuda, and this step is traced on cpu.*to_json"):
        checkmate.trace(step, x, profile=there)


def test_what_was_measured_is_exported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"Nothing has been measured on cpu, \d+ threads? yet"):
        export(tmp_path / "ops.json")
    step, x = _step()
    problem = checkmate.trace(step, x)
    (folder() / DATABASE).unlink()  # what this process measured is enough
    export(tmp_path / "ops.json")
    assert checkmate.trace(step, x, profile=tmp_path / "ops.json").seconds.tolist() == problem.seconds.tolist()
    with pytest.raises(ValueError, match=r"ends in \.json, and .*ops' does not"):
        export(tmp_path / "ops")


def test_other_settings_are_other_conditions(tmp_path: Path) -> None:
    step, x = _step()
    checkmate.trace(step, x)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(Unsupported, match="deterministic yet"):
            export(tmp_path / "ops.json")
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("medium")
    try:
        assert "products in bf16" in conditions_on(torch.device("cpu")).settings
        assert CUDA.settings()["products in tf32"]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "products" not in conditions_on(torch.device("cpu")).settings
    assert not any(holds for word, holds in CUDA.settings().items() if "products" in word)


@pytest.mark.slow
def test_precisions_set_in_pytorchs_new_way_are_understood() -> None:
    """In a process of its own: PyTorch refuses to mix its two ways of setting them."""
    code = """
import torch, checkmate
torch.backends.fp32_precision = "tf32"
layer, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
print(checkmate.trace(layer, x).profile.source)
print(checkmate.trace(layer, x, profile="roofline:h100").profile.source)
"""
    run = run_python("-c", code)
    assert run.stdout.splitlines()[0].startswith("measured on cpu")
    assert "in tf32" in run.stdout.splitlines()[0]
