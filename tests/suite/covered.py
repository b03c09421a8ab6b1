"""The lines of the product that each test runs, and its seconds, as a run of the suite recorded them.

pip install pytest-cov
make test ARGS="--cov --cov-context=test --junitxml=build/tests.xml"
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
COVERAGE, SECONDS = ROOT / ".coverage", ROOT / "build" / "tests.xml"
Place = tuple[Path, int]  # a file and a line


def covering_tests(path: Path = COVERAGE) -> dict[Place, set[str]]:
    """For each line of the product, the tests that run it."""
    from coverage import CoverageData  # type: ignore[import-not-found, unused-ignore]

    data = CoverageData(str(path))
    data.read()
    return {
        (Path(os.path.realpath(file)), line): {context.partition("|")[0] for context in contexts} - {""}
        for file in data.measured_files()
        for line, contexts in data.contexts_by_lineno(file).items()
    }


def seconds_of_tests(path: Path = SECONDS) -> dict[str, float]:
    """Seconds of each test."""
    found: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(path).iter("testcase"):
        *folders, last = case.attrib["classname"].split(".")
        module = Path(*folders, last)
        within = []
        while module.parts[1:] and not (ROOT / module).with_suffix(".py").exists():  # classes, the innermost last
            within.insert(0, module.name)
            module = module.parent
        found["::".join([f"{module}.py", *within, case.attrib["name"]])] += float(case.attrib["time"])
    return found
