"""Bytes that malloc keeps of what was freed, and gives back to the machine only when it is asked to."""

from __future__ import annotations

import ctypes


def trim() -> bool:
    """Have glibc's malloc give back all pages in which nothing is alive; whether there were any. Elsewhere: False.

    Measuring ops and tracing free hundreds of megabytes, which malloc keeps between the blocks that live on.

    >>> trim() in (True, False)
    True
    """
    try:
        give_back = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another libc, another system
        return False
    return bool(give_back(ctypes.c_size_t(0)))
