"""What holds for tests and for the examples in docstrings alike."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.common.own_seconds import WALL, count_own_seconds


def pytest_configure(config: pytest.Config) -> None:
    """No test leans on what else the machine does."""
    count_own_seconds()


@pytest.fixture(autouse=True)
def _clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall for tests that wait without computing; they ask for it by a marker."""
    if request.node.get_closest_marker("wall_clock"):
        monkeypatch.setattr(time, "perf_counter", WALL)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for measured costs that is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
