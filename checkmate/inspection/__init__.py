"""What a person asks of a solution: its timeline, its costs, its peak, another plan beside it."""
