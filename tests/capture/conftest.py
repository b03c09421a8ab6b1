"""Fixtures of tests of captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def forgotten() -> Iterator[None]:
    """Forget captures at the end of a file only: after each reset the next capture takes half as long again."""
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
