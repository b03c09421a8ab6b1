"""``python -m benchmarks.peers``: compare with other ways to save memory."""

from benchmarks.peers.comparison import BENCHMARK

BENCHMARK.run()
