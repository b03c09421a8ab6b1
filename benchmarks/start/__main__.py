"""``python -m benchmarks.start``: measure the seconds until a script trains."""

from benchmarks.start.seconds import BENCHMARK

BENCHMARK.run()
