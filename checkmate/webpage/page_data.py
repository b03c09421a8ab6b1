"""The data for the page's script, which becomes JSON: columns of numbers, and each repeated text once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.core.graph import CodePlace
from checkmate.core.solution import Solution
from checkmate.inspection.addresses import Addresses
from checkmate.inspection.peak import PeakExplanation, nth
from checkmate.inspection.timeline import Span, Timeline
from checkmate.plot.draw_frontier import by_method, proven_area
from checkmate.plot.style import ROLE_STYLES, lane_styles
from checkmate.units import format_bytes, format_seconds
from checkmate.webpage.captions import ABOUT_ROLES
from checkmate.webpage.page_tables import Cell, page_tables, stages_of

if TYPE_CHECKING:
    from checkmate.solvers.frontier import Row


def page_data(
    solution: Solution, line: Timeline, peak: PeakExplanation, placed: Addresses, rows: list[Row] | None
) -> dict[str, Any]:
    """The document that is embedded in the page; the script computes nothing of it again."""
    problem, graph = solution.problem, solution.problem.graph
    assert solution.schedule is not None
    texts = _Texts()
    roles = line.by_role()
    names = list(roles)
    sizes, workspace = problem.sizes.tolist(), [moment.workspace for moment in line.moments]
    shown = {*sizes, *workspace, *line.there, *line.bytes.tolist()}
    shown.update(size for row in roles.values() for size in row.tolist())
    return {
        "budget": {"bytes": solution.budget, "label": f"budget {format_bytes(solution.budget)}"},
        "peak": {
            "bytes": line.peak,
            "moment": line.peak_moment.index,
            "label": f"peak {format_bytes(line.peak)} at {line.peak_moment.name}",
        },
        "forward": graph.forward_length,
        "written": {size: format_bytes(size) for size in sorted(shown)},
        "roles": [  # in the order in which areas lie upon each other
            {"name": role, "fill": fill, "hatch": hatch, "about": ABOUT_ROLES[role], "bytes": row.tolist()}
            for role, row, (fill, hatch) in ((role, row, ROLE_STYLES[role]) for role, row in roles.items())
        ],
        "pinned": {k: op.pinned for k, op in enumerate(graph.ops) if op.pinned},
        "ops": {
            "name": [texts[op.name] for op in graph.ops],
            "target": [texts[op.target] for op in graph.ops],
            "module": [texts[_module(op.place)] for op in graph.ops],
            "line": [texts[op.place.line] for op in graph.ops],
            "where": [texts[op.where or ""] for op in graph.ops],
            "takes": [format_seconds(seconds) for seconds in problem.seconds],
        },
        "values": {
            "name": [texts[value.name] for value in graph.values],
            "bytes": sizes,
            "producer": [value.producer for value in graph.values],
        },
        "moments": {
            "op": [moment.op for moment in line.moments],
            "stage": stages_of(line),
            "nth": [nth(moment.time + 1) if moment.time else "" for moment in line.moments],
            "begin": line.begins,
            "begins": [format_seconds(moment.begin) for moment in line.moments],
            "bytes": line.bytes.tolist(),
            "workspace": workspace,
            "over": [texts[moment.over] for moment in line.moments],
            "boundary": line.boundary,
        },
        # the most bytes first: value, role, copies before, first and last moment, moments that read it, what it is over
        "spans": [
            [span.value, texts[span.role], span.copy, *_seen(line, span), span.uses, texts[span.over]]
            for span in sorted(line.spans, key=lambda span: -span.bytes)
        ],
        "links": _links(line) if line.lanes else None,
        "kept": _intervals(solution.schedule.S),
        "arena": {
            "height": placed.height,
            "boxes": [
                [names.index(box.role), box.first, box.last, box.offset, box.bytes, texts[box.name], texts[box.over]]
                for box in placed.boxes
                if box.bytes
            ],
        },
        "frontier": None if rows is None else _frontier_data(solution, rows),
        "tables": [
            {**table, "rows": [texts.cells(row) for row in table["rows"]]}
            for table in page_tables(line, problem, peak, rows)
        ],
        "texts": list(texts),  # at last, when all are known: names and the cells of tables are indices of these
    }


class _Texts(dict[str, int]):
    """The index of each text in the list of all."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]

    def cells(self, row: Sequence[Cell]) -> list[Any]:
        return [self[cell] if isinstance(cell, str) else (self[cell[0]], cell[1]) for cell in row]


def _seen(line: Timeline, span: Span) -> tuple[int, int]:
    """The first and the last moment at which a copy is alive."""
    first, end = np.searchsorted(line.ticks, (span.born, span.died)).tolist()
    return first, end - 1


def _links(line: Timeline) -> dict[str, Any]:
    """The traffic of each link, the waits for it, and the bytes in a second memory if anything crosses to it."""
    there = {"levels": line.levels, "most": max(line.there), "bytes": line.there}
    return {
        "lanes": [
            {
                "name": name,
                "fill": fill,
                "hatch": hatch,
                "bars": [(use.begin, use.end) for use in uses],
                "waits": [use.stall for use in uses if use.waited],
            }
            for (name, uses), (fill, hatch) in zip(line.lanes.items(), lane_styles(len(line.lanes)), strict=True)
        ],
        "memory": there if line.crossings else None,
        "waits": [format_seconds(m.waited) if m.waited else "" for m in line.moments],
    }


def _module(place: CodePlace) -> str:
    return f"{place.module} ({place.kind})" if place.module and place.kind else place.module or place.kind


def _intervals(S: np.ndarray) -> list[list[int]]:
    """S column by column: [value, first stage, last stage] of each interval."""
    edges = np.diff(np.pad(S.T.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (values, first), (_, end) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    return np.stack([values, first, end - 1], axis=1).tolist()


def _frontier_data(solution: Solution, rows: list[Row]) -> dict[str, Any]:
    """Points by method, where no schedule can be, and the seconds of the picture."""

    def point(name: str, peak: int, cost: float) -> tuple[int, float, str]:
        return peak, cost, f"{name}: peak {format_bytes(peak)}, step {format_seconds(cost)}"

    methods = by_method(rows)
    this = solution.peak or 0, solution.cost
    proven, low, high = proven_area(rows, [this, *(at for line in methods for at in line.points)])
    return {
        "this": point("this plan", *this),
        "methods": [{"label": line.label, "points": [point(line.name, *at) for at in line.points]} for line in methods],
        "proven": proven,
        "range": (low, high),
    }
