"""``python -m benchmarks.estimates``: estimates held against measured steps."""

from benchmarks.estimates.comparison import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.run()
