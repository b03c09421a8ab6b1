"""Pictures of plans and problems, with words and numbers: `schedule`, `memory`, `frontier`, `graph`, `addresses`."""

from checkmate.plot.draw_addresses import addresses
from checkmate.plot.draw_graph import graph
from checkmate.plot.draw_plan import frontier, memory, schedule

__all__ = ["addresses", "frontier", "graph", "memory", "schedule"]
