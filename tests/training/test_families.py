"""One small network of each family, in the bits of plain PyTorch; and the tables of what works and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import checkmate
from benchmarks.networks.families import FAMILIES, Made
from tests.support.sampling import long, slow
from tests.support.stepping import assert_same, train
from tests.training.test_habits import HABITS, REFUSED

SUPPORTED = (Path(__file__).parents[2] / "docs" / "supported.md").read_text()
QUICK = ("ViT (transformers)",)
SLOW = ("SegNet",)  # the others are long


@pytest.fixture(autouse=True)
def _forgotten(one_thread: None) -> Iterator[None]:
    """What one network leaves behind slows the next one down."""
    yield
    torch._dynamo.reset()


def _make(name: str) -> Made:
    torch.manual_seed(0)
    return FAMILIES[name]()


@pytest.mark.parametrize(
    "name", [*QUICK, *map(slow, SLOW), *(long(name) for name in FAMILIES if name not in (*QUICK, *SLOW))]
)
def test_two_steps_within_two_budgets(name: str) -> None:
    """A budget that asks for nothing, and one close to the smallest, where ops run again."""
    expected = train(*_make(name), steps=2)
    budget: int | str = "1 TB"
    for is_tight in (False, True):
        module, step, batch = _make(name)
        compiled = checkmate.compile(step, budget=budget, time_limit=0.3)

        found = train(module, compiled, batch, steps=2)

        assert_same(found, expected)
        (plan,) = compiled.plans
        assert max(plan.problem.resident + peak for peak in found.peaks) == plan.peak <= plan.budget
        assert bool(plan.modules.again) == (is_tight and plan.budget < plan.problem.keep_all_peak)
        budget = checkmate.min_budget(plan.problem, time_limit=0.3).peak


def _rows(heading: str) -> dict[str, str]:
    """Read the table under a heading: the second column by the first."""
    section = SUPPORTED.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)
    return {first.replace("`", ""): second for first, second in rows[1:] if not first.startswith("-")}


def test_the_table_of_families_is_that_of_the_tests() -> None:
    rows = _rows("Networks")
    assert list(rows) == list(FAMILIES)
    assert all(said.startswith("works") for said in rows.values())


def test_the_tables_of_habits_are_those_of_the_tests() -> None:
    assert sorted(_rows("Ways to train")) == sorted(HABITS)
    assert sorted(_rows("What is refused")) == sorted(REFUSED)
