"""The scripts of ``examples/`` run, and what they print of bytes is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkmate.units import parse_bytes
from tests.support.processes import run_python
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]
NAMES = ("gpt2", "resnet", "lora", "diffusion", "lightning_callback", "whole_step", "second_memory")
PRINTED = re.compile(r"^(?:plain \S+ takes|planned are|measured are) ([\d.]+ \w?B)", re.MULTILINE)


def test_every_script_is_run_here_or_by_torchrun() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*NAMES, "ranks"}


@pytest.mark.long
@pytest.mark.parametrize("name", [slow("whole_step"), *(long(name) for name in NAMES if name != "whole_step")])
def test_a_script_takes_what_was_planned_or_less(name: str) -> None:
    printed = run_python(str(ROOT / "examples" / f"{name}.py")).stdout
    plain, planned, measured = map(parse_bytes, PRINTED.findall(printed))
    assert measured <= planned < plain
