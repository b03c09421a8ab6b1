"""``python -m benchmarks.hunt``: random programs, plainly and compiled, and what came of them."""

from benchmarks.hunt.count import main

main()
