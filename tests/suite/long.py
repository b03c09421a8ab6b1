"""Write tests/long.txt: the cases that run with ``-m long`` only, as others run all of their lines.

    python -m tests.suite.long [--least 1.0] [--others 1]     # after the commands of tests/suite/covered.py

Of each test function the cheapest case stays in the suite. Of the other cases of so many seconds or more, the dearest
first, those become long of which each line of the product is run by so many others that stay. Cases that compare bits
stay: what each op and each optimizer computes is a row of a table, and no line. So do cases that are named in
tests/suite/mutants.jsonl: they found a mistake that `tests.suite.mutants` had planted.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict

from tests.suite.covered import ROOT, covering_tests, seconds_of_tests
from tests.suite.mutants import MUTANTS

LIST = ROOT / "tests" / "long.txt"
COMPARES_BITS = re.compile(r"bits|same_numbers|eager|gradients_are_those|of_the_kernel|as_the_kernel")
HEAD = "# Cases of whose lines others run every one, by python -m tests.suite.long: they run with -m long.\n"


def main() -> None:
    """Choose the cases, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=1.0)
    parser.add_argument("--others", type=int, default=1)
    asked = parser.parse_args()

    lines_of: dict[str, list[int]] = defaultdict(list)
    runs: Counter[int] = Counter()  # by line, how many tests that stay run it
    for line, tests in enumerate(covering_tests().values()):
        runs[line] = len(tests)
        for test in tests:
            lines_of[test].append(line)
    left = Counter(test.partition("[")[0] for test in lines_of)
    finders = {json.loads(row)["by"] for row in MUTANTS.read_text().splitlines()}
    seconds, chosen = seconds_of_tests(), []
    for test in sorted(lines_of, key=lambda test: (-seconds[test], test)):
        function = test.partition("[")[0]
        if seconds[test] < asked.least or left[function] == 1 or test in finders:
            continue
        if COMPARES_BITS.search(function.partition("::")[2]):
            continue
        if all(runs[line] > asked.others for line in lines_of[test]):
            chosen.append(test)
            left[function] -= 1
            runs.subtract(lines_of[test])
    LIST.write_text(HEAD + "".join(f"{test}\n" for test in sorted(chosen)))


if __name__ == "__main__":
    main()
