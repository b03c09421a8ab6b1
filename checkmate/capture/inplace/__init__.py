"""Ops that write over an input: which could, where that is legal, and how they are called then."""
