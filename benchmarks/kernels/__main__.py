"""``python -m benchmarks.kernels``: steps by fused kernels, beside PyTorch's own and those of torch.compile."""

from benchmarks.kernels.comparison import BENCHMARK

BENCHMARK.run()
