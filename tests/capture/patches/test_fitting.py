"""Patches go around what the running version of PyTorch has, and are left out where it has nothing of the name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from checkmate.backends import eager as _all_patches  # noqa: F401  # which puts them in place
from checkmate.capture.patches import fitting


def test_all_patches_fit_the_pinned_version() -> None:
    assert fitting.LEFT_OUT == []


def test_the_first_name_that_there_is() -> None:
    holder = SimpleNamespace(old=lambda: 1, __name__="holder")
    fitting.wrap(holder, ("new", "old"), lambda plain: lambda: plain() + 1)
    assert holder.old() == 2
    assert not hasattr(holder, "new")


def test_what_is_not_there_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fitting, "LEFT_OUT", [])
    holder = SimpleNamespace(__name__="holder")
    with caplog.at_level(logging.WARNING):
        fitting.wrap(holder, ("new", "old"), lambda plain: plain)
    assert vars(holder) == {"__name__": "holder"}
    assert fitting.LEFT_OUT == ["holder.new"]
    assert "has no holder.new" in caplog.text


def test_what_has_moved() -> None:
    assert fitting.moved("OrderedDict", "no_such_module", "typing", "collections").__name__ == "OrderedDict"
    with pytest.raises(ImportError, match="has no Missing in json or typing"):
        fitting.moved("Missing", "json", "typing")
