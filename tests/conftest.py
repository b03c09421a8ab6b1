"""What every test starts from."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every test, whichever ran before it. Tests without PyTorch do not load it for this."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread, where bytes and numbers repeat exactly."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
