"""Ways into other tools: trainers, loops, Inductor's memory budget. Each is one module."""
