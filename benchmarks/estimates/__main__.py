"""``python -m benchmarks.estimates``: hold estimates against measured steps."""

from benchmarks.estimates.comparison import BENCHMARK

BENCHMARK.run()
