"""The number of ops that are traced, for the status line of a long capture."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.fx as fx

AFTER_SECONDS = 30.0  # of a capture, from which on its ops are counted aloud

_traced = 0  # ops of all graphs


def _counting(create_node: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
    @wraps(create_node)
    def counted(tracer: fx.Tracer, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        global _traced  # read by the thread that draws
        _traced += kind.startswith("call_")
        return create_node(tracer, kind, *args, **kwargs)

    return counted


def traced_since_now(doing: str) -> Callable[[], str]:
    """A text for `showing`: the work that begins now, and after `AFTER_SECONDS` how many ops it has traced so far."""
    began, before = time.perf_counter(), _traced

    def text() -> str:
        late = time.perf_counter() - began >= AFTER_SECONDS
        return f"{doing}: {_traced - before:,} ops so far" if late else doing

    return text


fx.Tracer.create_node = _counting(fx.Tracer.create_node)  # type: ignore[method-assign]
