"""Tests that build the device are left out where it cannot be built."""

from __future__ import annotations

import os

import pytest

from tests.support.simulated_cuda.build import missing

collect_ignore = ["startup"]  # to import what is there is to have the device in this process


@pytest.fixture
def can_be_built() -> None:
    """Skips a test where it cannot, and says why; where the environment variable ``CI`` is set, that is a failure."""
    if lacks := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(lacks)
