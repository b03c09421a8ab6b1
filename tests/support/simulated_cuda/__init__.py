"""A CUDA device for tests where there is none: PyTorch's own dispatch to `cuda`, with kernels of the CPU.

`build` compiles the sources beside it once, `install` loads them and has `torch.cuda` speak to them, `plugin` does both
for pytest; `private_use` gives the device to PyTorch as one of PrivateUse1, of which it knows nothing. What is
simulated: two devices; PyTorch's caching allocator with its blocks, segments, pools, expandable segments, statistics,
snapshots and a capacity; memory that is poisoned when it is new and when it is freed; streams and events, where an
access that nothing orders after another is an error and copies run as late as they may; generators of seed and offset;
workspaces that cuBLAS and cuBLASLt keep for each thread and stream; the kernels that cuDNN's benchmark chooses for each
thread; cuDNN's batch norm, attention by three kernels; sums that waver. What is not: bits and seconds of a GPU, cuDNN's
heuristics, RNNs, CUDA graphs.
"""
