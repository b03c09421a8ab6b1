"""What every test starts from: seeds, and helpers for tests that need PyTorch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every test, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for libraries that draw from it


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread, where bytes and numbers repeat exactly."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile as in a new process: nothing compiled before counts towards its limits."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
