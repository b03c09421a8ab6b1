"""The arena's library (arena.cpp), loaded in the background; without it PyTorch's allocator serves.

Then one line of the log says why, and steps run with PyTorch's own allocator.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from checkmate.memory.native import Source, Unbuildable

log = logging.getLogger("checkmate.memory")

_pointer, _size, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
ARENA = Source(
    Path(__file__).with_name("arena.cpp"),
    ("c10",),
    (
        ("install", _number, ()),
        ("open", _pointer, (_size,)),
        ("renew", None, (_pointer, _size)),
        ("close", None, (_pointer,)),
        ("wants_layout", _number, (_pointer,)),
        ("record", _size, (_pointer, _size, _pointer, _pointer, _pointer)),
        ("lay_out", _number, (_pointer, _size, _pointer, _pointer, _pointer, _size, _size)),
        ("enter", _number, (_pointer, _number)),
        ("leave", None, (_pointer, _number)),
        ("counts", None, (_pointer, _pointer)),
        ("resident", ctypes.c_int64, (_pointer,)),
        ("allocate", _pointer, (_size,)),
        ("free", None, (_pointer,)),
    ),
)


@dataclass
class _Library:
    """The library of this process: not started, loading, loaded, or the reason why not."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    loaded: ctypes.PyDLL | None = None
    failure: str | None = None


_LIBRARY = _Library()


def start(*, keep: bool = True, level: int = logging.WARNING) -> None:
    """Load the library in the background, once per process; build it if missing, and keep it with ``keep``.

    ``level``: of the line in the log that says why there is none.
    """
    made = _LIBRARY

    def make() -> None:
        try:
            made.loaded = ARENA.load(keep=keep)
        except (Unbuildable, OSError) as error:
            made.failure = str(error)
            log.log(level, "No arena: %s. Steps run with PyTorch's own allocator.", error)

    with made.lock:
        if made.thread is None:
            made.thread = threading.Thread(target=make, name="checkmate-build", daemon=True)
            made.thread.start()


def library() -> ctypes.PyDLL | None:
    """The library once it is loaded; None before, and if it is not available."""
    return _LIBRARY.loaded


def wait() -> str | None:
    """Wait for `start`'s work; give the reason why there is no library, or None."""
    if _LIBRARY.thread is not None:
        _LIBRARY.thread.join()
    return _LIBRARY.failure
