"""Pictures of plans and problems, with words and numbers in them: `schedule`, `memory`, `frontier`, `graph`."""

from checkmate.plot.draw_graph import graph
from checkmate.plot.draw_plan import frontier, memory, schedule

__all__ = ["frontier", "graph", "memory", "schedule"]
