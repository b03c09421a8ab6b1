"""What tests of captures share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def forgotten(one_thread: None) -> Iterator[None]:
    """On one thread; afterwards Dynamo knows nothing of what the test has compiled."""
    yield
    torch._dynamo.reset()
