"""Many cases of one test: a sample in the quick part of the suite, more in the whole of it, the rest on its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, the first and every nth after it as they are; of the others each fourth is slow, the rest long."""
    others = iter(range(10**9))
    return [case if i % nth == 0 else long(case) if next(others) % 4 else slow(case) for i, case in enumerate(cases)]


def slow(*values: Any) -> Any:
    """A case that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """A case of which the suite has others like it: it runs with -m long."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])


def few(nth: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Slow cases, of which the first and every nth after it are in the suite, and the others long."""
    return [long(*case) if i % nth else slow(*case) for i, case in enumerate(cases)]
