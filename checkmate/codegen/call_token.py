"""The tensor among those saved that tells a backward its call.

Its memory is NumPy's, and counts in no peak. When it is gone, nobody can ask for that backward any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch


def call_token(number: int, gone: Callable[[], object], length: int = 1) -> torch.Tensor:
    """Make the token of a call, with its number as each element; ``gone`` is called when nobody has it any more.

    The length outlasts hooks that put another tensor in its place. It is not 0: they may ask for its maximum.
    """
    memory = np.full(1, number, dtype=np.int64)
    weakref.finalize(memory, gone).atexit = False
    return torch.from_numpy(memory).expand(length)
