"""A look at whole training steps before any training: forward, backward and update as one problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import checkmate
from checkmate.backends.step_problem import step_name
from checkmate.errors import Unsupported
from checkmate.look.page import tiles
from checkmate.look.peak import explain_peak
from checkmate.training import TrainingStep
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn

ROOFLINE = "roofline:h100"


def _made(size: int = 32, blocks: int = 3) -> tuple[TrainingStep, tuple[Any, ...], nn.Module, optim.Optimizer]:
    hidden = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(blocks)]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    optimizer = optim.AdamW(model.parameters())
    batch = torch.randn(size, 64), torch.zeros(size, dtype=torch.long)
    step = checkmate.training_step(
        lambda x, y: F.cross_entropy(model(x), y), optimizer, budget="1 GB", clip_norm=1.0, wait="best"
    )
    return step, batch, model, optimizer


@pytest.mark.slow
def test_a_whole_step_is_traced_as_it_is_trained() -> None:
    """The same ops and bytes, state included that there is none of yet; nothing is trained."""
    step, batch, model, optimizer = _made()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    problem = checkmate.trace(step, *batch)
    assert_same_bits([model.state_dict(), torch.get_rng_state()], [before, random])
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    step(*batch)
    (plan,) = step.plans
    assert [op.target for op in problem.graph.ops] == [op.target for op in plan.problem.graph.ops]
    assert (problem.resident, problem.keep_all_peak) == (plan.problem.resident, plan.problem.keep_all_peak)
    smallest = checkmate.min_budget(problem, time_limit=1).peak
    assert problem.resident < smallest < problem.keep_all_peak


@pytest.mark.slow
def test_updates_are_named() -> None:
    """An update says of which parameter it is, and where that is."""
    step, batch, _, _ = _made(blocks=1)
    found = checkmate.explain(step, *batch, profile=ROOFLINE)
    (row,) = (row for row in found.pinned if row.why.startswith("updates ") and "0.0.weight" in row.why)
    assert (row.target, row.phase) == ("checkmate.update_parameter", "backward")
    assert "0.0 (Linear" in row.where


def test_the_report_says_what_step_it_is_of_and_whose_costs(tmp_path: Path) -> None:
    """Its title has model, optimizer and device; costs that are estimated are called so, in a file's problem, too."""
    step, batch, model, _ = _made(blocks=1)
    cases = [
        (step, ROOFLINE, "Sequential with AdamW within 1.00 GB, roofline estimate for NVIDIA H100 SXM", True),
        (model, "measure", "Sequential within 1.00 GB, measured on cpu", False),
    ]
    for fn, profile, title, estimated in cases:
        problem = checkmate.trace(fn, *batch[: 1 if fn is model else 2], profile=profile)
        problem.to_json(tmp_path / "problem.json")
        for each in (problem, checkmate.Problem.from_json(tmp_path / "problem.json")):
            solution = checkmate.solve(each, "1 GB", method="next-use", time_limit=1)
            text = checkmate.report(solution, tmp_path / "plan.html").read_text(encoding="utf-8")
            assert f"<h1>checkmate: {title}</h1>" in text
            assert ("<dd>estimated, " in text) == estimated
    # Of some ops only.
    some = replace(problem, profile=replace(problem.profile, estimated=(0, 2)))
    figures = list(tiles(checkmate.solve(some, "1 GB", method="next-use", time_limit=1)))
    assert figures[2][2].startswith("estimated for 2 of the ops, ")


@pytest.mark.parametrize(
    ("fn", "args", "name"),
    [
        (nn.Linear(2, 2), (), "Linear"),
        (nn.Linear(2, 2).forward, (), "Linear"),
        (F.relu, (nn.Linear(2, 2), nn.PReLU(), nn.ReLU(), nn.PReLU()), "Linear and PReLU"),
        (F.relu, (), "relu"),
    ],
)
def test_the_name_of_a_step_is_that_of_its_modules_or_of_its_function(
    fn: Any, args: tuple[Any, ...], name: str
) -> None:
    assert step_name((fn, args, {})) == name
    assert step_name((fn, args, {}), [optim.SGD([torch.zeros(2)])]) == f"{name} with SGD"
    assert step_name(()) == ""


@in_turn(accumulate=[1, 2], trained=[True, False])
def test_what_is_there_all_the_time_is_named_as_what_it_is(accumulate: int, trained: bool) -> None:
    """Parameters, frozen or not, are no buffers, and the state of the optimizer is nothing other."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    model[0].weight.requires_grad_(trained)
    optimizer, batch = optim.Adam(model.parameters()), (torch.randn(32, 64), torch.zeros(32, dtype=torch.long))
    about: Any = {"budget": "10 MB", "accumulate": accumulate, "time_limit": 1}
    step = checkmate.training_step(lambda x, y: F.cross_entropy(model(x), y), optimizer, **about)
    expected = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "inputs": sum(part.nbytes for part in batch),
    }
    solutions = [checkmate.solve(checkmate.trace(step, *batch, profile="roofline:laptop"), "10 MB", time_limit=1)]
    for _ in range(accumulate):
        step(*batch)
    state = step.inserts.updates.held_bytes
    assert state >= 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for solution in (*solutions, *step.plans):
        resident = explain_peak(solution, prices=False).resident
        assert {role: resident[role] for role in expected} == expected
        assert resident["optimizer state"] == state
        assert sum(resident.values()) == solution.problem.resident
        assert resident.get("other resident", 0) == 0


@pytest.mark.slow
def test_without_memory_for_model_and_state() -> None:
    """All on the meta device: 4.3 GB of parameters, twice that of state, none of it allocated."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(16)])
        x = torch.randn(8, 8192)
    optimizer = optim.AdamW(model.parameters())
    step = checkmate.training_step(lambda x: model(x).square().mean(), optimizer, budget="40 GB")
    problem = checkmate.trace(step, x, profile=ROOFLINE)
    parameters = 16 * 4 * 8192**2
    assert 3 * parameters <= problem.resident < 3.01 * parameters
    smallest = checkmate.min_budget(problem, time_limit=2).peak
    assert smallest < 3.2 * parameters  # gradients are gone one by one
    assert not optimizer.state


@pytest.mark.long
def test_the_largest_batch_of_whole_steps() -> None:
    """Parameters and state count once; what would need a plain backward is refused."""
    step, batch, _, _ = _made()
    resident = checkmate.trace(step, *batch, profile=ROOFLINE).resident
    find: Any = {"profile": ROOFLINE, "time_limit": 20, "max_overhead": None, "smallest": 16, "largest": 64}
    found = checkmate.max_batch_size(lambda: step, lambda n: _made(n)[1], budget=2 * resident, **find)
    assert found.size == 64
    with pytest.raises(Unsupported, match="training step itself"):
        checkmate.max_batch_size(lambda: step, lambda n: _made(n)[1], budget=2 * resident, measure=True, **find)
