"""The tables of the page, each with its heads, its rows as text, and the numbers that they sort by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.inspection.op_costs import costs_of
from checkmate.inspection.peak import PeakExplanation
from checkmate.inspection.timeline import Timeline
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from checkmate.solvers.frontier import Row

Cell = str | tuple[str, float | None]  # text, or text and what it sorts by; None stands last
NONE = ("-", None)


def page_tables(
    line: Timeline, problem: Problem, peak: PeakExplanation, rows: list[Row] | None
) -> list[dict[str, Any]]:
    """In their order. ``heads`` are texts and whether numbers; ``go``: the moment that a row's name leads to."""
    held, *prices = _peak_tables(line, peak)
    *again, ops = _op_tables(line, problem)
    crossed = [_crossings_table(line)] if line.crossings else []
    return [held, *again, *prices, *crossed, ops, *([] if rows is None else [_frontier_table(rows)])]


def stages_of(line: Timeline) -> list[int]:
    """(N,) the stage of each execution; stage t ends with the first execution of op t."""
    first = np.array([moment.time == 0 for moment in line.moments])
    return (first.cumsum() - first).tolist()


def _peak_tables(line: Timeline, peak: PeakExplanation) -> Iterator[dict[str, Any]]:
    made = {span.value: span.first for span in line.alive(peak.moment.index)}
    sends = peak.there is not None
    yield {
        "id": "table-peak",
        "title": f"Values at the peak ({len(peak)})",
        "heads": [
            ("value", False), ("bytes", True), ("role", False), ("needed next by", False), ("in", True),
            ("dropping costs", True), *([("sending costs", True)] if sends else []), ("where", False),
        ],
        "rows": [
            (
                row.name, _bytes(row.bytes), row.role, row.next_op, _seconds(row.next_in),
                _seconds(row.drop_seconds) if row.drop_seconds is not None else (row.why_not, None),
                *([_seconds(row.send_seconds)] if sends else []), row.where,
            )
            for row in peak
        ],
        "go": [made[row.value] for row in peak],
    }  # fmt: skip
    if peak.prices:
        yield {
            "id": "table-prices",
            "title": "What less or more memory would change",
            "heads": [
                ("memory", True), ("budget", True), ("step", True), ("plan found", True),
                ("any schedule, proven", True), ("status", False),
            ],
            "rows": [
                (
                    _bytes(price.change_bytes, "+"), _bytes(price.budget), _seconds(price.cost),
                    _seconds(price.found_change, "+"),
                    ("none fits", None) if math.isinf(price.bound) else _seconds(price.proven_change, "+", "at least "),
                    price.status.label,
                )
                for price in peak.prices
            ],
        }  # fmt: skip


def _op_tables(line: Timeline, problem: Problem) -> Iterator[dict[str, Any]]:
    """What each op costs, the most seconds first; and of those that run again, what that takes."""
    ops = costs_of(problem).rows
    stages, moments = stages_of(line), line.moments
    executions: list[list[int]] = [[] for _ in ops]
    for moment in line.moments:
        executions[moment.op].append(moment.index)
    again = [op for op in ops if len(executions[op.op]) > 1]
    if again:
        times = {op.op: len(executions[op.op]) - 1 for op in again}
        again.sort(key=lambda op: -times[op.op] * op.seconds)
        before = {op.op: [stages[i] for i in executions[op.op][1:]] for op in again}
        yield {
            "id": "table-again",
            "title": f"What is run again ({len(again)} ops)",
            "heads": [
                ("op", False), ("computes", False), ("times more", True), ("costs", True), ("makes", True),
                ("before", False), ("where", False),
            ],
            "rows": [
                (
                    op.name, op.target, (str(times[op.op]), times[op.op]), _seconds(times[op.op] * op.seconds),
                    _bytes(op.output_bytes), (", ".join(ops[t].name for t in before[op.op]), before[op.op][0]),
                    op.where,
                )
                for op in again
            ],
            "go": [executions[op.op][1] for op in again],
        }  # fmt: skip
    over = [next((moments[i].over for i in executions[op.op] if moments[i].over), "") for op in ops]
    in_place = any(over)
    spent = [len(executions[op.op]) * op.seconds for op in ops]
    by_cost = sorted(ops, key=lambda op: -spent[op.op])
    yield {
        "id": "table-ops",
        "title": f"Ops by cost ({len(ops)})",
        "heads": [
            ("op", False), ("computes", False), ("of the", False), ("runs", True), ("each", True), ("in all", True),
            ("share", True), ("makes", True), *([("written over", False)] if in_place else []), ("workspace", True),
            ("where", False),
        ],
        "rows": [
            (
                op.name, op.target, op.phase, (str(len(executions[op.op])), len(executions[op.op])),
                _seconds(op.seconds), _seconds(spent[op.op]),
                (f"{spent[op.op] / line.seconds:.2%}" if line.seconds else "", spent[op.op]),
                _bytes(op.output_bytes), *([over[op.op]] if in_place else []), _bytes(op.workspace_bytes), op.where,
            )
            for op in by_cost
        ],
        "go": [executions[op.op][0] for op in by_cost],
    }  # fmt: skip


def _crossings_table(line: Timeline) -> dict[str, Any]:
    return {
        "id": "table-transfers",
        "title": f"Transfers ({len(line.crossings)})",
        "heads": [
            ("value", False), ("direction", False), ("bytes", True), ("asked for after", False), ("begins", True),
            ("takes", True), ("waited for", True),
        ],
        "rows": [
            (
                c.name, "fetched" if c.back else "sent", _bytes(c.bytes), line.moments[c.after].name,
                _seconds(c.begin), _seconds(c.end - c.begin), _seconds(c.waited),
            )
            for c in line.crossings
        ],
        "go": [c.after for c in line.crossings],
    }  # fmt: skip


def _bytes(count: int, plus: str = "") -> Cell:
    return f"{plus if count > 0 else ''}{format_bytes(count)}", count


def _seconds(seconds: float | None, plus: str = "", before: str = "") -> Cell:
    if seconds is None or not math.isfinite(seconds):
        return NONE
    return f"{before}{plus if seconds > 0 else ''}{format_seconds(seconds)}", seconds


def _frontier_table(rows: list[Row]) -> dict[str, Any]:
    return {
        "id": "table-frontier",
        "title": f"Budgets and methods ({len(rows)})",
        "heads": [
            ("method", False), ("budget", True), ("peak", True), ("step", True), ("recomputed", True),
            ("bound", True), ("gap", True), ("solved in", True), ("status", False), ("what happened", False),
        ],
        "rows": [
            (
                row.method, _bytes(row.budget), NONE if row.peak is None else _bytes(row.peak), _seconds(row.cost),
                NONE if row.peak is None else (f"{row.overhead:.2%}", row.overhead), _seconds(row.bound),
                NONE if row.peak is None else (f"{row.gap:.2%}", row.gap), _seconds(row.seconds),
                row.status.label, row.message,
            )
            for row in rows
        ],
    }  # fmt: skip
