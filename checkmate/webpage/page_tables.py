"""The tables of the page, each with its heads, its rows as text, and the numbers that they sort by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.inspection.op_costs import costs_of
from checkmate.inspection.peak import PRICE_HEADS, PeakExplanation, price_cells
from checkmate.inspection.timeline import Timeline
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from checkmate.solvers.frontier import Row

Cell = str | tuple[str, float | None]  # text, or text and what it sorts by; None stands last
NONE = ("-", None)
TEXTS = {  # heads of the columns that hold no numbers
    "value", "role", "needed next by", "where", "op", "computes", "before", "of the", "written over", "direction",
    "asked for after", "link", "method", "status", "what happened",
}  # fmt: skip


def page_tables(
    line: Timeline, problem: Problem, peak: PeakExplanation, rows: list[Row] | None
) -> list[dict[str, Any]]:
    """The tables in order. ``heads``: texts, and whether numbers; ``go``: the moment that a row's name leads to."""
    again, ops = _op_tables(line, problem)
    others = [
        table for table in (again, _prices_table(peak), _crossings_table(line), _carried_table(line)) if table["rows"]
    ]
    return [_peak_table(line, peak), *others, ops, *([] if rows is None else [_frontier_table(rows)])]


def _table(
    name: str, title: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], go: list[int] | None = None
) -> dict[str, Any]:
    leads = {} if go is None else {"go": go}
    heads_of = [(head, head not in TEXTS) for head in heads]
    return {"id": f"table-{name}", "title": title, "heads": heads_of, "rows": rows, **leads}


def stages_of(line: Timeline) -> list[int]:
    """(N,) the stage of each execution; stage t ends with the first execution of op t."""
    first = np.array([moment.time == 0 for moment in line.moments])
    return (first.cumsum() - first).tolist()


def _peak_table(line: Timeline, peak: PeakExplanation) -> dict[str, Any]:
    made = {span.value: span.first for span in line.alive(peak.moment.index)}
    sends = peak.there is not None
    heads = "value", "bytes", "role", "needed next by", "in", "dropping costs", *["sending costs"] * sends, "where"
    rows = [
        (
            row.name, _bytes(row.bytes), row.role, row.next_op, _seconds(row.next_in),
            _seconds(row.drop_seconds) if row.drop_seconds is not None else (row.why_not, None),
            *[_seconds(row.send_seconds)] * sends, row.where,
        )
        for row in peak
    ]  # fmt: skip
    return _table("peak", f"Values at the peak ({len(peak)})", heads, rows, [made[row.value] for row in peak])


def _prices_table(peak: PeakExplanation) -> dict[str, Any]:
    rows: list[list[Cell]] = []
    for price in peak.prices:
        *texts, status = price_cells(price)
        numbers = price.change_bytes, price.budget, price.cost, price.found_change, price.proven_change
        sorts_by = (number if math.isfinite(number) else None for number in numbers)
        rows.append([*zip(texts, sorts_by, strict=True), status])
    return _table("prices", "What less or more memory would change", PRICE_HEADS, rows)


def _op_tables(line: Timeline, problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two tables: ops that run again, with the price of that; and the costs of all ops, the most seconds first."""
    ops, stages, moments = costs_of(problem).rows, stages_of(line), line.moments
    executions: list[list[int]] = [[] for _ in ops]
    for moment in moments:
        executions[moment.op].append(moment.index)
    times = [len(indices) for indices in executions]
    again = sorted((op for op in ops if times[op.op] > 1), key=lambda op: -(times[op.op] - 1) * op.seconds)
    before = {op.op: [stages[i] for i in executions[op.op][1:]] for op in again}
    rows: list[Sequence[Cell]] = [
        (
            op.name, op.target, (str(times[op.op] - 1), times[op.op] - 1), _seconds((times[op.op] - 1) * op.seconds),
            _bytes(op.output_bytes), (", ".join(ops[t].name for t in before[op.op]), before[op.op][0]), op.where,
        )
        for op in again
    ]  # fmt: skip
    heads = "op", "computes", "times more", "costs", "makes", "before", "where"
    go = [executions[op.op][1] for op in again]
    first = _table("again", f"What is run again ({len(again)} ops)", heads, rows, go)
    over = [next((moments[i].over for i in indices if moments[i].over), "") for indices in executions]
    in_place = any(over)
    by_cost = sorted(ops, key=lambda op: -times[op.op] * op.seconds)
    heads_of_all = (
        "op", "computes", "of the", "runs", "each", "in all", "share", "makes", *["written over"] * in_place,
        "workspace", "where",
    )  # fmt: skip
    rows = []
    for op in by_cost:
        spent = times[op.op] * op.seconds
        share = f"{spent / line.seconds:.2%}" if line.seconds else ""
        told = op.name, op.target, op.phase, (str(times[op.op]), times[op.op]), _seconds(op.seconds), _seconds(spent)
        makes = (share, spent), _bytes(op.output_bytes), *[over[op.op]] * in_place, _bytes(op.workspace_bytes)
        rows.append((*told, *makes, op.where))
    go = [executions[op.op][0] for op in by_cost]
    return first, _table("ops", f"Ops by cost ({len(ops)})", heads_of_all, rows, go)


def _crossings_table(line: Timeline) -> dict[str, Any]:
    rows = [
        (
            c.name, c.lane, _bytes(c.bytes), line.moments[c.after].name,
            _seconds(c.begin), _seconds(c.end - c.begin), _seconds(c.waited),
        )
        for c in line.crossings
    ]  # fmt: skip
    heads = "value", "direction", "bytes", "asked for after", "begins", "takes", "waited for"
    return _table("transfers", f"Transfers ({len(rows)})", heads, rows, [c.after for c in line.crossings])


def _carried_table(line: Timeline) -> dict[str, Any]:
    rows = [
        (
            op.name, op.lane, line.moments[op.after].name, _seconds(op.begin), _seconds(op.end - op.begin),
            _seconds(op.waited),
        )
        for op in line.carried
    ]  # fmt: skip
    heads = "op", "link", "asked for after", "begins", "takes", "waited for"
    return _table("carried", f"Ops on links ({len(rows)})", heads, rows, [op.run for op in line.carried])


def _bytes(count: int | None) -> Cell:
    return NONE if count is None else (format_bytes(count), count)


def _seconds(seconds: float | None) -> Cell:
    return NONE if seconds is None or not math.isfinite(seconds) else (format_seconds(seconds), seconds)


def _frontier_table(rows: list[Row]) -> dict[str, Any]:
    def share(row: Row, of_step: float) -> Cell:
        return NONE if row.peak is None else (f"{of_step:.2%}", of_step)

    heads = (
        "method", "budget", "peak", "step", "recomputed", "bound", "gap", "solved in", "status", "what happened",
    )  # fmt: skip
    cells = [
        (
            row.method, _bytes(row.budget), _bytes(row.peak), _seconds(row.cost), share(row, row.overhead),
            _seconds(row.bound), share(row, row.gap), _seconds(row.seconds), row.status.label, row.message,
        )
        for row in rows
    ]  # fmt: skip
    return _table("frontier", f"Budgets and methods ({len(rows)})", heads, cells)
