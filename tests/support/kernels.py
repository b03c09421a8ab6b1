"""Calls of Inductor for the kernels of groups."""

from __future__ import annotations

from typing import Any

import pytest

from checkmate.capture.fusion import compiling, open_sizes


def compiles_from_now_on(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled in this process within a test, at whose begin no kernel is known."""
    calls = list[Any]()
    for module, name in (
        *((compiling, "_kernels"), (compiling, "_bound"), (compiling, "_begun")),
        *((open_sizes, "_open"), (open_sizes, "_met"), (open_sizes, "_bound_to")),
    ):
        monkeypatch.setattr(module, name, {})
    for module, name in ((compiling, "_compile"), (open_sizes, "compiled_at_open_sizes")):
        really = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, really=really: calls.append(args) or really(*args))
    return calls
