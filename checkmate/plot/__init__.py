"""Pictures of plans: a schedule, memory over the step, addresses, cost against peak, the graph of ops.

Each draws on the Axes given, or on a new figure, and returns the Axes, which are in bytes and seconds.
"""

from checkmate.plot.draw_addresses import addresses
from checkmate.plot.draw_frontier import frontier
from checkmate.plot.draw_graph import graph
from checkmate.plot.draw_memory import memory
from checkmate.plot.draw_schedule import schedule

__all__ = ["addresses", "frontier", "graph", "memory", "schedule"]
