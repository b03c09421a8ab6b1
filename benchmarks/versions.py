"""Whether a version of PyTorch has what is needed of it, and passes a selection of the suite.

    nox -s versions                       # an environment for each version, and this in each: `make test-versions`
    nox -s lowest pythons                 # others: the lowest versions of all that is needed, other Pythons
    python -m benchmarks.versions         # the version that is installed
    python -m benchmarks.versions --new   # an environment with the newest there is, and a part of the selection

A run leaves a row in ``benchmarks/results/versions.jsonl``: how many tests passed, failed, and were left out since this
version of PyTorch does not do what they ask for, which these are, what of PyTorch's that is not public is missing, what
is left out without it, whether the arena compiles, and the versions of what else checkmate needs. A part of the
selection, with ``--quick``, leaves none, but in a file that is named.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common.rows import Column, Row, append, documented, latest, origin, read
from benchmarks.common.runner import document, table_of
from checkmate.core.answer import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.jsonl"
OTHERS = RESULTS.with_name("environments.jsonl")
ROOMS = ("torch_internals", "capture", "codegen", "backends", "training", "updates", "memory", "verification", "host")
SELECTION = {"not long": tuple(f"tests/{room}" for room in ROOMS)}  # by markers
QUICK = {
    "not slow and not long": (
        *("tests/torch_internals", "tests/capture/patches/test_patches.py", "tests/capture/patches/test_kernels.py"),
        *("tests/capture/patches/test_small_changes.py", "tests/training/test_families.py"),
    ),
}
COUNTS: dict[str, Column] = {kind: f"{{{kind}}}" for kind in ("passed", "failed", "skipped")}


def examined() -> Row:
    """Names that are not public and that the installed version lacks, what is left out, and how the arena is built."""
    from checkmate.backends import compilation as _all_patches  # noqa: F401  # which puts them in place
    from checkmate.memory import native
    from checkmate.torch_internals import names

    lacking = [name for table in names.TABLES for name in table.names.values() if not table.has(name.name)]
    missing = [f"{name.name}: {name.without}" for name in lacking if names.is_expected(name)]
    return {"missing": missing, "left_out": names.LEFT_OUT, "arena": native.ARENA.state()}


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
    """Run one kind, and count by pytest's report in JUnit's form."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "-m", markers]
        code = subprocess.run([*command, *arguments], cwd=ROOT, env=dict(environment), check=False).returncode
        if not report.exists():
            return ended(code)
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {part.tag for part in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[kind].append(f"{case.get('classname')}::{case.get('name')}")
    return {**{kind: len(names) for kind, names in found.items()}, "names": found["failed"]}


def ended(code: int) -> Row:
    """The counts of a process that left no report: an instruction that there is not ends it, for example."""
    return {"passed": 0, "failed": 1, "skipped": 0, "names": [f"the process ended with {code}"]}


def table(rows: Sequence[Row]) -> Table:
    """The last row of each version of PyTorch."""
    columns: dict[str, Column] = {
        "PyTorch": lambda row: _plain(row["torch"]),
        "Python": "{python}",
        **COUNTS,
        "left out": lambda row: ", ".join(row["left_out"]) or "nothing",
        "minutes": lambda row: f"{row['seconds'] / 60:.0f}",
    }
    return table_of(columns, _last(rows, "torch"), {"left out"})


def table_of_others(rows: Sequence[Row]) -> Table:
    """The last row of each Python: environments that are not those of the versions of PyTorch."""
    columns: dict[str, Column] = {
        "Python": "{python}",
        "PyTorch": lambda row: _plain(row["torch"]),
        "NumPy": "{numpy}",
        "SciPy": "{scipy}",
        "tests": lambda row: "a part" if row["quick"] else "the selection",
        **COUNTS,
    }
    return table_of(columns, _last(rows, "python"), {*columns} - {*COUNTS})


def markdown(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """Both tables, with what they are of."""
    return document(
        "Versions of PyTorch and of Python",
        "`make test-versions` runs on each version of PyTorch what of the suite has to do with it: capture, code, "
        "training, whole steps, distributed, the arena, random programs. Skipped are tests for CUDA, and of what a "
        "version does not do: there it is refused in words. Left out is what cannot be put in place of PyTorch's own.",
        table(rows),
        "With the lowest versions of all that `pyproject.toml` names (`nox -s lowest`) the selection has run, and on "
        "other versions of Python (`nox -s pythons`) a part of it.",
        table_of_others(others),
    )


def _last(rows: Sequence[Row], of: str) -> list[Row]:
    return sorted(latest(rows, of), key=lambda row: [int(n) for n in _plain(row[of]).split(".")])


def needed() -> list[str]:
    """Packages that checkmate needs, by pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r'^ *"([\w-]+)', listed, flags=re.MULTILINE)


def _plain(version: str) -> str:
    return version.partition("+")[0]


def main() -> int:
    """Run the selection, append a row, and print what there is to say; 1 if something is missing or fails."""
    parser = documented(__doc__)
    parser.add_argument("--new", action="store_true", help="in an environment with the newest there is")
    parser.add_argument("--quick", action="store_true", help="a part of the selection, without a row in that file")
    parser.add_argument("--report", action="store_true", help="write the page of the last rows, and run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.report:
        RESULTS.with_suffix(".md").write_text(markdown(read(RESULTS), read(OTHERS)))
        return 0
    if args.new:
        return subprocess.run([sys.executable, "-m", "nox", "-s", "new"], cwd=ROOT, check=False).returncode
    begun, about, found = time.monotonic(), origin(*needed()), examined()
    print(f"PyTorch {about['torch']}", f"arena: {found['arena']}", sep="\n")
    print(*(f"missing {each}" for each in found["missing"]), sep="\n")
    print(*(f"left out: {each}" for each in found["left_out"]), sep="\n", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    options = ("-q", "-n", str(args.jobs), "--dist", "worksteal")
    found |= counted(QUICK if args.quick else SELECTION, *options, environment=environment)
    row = {**about, "quick": args.quick, **found, "seconds": round(time.monotonic() - begun)}
    if not args.quick or args.out != RESULTS:
        append(args.out, row)
    print("", table([row]), *row["names"], sep="\n")
    return 1 if row["failed"] or row["missing"] or row["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
