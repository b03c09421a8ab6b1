"""Estimates of ``profile="roofline:NAME"`` held against what others measured: whole training steps, and single ops.

    python -m benchmarks.estimates [CASE ...]           # steps, whose figures are here, with their sources
    python -m benchmarks.estimates FOLDER [CASE ...]    # and ops: benchmarks/estimates/ops.py says what is in it
    python -m benchmarks.estimates --report             # from the rows: results/estimates.md

A step is traced without data as the device runs it, and its estimate is the sum over its ops, with five reads or
writes of four bytes for each parameter for the update. "Plain" is the same trace by the roofline alone, FLOP at .7 of
the rate, bytes at .8 of the bandwidth and 4 µs for each op, as all devices had it before. Constants of the model were
set with some of the steps in view; the others were kept back, and looked at afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.estimates.ops import TABLES, cases
from benchmarks.estimates.steps import STEPS
from checkmate.core.answer import Table
from checkmate.profiling.data_sheets import DEVICES, Device

UPDATE = 5 * 4  # bytes read and written for each parameter by its update
HEADER = ("case", "source", "measured", "estimated", "measured / estimated", "plain", "kept back")
KINDS = ("kind", "cases", "median error", "worst", "fastest", "slowest")


def rows_of(name: str) -> Iterator[Row]:
    """The row of a step, or those of a table."""
    if name in STEPS:
        yield _step(name)
        return
    for kind, case, measured, estimated in cases(name):
        yield {"case": f"{name}: {case}", "kind": kind, "source": name.partition(" ")[0]} | _both(measured, estimated)


def _both(measured: float, estimated: float) -> Row:
    return {"measured": float(f"{measured:.6g}"), "estimated": float(f"{estimated:.6g}")}


def _step(name: str) -> Row:
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
    row = {"case": name, "kind": "step", "source": asked.source, "ops": len(problem.graph.ops)}
    times = _both(asked.milliseconds / 1e3, problem.keep_all_cost + update / device.memory_efficiency)
    before = float(f"{plain[-1] + update / as_before(device).memory_efficiency:.6g}")
    return row | times | {"plain": before, "kept_back": not asked.looked_at}


def as_before(device: Device) -> Device:
    """The device by the roofline alone."""
    return replace(
        device, processors=0, host=0.0, latency=4e-6, compute_efficiency=0.7, memory_efficiency=0.8, cache_bytes=0
    )


def error(row: Row, estimated: str = "estimated") -> float:
    """By which share the estimate is off, of what was measured."""
    return float(abs(row[estimated] / row["measured"] - 1))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Of rows: how many, the error that half of them stay within, and the worst."""
    errors = [error(row) for row in rows]
    return {"cases": len(errors), "median": statistics.median(errors), "worst": max(errors)}


def kept_back(rows: Sequence[Row]) -> list[Row]:
    """The steps that say what estimates are worth."""
    return [row for row in latest(rows, "case") if row.get("kept_back")]


def markdown(rows: Sequence[Row]) -> str:
    """A table of the steps, one of the ops by kind and device, and what each comes to."""
    rows = latest(rows, "case")
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: (row["kept_back"], row["case"]))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] != "step":
            groups.setdefault(f"{row['case'].partition(':')[0]}: {row['kind']}", []).append(row)
    looked_at = [row for row in steps if not row["kept_back"]]
    said = {"kept back": kept_back(steps), "looked at while constants were set": looked_at, "all": steps}
    return document(
        "Estimates held against measurements",
        f"Made by `python -m benchmarks.estimates FOLDER` at {where_from(rows)}. Nothing here ran on a GPU of ours: "
        "what is measured is what others published, with its source in `benchmarks/estimates/steps.py` and "
        "`benchmarks/estimates/ops.py`. A ratio above 1: the estimate is too fast. Plain: the same ratio by the "
        "roofline alone.",
        Table(HEADER, [cells(row) for row in steps], HEADER[2:]),
        Table(KINDS, [_total(f"steps {name}", those) for name, those in said.items() if those], KINDS[1:]),
        "Ops one by one, by table and kind; fastest and slowest are measured / estimated:",
        Table(KINDS, [_total(name, those) for name, those in groups.items()], KINDS[1:]),
    )


def _total(name: str, rows: Sequence[Row]) -> list[str]:
    found, ratios = summary(rows), [row["measured"] / row["estimated"] for row in rows]
    errors = (f"{found[key]:.0%}" for key in ("median", "worst"))
    return [name, str(found["cases"]), *errors, f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


def cells(row: Row) -> list[str]:
    """A row as it is shown."""
    plain = f"{row['measured'] / row['plain']:.2f}" if "plain" in row else ""
    times = (f"{1e3 * row[key]:.4g} ms" for key in ("measured", "estimated"))
    kept = "yes" if row.get("kept_back") else ""
    return [row["case"], row["source"], *times, f"{row['measured'] / row['estimated']:.2f}", plain, kept]


BENCHMARK = Benchmark(
    __doc__,
    "estimates.jsonl",
    rows_of,
    HEADER,
    cells,
    names=(*TABLES, *STEPS),
    default=tuple(STEPS),
    packages=("torch", "transformers"),
    page=markdown,
)
