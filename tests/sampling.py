"""Many cases of one test, of which the quick part of the suite takes a sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, the first and every nth after it as they are, the others marked slow."""
    return [slow(case) if i % nth else case for i, case in enumerate(cases)]


def slow(*values: Any) -> Any:
    """A case that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
