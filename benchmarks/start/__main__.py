"""``python -m benchmarks.start``: seconds until a script trains. What is timed imports this file first."""

if __name__ == "__main__":
    from benchmarks.start.seconds import BENCHMARK

    BENCHMARK.run()
