"""The benchmark of whole training steps: its rows, its document and what the README says of them."""

from __future__ import annotations

from benchmarks import whole_steps
from benchmarks.common.rows import latest, read
from benchmarks.solve.comparison import HERE

ROWS = read(whole_steps.RESULTS)
OURS = "checkmate.training_step, "


def test_the_committed_document_is_of_the_committed_rows() -> None:
    assert whole_steps.RESULTS.with_suffix(".md").read_text() == whole_steps.markdown(ROWS)


def test_our_rows_keep_the_promise() -> None:
    ours = [row for row in ROWS if row["way"].startswith(OURS)]
    assert len(ours) >= 6
    for row in ours:
        assert row["same_bits"]
        assert row["peak"] == row["predicted_peak"] <= row["budget"]


def test_the_figures_of_the_readme_come_from_the_committed_rows() -> None:
    rows = {(row["model"], row["way"]): row for row in latest(ROWS, "model", "way")}
    said = " ".join((HERE.parent / "README.md").read_text().split())

    def pair(way: str, key: str = "peak", form: str = ".1f", unit: float = 1e6) -> list[str]:
        return [format(rows[name, way][key] / unit, form) for name in ("gpt2", "vit")]

    (gpt2, vit), apart = pair(f"{OURS}smallest"), pair("checkmate.compile, smallest")
    assert f"a GPT-2 of 4 layers takes {gpt2} MB at least and a ViT {vit} MB" in said
    assert f"take {' and '.join(apart)} MB with the plain optimizer" in said
    assert f"hook {' and '.join(pair('hooks + checkpoint, each block'))} MB" in said
    ratios = pair(f"{OURS}keep all", "time_ratio", ".2f", 1.0)
    assert f"a step takes {' and '.join(ratios)} times the plain loop" in said
