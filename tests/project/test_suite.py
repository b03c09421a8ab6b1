"""What benchmarks count of the tests that they run."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.common.suite import counted, ended

TESTS = """
import os
import pytest

def test_that_passes():
    assert os.environ["HERE"] == "yes"

@pytest.mark.parametrize("number", [1])
def test_that_fails(number):
    assert number == 2

@pytest.mark.skip
def test_that_is_skipped():
    pass

@pytest.mark.slow
def test_that_is_slow():
    assert False
"""


def test_each_kind_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "test_tiny.py"
    path.write_text(TESTS)
    kinds = {"not slow": [str(path)], "slow": [str(path)]}
    found = counted(kinds, "-q", environment={**os.environ, "HERE": "yes"})
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert [name.rpartition("::")[2] for name in found["names"]] == ["test_that_fails[1]", "test_that_is_slow"]


def test_a_process_without_a_report_has_failed() -> None:
    assert ended(-4)["names"] == ["the process ended with -4"]
