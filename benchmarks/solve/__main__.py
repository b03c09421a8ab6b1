"""``python -m benchmarks.solve``: every solver on the committed graphs."""

from benchmarks.solve.comparison import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.run()
