"""The backend of `torch.compile`: plan each captured graph, and run the plan."""
