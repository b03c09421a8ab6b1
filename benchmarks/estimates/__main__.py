"""``python -m benchmarks.estimates [FOLDER] [CASE ...]``: estimates held against measured ops and steps."""

import os
import sys
from pathlib import Path

from benchmarks.estimates.comparison import BENCHMARK
from benchmarks.estimates.ops import FOLDER, TABLES
from benchmarks.estimates.steps import STEPS

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments and Path(arguments[0]).is_dir():
        os.environ[FOLDER] = arguments.pop(0)  # which is for the processes of cases, and not for rows
        arguments = arguments or [*TABLES, *STEPS]
    BENCHMARK.run(arguments)
