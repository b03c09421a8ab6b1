"""``python -m benchmarks.peers``: compare with other ways to save memory."""

from benchmarks.peers.comparison import BENCHMARK

if __name__ == "__main__":
    BENCHMARK.run()
