"""What ops make is described as the kernels make it: in their strides, of their types, by their routines."""
