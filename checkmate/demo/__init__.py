"""Two small networks train within byte budgets, each promise compared with plain PyTorch: ``checkmate demo``."""
