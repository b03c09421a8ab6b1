"""``python -m benchmarks.solve``: every solver on the committed graphs."""

from benchmarks.solve.comparison import main

main()
