"""Whether checkmate keeps its promises on a GPU, and how fast it is there: `python -m benchmarks.gpu`."""
