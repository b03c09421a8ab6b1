"""Estimates of ``profile="roofline:NAME"`` held against whole training steps that others measured.

    python -m benchmarks.estimates [CASE ...]    # figures and their sources are in benchmarks/estimates/steps.py
    python -m benchmarks.estimates --report      # from the rows: results/estimates.md

A step is traced without data as the device runs it, and its estimate is the sum over its ops, with five reads or
writes of four bytes for each parameter for the update. "Plain" is the same trace by the roofline alone, FLOP at .7 of
the rate, bytes at .8 of the bandwidth and 4 µs for each op, as all devices had it before. Constants of the model were
set with some of the steps in view; the others were kept back, and looked at afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.estimates.steps import STEPS
from checkmate.core.answer import Table
from checkmate.profiling.data_sheets import DEVICES, Device

UPDATE = 5 * 4  # bytes read and written for each parameter by its update
KINDS = ("steps", "cases", "median error", "worst", "fastest", "slowest")


def rows_of(name: str) -> list[Row]:
    """The row of a step."""
    import torch

    import checkmate
    from checkmate.profiling import source
    from checkmate.profiling.roofline import roofline

    asked = STEPS[name]
    device = DEVICES[asked.device]
    plain: list[float] = []

    def both_ways(joint: Any, device: Device) -> Any:
        plain.append(float(roofline(joint, as_before(device)).seconds.sum()))
        return roofline(joint, device)

    torch._dynamo.reset()
    model, step, batch = asked.make()
    with patch.object(source, "roofline", both_ways):
        problem = checkmate.trace(step, *batch, profile=f"roofline:{asked.device}")
    update = UPDATE * sum(p.numel() for p in model.parameters()) / device.bandwidth
    seconds = {
        "measured": asked.milliseconds / 1e3,
        "estimated": problem.keep_all_cost + update / device.memory_efficiency,
        "plain": plain[-1] + update / as_before(device).memory_efficiency,
    }
    row = {"case": name, "kind": "step", "source": asked.source, "ops": len(problem.graph.ops)}
    row |= {key: float(f"{figure:.6g}") for key, figure in seconds.items()}
    return [row | {"kept_back": not asked.looked_at}]


def as_before(device: Device) -> Device:
    """The device by the roofline alone."""
    return replace(
        device, processors=0, host=0.0, latency=4e-6, compute_efficiency=0.7, memory_efficiency=0.8, cache_bytes=0
    )


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Count rows: how many, the error that half of them stay within as a share of what was measured, and the worst."""
    errors = [abs(row["estimated"] / row["measured"] - 1) for row in rows]
    return {"cases": len(errors), "median": statistics.median(errors), "worst": max(errors)}


def kept_back(rows: Sequence[Row]) -> list[Row]:
    """The last row of each step that says what estimates are worth."""
    return [row for row in latest(rows, "case") if row.get("kept_back")]


def markdown(rows: Sequence[Row]) -> str:
    """A table of the steps, and what they come to."""
    steps = sorted(latest(rows, "case"), key=lambda row: (row["kept_back"], row["case"]))
    looked_at = [row for row in steps if not row["kept_back"]]
    said = {"kept back": kept_back(steps), "looked at while constants were set": looked_at, "all": steps}
    return document(
        "Estimates held against measurements",
        f"Made by `python -m benchmarks.estimates` at {where_from(rows)}. Nothing here ran on a GPU of ours: "
        "what is measured is what others published, with its source in `benchmarks/estimates/steps.py`. A ratio above "
        "1: the estimate is too fast. Plain: the same ratio by the roofline alone.",
        BENCHMARK.table(steps),
        Table(KINDS, [_total(name, those) for name, those in said.items() if those], KINDS[1:]),
    )


def _total(name: str, rows: Sequence[Row]) -> list[str]:
    found, ratios = summary(rows), [row["measured"] / row["estimated"] for row in rows]
    errors = (f"{found[key]:.0%}" for key in ("median", "worst"))
    return [name, str(found["cases"]), *errors, f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


BENCHMARK = Benchmark(
    __doc__,
    "estimates.jsonl",
    rows_of,
    {
        "case": "{case}",
        "source": "{source}",
        "measured": lambda row: f"{1e3 * row['measured']:.4g} ms",
        "estimated": lambda row: f"{1e3 * row['estimated']:.4g} ms",
        "measured / estimated": lambda row: f"{row['measured'] / row['estimated']:.2f}",
        "plain": lambda row: f"{row['measured'] / row['plain']:.2f}",
        "kept back": lambda row: "yes" if row["kept_back"] else "",
    },
    names=STEPS,
    packages=("torch", "transformers"),
    page=markdown,
)
