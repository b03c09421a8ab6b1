"""What holds for tests and for the examples in docstrings alike."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.common.own_seconds import WALL, count_own_seconds

collect_ignore = [  # importing them imports a trainer's library; docs/ecosystem.md has their examples
    f"checkmate/integrations/{name}.py" for name in ("huggingface", "lightning")
]


def pytest_configure(config: pytest.Config) -> None:
    """No test leans on what else the machine does, and Inductor starts no processes to compile in."""
    count_own_seconds()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def _clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall for tests that wait without computing; they ask for it by a marker."""
    if request.node.get_closest_marker("wall_clock"):
        monkeypatch.setattr(time, "perf_counter", WALL)


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops are timed a few times each: no test leans on how many seconds they take."""
    if measure := sys.modules.get("checkmate.profiling.measure"):
        monkeypatch.setattr(measure, "MOST_REPEATS", measure.LEAST_REPEATS)


@pytest.fixture(autouse=True)
def _a_second_for_the_smallest_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no test says how long it is looked for: what a second finds is a plan, and its bound is proven."""
    if search := sys.modules.get("checkmate.solvers.search.min_budget"):
        monkeypatch.setitem(search.min_budget.__kwdefaults__, "time_limit", 1.0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for measured costs that is not the user's, the same for all processes that run tests at a time."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKMATE_CACHE_DIR", str(folder / "cache"))
        yield
