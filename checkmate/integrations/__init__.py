"""Connections to other tools: trainers, loops, Inductor's memory budget. One module each."""
