"""The version of checkmate, which plans on disk carry."""

from __future__ import annotations

__version__ = "0.3.0"
