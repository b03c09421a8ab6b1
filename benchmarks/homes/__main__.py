"""``python -m benchmarks.homes``: plan a Llama-3 8B whose parameters and states are at home in the host's memory."""

from benchmarks.homes.planned import BENCHMARK

BENCHMARK.run()
