"""Tests of this project, run by a benchmark, and counted."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common.rows import Row

ROOT = Path(__file__).parents[2]


def counted(tests: Mapping[str, Sequence[str]], *options: str, environment: Mapping[str, str]) -> Row:
    """How many passed, failed and were skipped, and which failed.

    Args:
        tests: by their markers; each kind runs in a process of its own.
        options: of pytest.
        environment: variables of the processes.
    """
    found = [_counted(markers, [*options, *some], environment) for markers, some in tests.items()]
    return {key: sum((one[key] for one in found[1:]), found[0][key]) for key in found[0]}


def _counted(markers: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "-m", markers]
        code = subprocess.run([*command, *arguments], cwd=ROOT, env=dict(environment), check=False).returncode
        return _counts_of(report) if report.exists() else ended(code)


def _counts_of(report: Path) -> Row:
    """By a report in JUnit's form."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[kind].append(f"{case.get('classname')}::{case.get('name')}")
    return {**{kind: len(names) for kind, names in found.items()}, "names": found["failed"]}


def ended(code: int) -> Row:
    """The same of a process that left no report: an instruction that there is not ends it, for example."""
    return {"passed": 0, "failed": 1, "skipped": 0, "names": [f"the process ended with {code}"]}
