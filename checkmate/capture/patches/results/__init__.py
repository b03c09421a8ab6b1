"""Describe results as the kernels make them: in their strides, of their types."""
