"""Look at a solution: its timeline, its costs, its peak, its difference from another plan."""
