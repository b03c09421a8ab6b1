"""The largest batch that fits a budget."""
