"""One version, which the package is built with."""

from __future__ import annotations

import importlib.metadata

import checkmate


def test_the_version_is_that_of_the_distribution() -> None:
    assert importlib.metadata.version("checkmate-torch") == checkmate.__version__
