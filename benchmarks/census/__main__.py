"""``python -m benchmarks.census``: train every architecture, and count."""

from benchmarks.census.count import main

main()
