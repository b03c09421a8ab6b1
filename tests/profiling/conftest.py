"""A machine of their own for tests that measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkmate.profiling import cost_cache, measure, trial
from checkmate.profiling.one_op import call_of
from tests.support.processes import own_cache


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing has been measured or tried, by this process or an earlier one."""
    for module in (cost_cache, trial):
        monkeypatch.setattr(module, "_known", {})
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", own_cache(tmp_path / "cache"))


@pytest.fixture
def tanh_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has tanh and its backward fail in these words where they are to be measured."""

    def fail_with(words: str) -> None:
        def fail_on_tanh(node: Any) -> Any:
            if "tanh" in str(node.target):
                raise RuntimeError(words)
            return call_of(node)

        monkeypatch.setattr(measure, "call_of", fail_on_tanh)

    return fail_with
