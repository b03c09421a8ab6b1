"""A second memory for waiting values: a file beside the RAM, or pinned RAM beside an accelerator.

`open_store` gives a `Store`, whose copies run beside the step: `send` begins one out, `fetch` one back, `wait` ends
either, `drop` lets the copy there go. `measure` says how fast they are. `home_of` tells whether a tensor lies there for
good, and `checkmate.host.homes` puts a model's tensors into a file for that.
"""

from checkmate.host.opening import known_links, measure, open_store
from checkmate.host.store import BLOCK, HOMES, Home, Store, home_of, is_stand_in, rounded

__all__ = ["BLOCK", "HOMES", "Home", "Store"]
__all__ += ["home_of", "is_stand_in", "known_links", "measure", "open_store", "rounded"]
