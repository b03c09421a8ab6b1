"""The benchmark that runs tests with other kernels: a row for each setting, failures named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import processors
from benchmarks.common.rows import read
from benchmarks.common.suite import ROOT
from tests.support.processes import run_fresh_python

TESTS = """
import os
import torch

def test_setting():
    assert (os.environ["ATEN_CPU_CAPABILITY"], os.environ["OMP_NUM_THREADS"]) == ("default", "1")
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"

"""


@pytest.mark.long
def test_a_row_for_each_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    tests, out = tmp_path / "test_tiny.py", tmp_path / "processors.jsonl"
    tests.write_text(TESTS)
    settings = ("ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=AVX2")
    options = ("--tests", str(tests), "--threads", "1", "--out", str(out))
    printed = run_fresh_python("-m", "benchmarks.processors", *settings, *options).stdout
    found = read(out)
    assert [(row["setting"], row["threads"]) for row in found] == [(setting, 1) for setting in settings]
    assert [(row["passed"], row["failed"], row["skipped"]) for row in found] == [(1, 0, 0), (0, 1, 0)]
    assert [name.rpartition("::")[2] for name in found[1]["names"]] == ["test_setting"]
    assert all(row["seconds"] > 0 and row["cpu"] for row in found)
    assert "what failed" in printed


def test_the_tests_are_there() -> None:
    paths = [name.partition("::")[0] for names in processors.TESTS.values() for name in names]
    assert all((ROOT / path).exists() for path in paths)
