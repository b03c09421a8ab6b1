"""What ``checkmate demo`` does: two networks train inside byte budgets, and every promise is held to plain PyTorch.

`data` makes what they learn from, `tasks` is the two, and `training` trains them and writes the tables.
"""
