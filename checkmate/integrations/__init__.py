"""Plans for tools that have ways in of their own: Inductor's partitioner, torchtitan's passes. Each is one module."""
