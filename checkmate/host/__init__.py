"""A second memory, where values of a step wait: a file beside the RAM, pinned RAM beside a CUDA device.

`open_store` gives a `Store`, whose copies run beside the step: `send` begins one out, `fetch` one back, `wait` ends
either, `drop` lets the copy there go. `measure` says how fast they are.
"""

from checkmate.host.links import Links, measure
from checkmate.host.opening import open_store
from checkmate.host.slots import BLOCK, rounded
from checkmate.host.store import Counts, Store

__all__ = ["BLOCK", "Counts", "Links", "Store", "measure", "open_store", "rounded"]
