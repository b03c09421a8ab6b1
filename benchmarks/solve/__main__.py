"""``python -m benchmarks.solve``: run every solver on the committed graphs."""

from benchmarks.solve.comparison import BENCHMARK

BENCHMARK.run()
