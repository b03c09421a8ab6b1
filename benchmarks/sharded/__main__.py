"""``python -m benchmarks.sharded``: plan the sharded step of the benchmark, beside what trainers choose."""

from benchmarks.sharded.planned import BENCHMARK

BENCHMARK.run()
