"""A second memory for waiting values: a file beside the RAM, or pinned RAM beside an accelerator.

`open_store` gives a `Store`, whose copies run beside the step: `send` begins one out, `fetch` one back, `wait` ends
either, `drop` lets the copy there go. `measure` says how fast they are.
"""

from checkmate.host.opening import Links, known_links, measure, open_store
from checkmate.host.store import BLOCK, Store, rounded

__all__ = ["BLOCK", "Links", "Store", "known_links", "measure", "open_store", "rounded"]
