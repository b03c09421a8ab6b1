"""``python -m benchmarks.second_memory``: plan the graphs of the benchmark with a second memory."""

from benchmarks.second_memory.planned import BENCHMARK

BENCHMARK.run()
