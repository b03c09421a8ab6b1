"""The list of methods shows all there is to ask for."""

from __future__ import annotations

import pytest

import checkmate
from checkmate.solvers.catalogue import METHODS, WIDTH, Catalogue, Method, methods
from checkmate.solvers.common.incumbent import Remarks


@pytest.mark.parametrize("shown", [repr(methods()), methods()._repr_html_()], ids=["text", "html"])
def test_every_method_is_there_with_its_line_its_source_and_its_options(shown: str) -> None:
    flat = " ".join(shown.replace("&#x27;", "'").replace("&amp;", "&").split())
    for name, method in METHODS.items():
        assert name in flat
        assert method.summary in flat
        assert method.source in flat
        for option, default in method.defaults.items():
            assert f"{option}={default!r}" in flat


def test_it_is_a_mapping_whose_lines_fit_and_whose_names_stand_in_a_column() -> None:
    assert list(checkmate.methods()) == list(METHODS)
    assert checkmate.methods()["milp"] is METHODS["milp"]
    assert len(methods()) == len(METHODS)
    lines = repr(methods()).splitlines()
    assert max(map(len, lines)) <= WIDTH
    column = max(map(len, METHODS)) + 2
    assert all(line[:column].strip() in {"", *METHODS} for line in lines)


def test_text_is_escaped_and_a_method_without_options_says_so() -> None:
    table = Catalogue({"x": Method("x", "a < b & c", "<b>", lambda task, incumbent: Remarks())})
    assert "a &lt; b &amp; c" in table._repr_html_()
    assert "<b>" not in table._repr_html_()
    assert "options: none" in repr(table)
