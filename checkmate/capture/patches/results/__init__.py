"""Give fake results the strides and types of the kernels' results."""
