"""The benchmarks of a second memory: their rows, their documents and what pages say of them."""

from __future__ import annotations

from benchmarks.common.rows import latest, read, renewed
from benchmarks.second_memory import measured, planned

ROWS, MEASURED = read(planned.BENCHMARK.path), read(measured.BENCHMARK.path)
TRANSFORMERS = ("bert-base", "gpt2-12", "gpt2-48", "t5-base", "vit-b16")


def test_the_committed_documents_are_of_the_committed_rows() -> None:
    assert planned.BENCHMARK.path.with_suffix(".md").read_text() == planned.markdown(ROWS)
    assert renewed(planned.PAGE, planned.tables(ROWS)) == planned.PAGE.read_text()
    assert measured.BENCHMARK.path.with_suffix(".md").read_text() == measured.markdown(MEASURED)


def test_ours_is_never_slower_than_recomputation_alone_or_than_others() -> None:
    rows = {(row["network"], row["share"], row["method"]): row for row in planned.in_order(ROWS)}
    for (network, share, method), row in rows.items():
        ours = rows[network, share, "auto"]
        assert ours["peak"] <= ours["budget"]
        assert ours["bound_ratio"] <= ours["cost_ratio"]
        if row["cost_ratio"] is not None:
            assert ours["cost_ratio"] <= row["cost_ratio"] * (1 + 1e-9), (network, share, method)
            assert ours["bound_ratio"] <= row["cost_ratio"] * (1 + 1e-6)


def test_half_of_the_recomputation_is_gone_on_transformers_or_no_plan_does_that() -> None:
    rows = {(row["network"], row["share"], row["method"]): row for row in planned.in_order(ROWS)}
    for network in TRANSFORMERS:
        for share in planned.BUDGETS:
            alone, ours = rows[network, share, planned.ALONE], rows[network, share, "auto"]
            if alone["cost_ratio"] is not None:
                half = 1 + 0.5 * (alone["cost_ratio"] - 1)
                assert ours["cost_ratio"] <= half or ours["bound_ratio"] > half, (network, share)
            assert ours["gap"] <= 0.02, (network, share)


def test_the_page_of_figures_says_what_the_rows_say() -> None:
    rows = {(row["network"], row["share"], row["method"]): row for row in planned.in_order(ROWS)}
    said = " ".join((planned.PAGE.parent / "figures.md").read_text().split())

    def longer(network: str, method: str) -> str:
        return f"{rows[network, 0.3, method]['cost_ratio'] - 1:.1%}"

    assert rows["gpt2-12", 0.3, planned.ALONE]["status"] == "infeasible"
    large = longer("gpt2-48", planned.ALONE), longer("gpt2-48", "auto")
    assert f"of 48 layers takes {large[0]} longer by recomputation alone and {large[1]} with it" in said
    assert f"one of 12 layers, which no recomputation fits there, {longer('gpt2-12', 'auto')}" in said
    ways = {row["way"]: row for row in latest(MEASURED, "network", "way") if row["network"] == "gpt2"}
    alone, *files = (ways[way] for way in (measured.ALONE, *measured.WHERE))
    assert f"{alone['time_ratio']:.2f} times a plain step by recomputation alone" in said
    assert " and ".join(f"{row['time_ratio']:.2f}" for row in files) + " with a file" in said


def test_measured_steps_keep_their_promises() -> None:
    for row in latest(MEASURED, "network", "way"):
        assert row["same_bits"]
        assert row["peak"] == row["predicted_peak"] <= row["budget"]
