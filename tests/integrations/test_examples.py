"""The scripts of ``examples/`` run, and what they print of bytes is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.examples.scripts import NAMES, printed
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]


def test_every_script_is_run_here_or_by_torchrun() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*NAMES, "ranks"}


@pytest.mark.long
@pytest.mark.parametrize("name", [slow("whole_step"), *(long(name) for name in NAMES if name != "whole_step")])
def test_a_script_takes_what_was_planned_or_less(name: str) -> None:
    (row,) = printed(name)
    assert row["measured"] <= row["planned"] < row["plain"]
    assert len(row["printed"]) == 3
