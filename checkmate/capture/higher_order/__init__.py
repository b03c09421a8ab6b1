"""Ops that run graphs or kernels which they are given: which may run again, and what they cost."""
