"""What `torch.compile` calls for each captured graph: plan it, and run the plan."""
