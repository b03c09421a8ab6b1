"""For pytest: the tests marked ``cuda`` on the simulated device, where there is none.

python -m pytest -m cuda -p tests.support.simulated_cuda.plugin
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.simulated_cuda.install import install, is_installed, unpinned_early


def needed() -> pytest.MarkDecorator:
    """Skip tests of the device itself where there is none."""
    return pytest.mark.skipif(not is_installed(), reason="tests of the simulated CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before anything else asks PyTorch for a device."""
    install()


@pytest.fixture(autouse=True)
def _pinned_memory_waits_for_its_copies() -> Iterator[None]:
    yield
    assert unpinned_early() == 0, "pinned memory was let go of while a copy might still use it"
