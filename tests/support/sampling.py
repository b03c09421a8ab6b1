"""Many cases of one test: a sample in the quick part of the suite, more in the whole of it, the rest on its own."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def in_turn(**cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """One test of every combination of the cases, one after the other; where one fails, the error says which.

    Cases that are marked alike, by the functions below, are one test together: a quick one, a slow one, a long one.
    """
    alike: dict[frozenset[str], list[dict[str, Any]]] = {}
    for values in itertools.product(*cases.values()):
        marks = frozenset(mark.name for value in values for mark in getattr(value, "marks", ()))
        plain = [value.values[0] if hasattr(value, "marks") else value for value in values]
        alike.setdefault(marks, []).append(dict(zip(cases, plain, strict=True)))
    groups = [
        pytest.param(group, id=f"{len(group)} cases", marks=[getattr(pytest.mark, mark) for mark in sorted(marks)])
        for marks, group in alike.items()
    ]

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(group: list[dict[str, Any]], **fixtures: Any) -> None:
            for case in group:
                try:
                    test(**case, **fixtures)
                except Exception as error:
                    said = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in case.items())
                    raise AssertionError(f"in the case {said}") from error

        fixtures = [one for name, one in inspect.signature(test).parameters.items() if name not in cases]
        run.__signature__ = inspect.Signature(
            [inspect.Parameter("group", inspect.Parameter.POSITIONAL_OR_KEYWORD), *fixtures]
        )
        return pytest.mark.parametrize("group", groups)(run)

    return decorate


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, the first and every nth after it as they are; of the others each fourth is slow, the rest long."""
    others = iter(range(10**9))
    return [case if i % nth == 0 else long(case) if next(others) % 4 else slow(case) for i, case in enumerate(cases)]


def slow(*values: Any) -> Any:
    """A case that only the whole suite runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """A case of which the suite has others like it: it runs with -m long."""
    return pytest.param(*values, marks=pytest.mark.long)


def few(nth: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Slow cases, of which the first and every nth after it are in the suite, and the others long."""
    return [long(*case) if i % nth else slow(*case) for i, case in enumerate(cases)]
