"""What the page of `checkmate.webpage.page` draws, as plain data: columns of numbers, and each repeated text once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.core.solution import Solution
from checkmate.inspection.timeline import ROLES, Timeline
from checkmate.plot.draw_frontier import by_method, proven_seconds
from checkmate.plot.style import ROLE_STYLES
from checkmate.units import format_bytes, format_seconds
from checkmate.webpage.words import ABOUT_ROLES

if TYPE_CHECKING:
    from checkmate.inspection.peak import PeakExplanation
    from checkmate.solvers.frontier import Row

Cell = str | tuple[str, float | None]  # text, or text and what it sorts by; None stands last
NONE = ("-", None)


def page_data(solution: Solution, line: Timeline, peak: PeakExplanation, rows: list[Row] | None) -> dict[str, Any]:
    """What the page's script draws: columns of numbers, and each repeated text once."""
    problem, graph = solution.problem, solution.problem.graph
    assert solution.schedule is not None
    targets = list(dict.fromkeys(op.target for op in graph.ops))
    place_of = {m.op: (m.place.module, m.place.kind, m.place.line, m.where) for m in line.moments}
    places = list(dict.fromkeys(place_of[k] for k in range(len(graph.ops))))
    target_at, place_at = ({text: i for i, text in enumerate(texts)} for texts in (targets, places))
    return {
        "budget": solution.budget,
        "cost": solution.cost,
        "forward": graph.forward_length,
        "peak": {"bytes": line.peak, "moment": line.peak_moment.index},
        "resident": line.resident,
        "roles": [
            {"name": role, "fill": fill, "hatch": hatch, "about": ABOUT_ROLES[role]}
            for role, (fill, hatch) in ((role, ROLE_STYLES[role]) for role in ROLES)
        ],
        "targets": targets,
        "places": places,  # module, class, line, and all in words
        "pinned": {k: op.pinned for k, op in enumerate(graph.ops) if op.pinned},
        "ops": {
            "name": [op.name for op in graph.ops],
            "target": [target_at[op.target] for op in graph.ops],
            "place": [place_at[place_of[k]] for k in range(len(graph.ops))],
            "seconds": problem.seconds.tolist(),
            "workspace": problem.workspace.tolist(),
        },
        "values": {
            "name": [value.name for value in graph.values],
            "bytes": problem.sizes.tolist(),
            "producer": [value.producer for value in graph.values],
        },
        "moments": {
            "op": [moment.op for moment in line.moments],
            "bytes": line.bytes.tolist(),
            "boundary": line.boundary,
        },
        # value, role, copies before, first and last moment, moments that read it
        "spans": [[s.value, ROLES.index(s.role), s.copy, s.first, s.last, s.uses] for s in line.spans],
        "kept": _intervals(solution.schedule.S),
        "frontier": None if rows is None else _frontier_data(rows),
        "tables": [*_peak_tables(line, peak), *([] if rows is None else [_frontier_table(rows)])],
    }


def _intervals(S: np.ndarray) -> list[list[int]]:
    """S column by column: [value, first stage, last stage] of each time at hand."""
    edges = np.diff(np.pad(S.T.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (values, first), (_, end) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    return np.stack([values, first, end - 1], axis=1).tolist()


def _peak_tables(line: Timeline, peak: PeakExplanation) -> Iterator[dict[str, Any]]:
    made = {span.value: span.first for span in line.alive(peak.moment.index)}
    yield {
        "id": "table-peak",
        "title": f"Values at the peak ({len(peak)})",
        "heads": [
            ("value", False), ("bytes", True), ("role", False), ("needed next by", False), ("in", True),
            ("dropping costs", True), ("where", False),
        ],
        "rows": [
            (
                row.name, _bytes(row.bytes), row.role, row.next_op, _seconds(row.next_in),
                _seconds(row.drop_seconds) if row.drop_seconds is not None else (row.why_not, None), row.where,
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
                ("any plan, proven", True), ("status", False),
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


def _frontier_data(rows: list[Row]) -> dict[str, Any]:
    """Points by method, and for each budget what is proven of it and all smaller ones; None: that no plan fits."""
    shade = [(budget, bound if math.isfinite(bound) else None) for budget, bound in proven_seconds(rows).items()]
    methods = [asdict(line) for line in by_method(rows)]
    return {"base": rows[0].solution.problem.keep_all_cost, "methods": methods, "shade": shade}
