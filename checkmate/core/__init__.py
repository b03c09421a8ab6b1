"""The vocabulary: graph, problem, schedule, plan, solution; plain data that imports no torch."""
