"""A model's step, forward and backward, as one graph that computes the bits of eager PyTorch."""
