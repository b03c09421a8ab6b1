"""Which version of checkmate this is: part of what a plan on disk was made by."""

from __future__ import annotations

__version__ = "0.3.0"
