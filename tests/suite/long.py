"""Write tests/long.txt, cases that run with ``-m long`` only, as others run all of their lines, and tests/slow.txt.

    python -m tests.suite.long [--least 1.0] [--others 1] [--whole 3] [--slow 0.6]   # after those of covered.py

Of each test function the cheapest case stays in the suite. Of the other cases of so many seconds or more, the dearest
first, those become long of which each line of the product is run by so many others that stay. Of cases that compare
bits so many stay that each value of each parameter is in one of them: what each op and each optimizer computes is a row
of a table, and no line. Cases that are named in tests/suite/mutants.jsonl stay: they found a mistake that
`tests.suite.mutants` had planted. What is in the list already and was not run stays in it.

``--whole``: a function whose lines so many others run becomes long with its last case, but for one that compares bits
or bounds, or whose product runs in a process of its own, where no lines are recorded.

``--slow``: functions whose cases take so many seconds on average are in tests/slow.txt; ``-m "not slow"`` leaves them
out, as it does what is marked so by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from tests.suite.covered import ROOT, covering_tests, seconds_of_tests
from tests.suite.mutants import MUTANTS

LIST, SLOW = ROOT / "tests" / "long.txt", ROOT / "tests" / "slow.txt"
COMPARES_BITS = re.compile(r"bits|same_numbers|eager|gradients_are_those|of_the_kernel|as_the_kernel")
COMPARES_BOUNDS = re.compile(
    r"optim[au]|brute_force|bound|never|proven|published|golden|best_of_all|among_all|refut|random|committed|readme"
    r"|leaves_no_trace|whole_steps|trainer|budget_is|users|killed|dies"
)
FEW_LINES = 40  # of the product: a test that runs fewer runs the rest in another process
HEAD = "# Cases of whose lines others run every one, by python -m tests.suite.long: they run with -m long.\n"
HEAD_OF_SLOW = "# Functions whose cases take long, by python -m tests.suite.long: -m 'not slow' leaves them out.\n"


def main() -> None:
    """Choose the cases, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=1.0)
    parser.add_argument("--others", type=int, default=1)
    parser.add_argument("--slow", type=float, default=0.6)
    parser.add_argument("--whole", type=int, default=0, help="others that run each line of a function; 0: all stay")
    asked = parser.parse_args()

    lines_of: dict[str, list[int]] = defaultdict(list)
    runs: Counter[int] = Counter()  # by line, how many tests that stay run it
    for line, tests in enumerate(covering_tests().values()):
        runs[line] = len(tests)
        for test in tests:
            lines_of[test].append(line)
    left = Counter(map(_function, lines_of))
    finders = {json.loads(row)["by"] for row in MUTANTS.read_text().splitlines()}
    values = _values(test for test in lines_of if _compares_bits(test))
    rows = Counter((_function(test), value) for test in values for value in values[test])  # by value, cases that stay
    seconds = seconds_of_tests()
    chosen = [test for test in LIST.read_text().splitlines()[1:] if test not in lines_of]
    for test in sorted(lines_of, key=lambda test: (-seconds[test], test)):
        function = _function(test)
        if seconds[test] < asked.least or test in finders:
            continue
        others = asked.others
        if left[function] == 1:
            name, others = function.partition("::")[2], asked.whole
            compares = COMPARES_BITS.search(name) or COMPARES_BOUNDS.search(name)
            if not others or compares or len(lines_of[test]) < FEW_LINES:
                continue
        of_test = [(function, value) for value in values.get(test, ())]
        if _compares_bits(test) and not (of_test and all(rows[value] > 1 for value in of_test)):
            continue
        if all(runs[line] > others for line in lines_of[test]):
            chosen.append(test)
            left[function] -= 1
            runs.subtract(lines_of[test])
            rows.subtract(of_test)
    LIST.write_text(HEAD + "".join(f"{test}\n" for test in sorted(chosen)))
    cases: dict[str, list[float]] = defaultdict(list)
    for test in {*lines_of} - {*chosen}:
        cases[_function(test)].append(seconds[test])
    slow = sorted(function for function, took in cases.items() if sum(took) >= asked.slow * len(took))
    SLOW.write_text(HEAD_OF_SLOW + "".join(f"{function}\n" for function in slow))


def _function(test: str) -> str:
    return test.partition("[")[0]


def _compares_bits(test: str) -> bool:
    return COMPARES_BITS.search(_function(test).partition("::")[2]) is not None


def _values(tests: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """The parameters of each of these tests with their values, as pytest collects them."""
    found: dict[str, list[tuple[str, str]]] = {test: [] for test in tests}

    class Collected:
        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            for item in items:
                if item.nodeid in found and hasattr(item, "callspec"):
                    found[item.nodeid] = [(name, repr(value)) for name, value in item.callspec.params.items()]

    files = sorted({test.partition("::")[0] for test in found})
    pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *files], plugins=[Collected()])
    return found


if __name__ == "__main__":
    main()
