"""One version, in two places that agree."""

from __future__ import annotations

import re
from pathlib import Path

import checkmate


def test_the_version_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.*)"$', text, flags=re.MULTILINE) == [checkmate.__version__]
