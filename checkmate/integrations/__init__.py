"""Ways into other tools: trainers, loops, Inductor's partitioner, torchtitan's passes. Each is one module."""
