"""The benchmark of activations merged by hand: its forms compute the same, and its page shows its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import merged
from benchmarks.common import merged_forms
from benchmarks.common.merged_forms import FORMS
from benchmarks.common.rows import read, renewed
from benchmarks.merged import BENCHMARK, OURS, PAGE, Size
from checkmate.backends.tensor_state import differing

TINY = Size(batch=4, side=32, base=8, classes=10)
SAME_BITS = {"plain", "plain, inplace=True", "by hand, recomputing"}


@pytest.fixture(autouse=True)
def _one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_forms, "BLOCKS", (1,))


@pytest.mark.parametrize("activation", FORMS)
def test_all_forms_compute_the_same(activation: str) -> None:
    expected = merged.trained(merged.made(FORMS[activation]["plain"], TINY))
    for name, form in FORMS[activation].items():
        found = merged.trained(merged.made(form, TINY))
        assert merged.distance(found[:-1], expected[:-1]) < 1e-4, name
        assert (name in SAME_BITS) == (not differing(found, expected)), name


@pytest.mark.long
def test_plans_are_of_the_plain_form_within_the_bytes_of_others(one_thread: None) -> None:
    rows = {row["form"]: row for row in merged.measured("norm and leaky ReLU", 1.0, 1, TINY)}
    ours = {name: row for name, row in rows.items() if name.startswith(OURS)}
    assert {f"{OURS}, nothing twice", f"{OURS}, bytes of 'by hand, inverting'"} <= {*ours}
    assert all(row["bitwise"] and row["predicted"] == row["peak"] <= row["budget"] for row in ours.values())
    assert ours[f"{OURS}, bytes of 'by hand, inverting'"]["peak"] <= rows["by hand, inverting"]["peak"]


def test_the_tables_show_the_rows_of_the_last_run(tmp_path: Path) -> None:
    about = {"setting": "cpu", "activation": "swish", "run": "2"}
    rows = [
        {**about, "form": "plain", "peak": 2000, "step": 0.5, "ratio": 1.0, "bitwise": True, "distance": 0.0},
        {**about, "form": "by hand", "peak": 1000, "step": 0.6, "ratio": 1.2, "bitwise": False, "distance": 3e-6},
        {**about, "form": f"{OURS}, gone", "run": "1", "peak": 1, "step": 0.1},
        {**about, "form": f"{OURS}, here", "peak": None, "step": None, "status": "not found"},
    ]
    ((head, table),) = merged.tables(rows).items()
    assert head == "swish, on a CPU, measured"
    assert table.splitlines()[2:] == [
        "| plain | 2.00 kB | 100.0% | 500.0 ms | 1.000 |  | same bits |",
        "| by hand | 1.00 kB | 50.0% | 600.0 ms | 1.200 |  | differ by 3e-06 |",
        "| **checkmate, here** | not found | – | – | – |  | – |",
    ]
    page = tmp_path / "page.md"
    page.write_text(f"Text\n\n| {head} | x |\n|---|---|\n| old | 1 |\n\nMore\n")
    assert renewed(page, {head: table}) == f"Text\n\n{table}\n\nMore\n"
    page.write_text("Text\n")
    with pytest.raises(ValueError, match=r"page.md has 0 tables that begin with 'swish"):
        renewed(page, {head: table})


def test_the_page_has_the_committed_rows() -> None:
    found = merged.tables(read(BENCHMARK.path))
    assert len(found) == len(FORMS)
    assert renewed(PAGE, found) == PAGE.read_text()


def test_the_committed_rows_keep_their_promises() -> None:
    ours = [row for row in read(BENCHMARK.path) if row["form"].startswith(OURS)]
    assert ours
    assert all(row["bitwise"] and row["predicted"] == row["peak"] <= row["budget"] for row in ours)
