"""A compiled step against plain PyTorch, bit by bit."""
