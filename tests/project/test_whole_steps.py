"""The benchmark of whole training steps: its rows, its document and what the page of figures says of them."""

from __future__ import annotations

from benchmarks import whole_steps
from benchmarks.common.rows import latest, read
from benchmarks.solve.comparison import HERE

ROWS = read(whole_steps.BENCHMARK.path)
OURS = "checkmate.training_step, "


def test_the_committed_document_is_of_the_committed_rows() -> None:
    assert whole_steps.BENCHMARK.path.with_suffix(".md").read_text() == whole_steps.markdown(ROWS)


def test_our_rows_keep_the_promise() -> None:
    ours = [row for row in ROWS if row["way"].startswith(OURS)]
    assert len(ours) >= 6
    for row in ours:
        assert row["same_bits"]
        assert row["peak"] == row["predicted_peak"] <= row["budget"]


def test_the_figures_of_the_page_come_from_the_committed_rows() -> None:
    rows = {(row["model"], row["way"]): row for row in latest(ROWS, "model", "way")}
    said = (HERE.parent / "docs" / "figures.md").read_text()
    for name in whole_steps.SIZES:
        least, apart, hooks = (
            f"{rows[name, way]['peak'] / 1e6:.1f} MB"
            for way in (f"{OURS}smallest", "checkmate.compile, smallest", "hooks + checkpoint, each block")
        )
        ratio = f"{rows[name, f'{OURS}keep all']['time_ratio']:.2f}"
        title = {"gpt2": "gpt2, 4 layers"}.get(name, name)
        assert f"| {title} | {least} | {apart} | {hooks} | {ratio} |" in said
