"""Tracing for a GPU on a machine that has none: what PyTorch asks of the device, and what this one would answer."""
