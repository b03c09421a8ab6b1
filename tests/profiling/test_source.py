"""Costs measured on one machine plan steps on another; what a table lacks is refused by name."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate import Problem, Profile
from checkmate.core.files import DATABASE, folder
from checkmate.core.inplace import InPlace
from checkmate.devices import CUDA
from checkmate.errors import InvalidProblem, Unsupported
from checkmate.profiling import measure
from checkmate.profiling.cost_cache import OpTable, conditions_on, read, write
from checkmate.profiling.measure import export
from tests.support.processes import run_python

pytestmark = pytest.mark.usefixtures("nothing_known")


@pytest.fixture
def runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "call_of", lambda node: pytest.fail("an op runs"))


def _step(device: str = "cpu", rows: int = 4) -> tuple[Any, Tensor]:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    return (lambda x: net(x).sum()), torch.ones(rows, 16, device=device)


def _traced(profile: Any, *, device: str = "cpu", rows: int = 4) -> Problem:
    return checkmate.trace(*_step(device, rows), profile=profile)


@functools.cache
def _there() -> tuple[Problem, str]:
    """A step measured on "the cluster", and the table of its ops."""
    problem = _traced("measure")
    export(folder() / "there.json")
    return problem, (folder() / "there.json").read_text()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file that is taken home from there."""
    (tmp_path / "ops.json").write_text(_there()[1])
    return tmp_path / "ops.json"


def test_a_table_gives_the_costs_that_were_measured_and_runs_nothing(path: Path, runs_nothing: None) -> None:
    there, (step, x) = _there()[0], _step()
    for device, choice in (("cpu", path), ("cpu", str(path)), ("meta", path), ("meta", read(path))):
        here = _traced(choice, device=device)
        assert here.graph.ops == there.graph.ops or device == "meta"
        assert here.seconds.tolist() == there.seconds.tolist()
        assert here.workspace.tolist() == there.workspace.tolist()
        assert "measured on cpu" in here.profile.source
        assert here.profile.source.startswith("ops.json: ") or choice == read(path)
    compiled = checkmate.compile(step, budget="1 MB", profile=path)
    compiled(x).backward()
    assert compiled.plans[0].cost == there.keep_all_cost


def test_what_a_table_lacks_is_refused_by_name_and_what_did_not_run_there_is_estimated_here(path: Path) -> None:
    table = read(path)
    write(path, OpTable(table.conditions, {key: cost for key, cost in table.ops.items() if "tanh.default" not in key}))
    says = r"ops\.json, measured on cpu.*lacks ops.*aten\.tanh\.default \(\(float32\[4, 16"
    with pytest.raises(Unsupported, match=says):
        _traced(path)
    with pytest.raises(Unsupported, match=r"and \d+ more"):
        _traced(path, rows=5)
    write(path, OpTable(table.conditions, {k: None if "tanh.default" in k else cost for k, cost in table.ops.items()}))
    profile = _traced(path).profile
    assert len(profile.estimated) == 1
    assert profile.source.endswith("; 1 op estimated")


def test_a_profile_is_taken_as_it_is() -> None:
    traced = _traced("roofline:laptop")
    n = len(traced.graph.ops)
    problem = _traced(Profile(range(n), range(n), 1, "mine"))
    assert problem.seconds.tolist() == problem.workspace.tolist() == [*range(n)]
    assert problem.resident == traced.resident
    assert problem.profile.source == "mine"
    with pytest.raises(Unsupported, match=f"costs of 2 ops, but this step has {n}"):
        _traced(Profile([1, 1], [0, 0]))


def test_of_a_profile_only_ways_are_taken_by_which_the_step_may_write() -> None:
    """Here a product may write over the result of the layer, and a sum over nothing."""
    traced = _traced("roofline:laptop")
    graph, profile = traced.graph, traced.profile
    assert profile.ways
    more = [InPlace(k, op.outputs[0], op.inputs[0], 0) for k, op in enumerate(graph.ops) if op.outputs and op.inputs]
    assert {way.over for way in more} - {way.over for way in profile.ways}
    assert _traced(replace(profile, ways=(*profile.ways, *more))).profile.ways[: len(profile.ways)] == profile.ways
    taken = {(way.op, way.over) for way in _traced(replace(profile, ways=tuple(more))).profile.ways}
    assert taken <= {(way.op, way.over) for way in profile.ways}


def test_files_that_are_no_tables_and_tables_of_another_kind_of_device_are_refused(path: Path) -> None:
    """Another kind of device has other ops for the same step."""
    table = read(path)
    there = OpTable(replace(table.conditions, device="cuda NVIDIA L4"), table.ops)
    with pytest.raises(Unsupported, match=r"the table was measured on cuda, and this step is traced on cpu.*to_json"):
        _traced(there)
    path.write_text(json.dumps({"format": "checkmate-problem"}))
    with pytest.raises(InvalidProblem, match="no table of measured ops"):
        _traced(path)
    with pytest.raises(FileNotFoundError):  # at once
        checkmate.compile(_step()[0], budget="1 MB", profile="missing.json")


def test_what_was_measured_is_exported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"Nothing has been measured on cpu, \d+ threads? yet"):
        export(tmp_path / "ops.json")
    problem = _traced("measure")
    (folder() / DATABASE).unlink()  # what this process measured is enough
    export(tmp_path / "ops.json")
    assert _traced(tmp_path / "ops.json").seconds.tolist() == problem.seconds.tolist()
    with pytest.raises(ValueError, match=r"ends in \.json, and .*ops' does not"):
        export(tmp_path / "ops")


def test_other_settings_are_other_conditions(tmp_path: Path) -> None:
    _traced("measure")
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
    measured, _ = run_python("-c", code).stdout.splitlines()
    assert measured.startswith("measured on cpu")
    assert "in tf32" in measured
