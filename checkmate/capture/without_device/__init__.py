"""Tracing for a GPU on a machine without one: PyTorch's questions to the device, and the GPU's answers."""
