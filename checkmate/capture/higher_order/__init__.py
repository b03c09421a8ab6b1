"""Higher-order ops, with the graphs and kernels that they run: recomputation and costs."""
