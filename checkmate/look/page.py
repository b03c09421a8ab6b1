"""A plan as one HTML page: four figures, interactive pictures, sortable tables. It needs no network.

The page is the Jinja2 template ``webpage/page.html``: its sentences are made here first, then what its script draws,
`page_data`: a document in JSON of columns of numbers, tables, and each repeated text once. What comes from the user's
model (names of ops, module paths) is in the page as escaped text, or as JSON in a script element that does not run; the
page's own script writes it as text only, and a content security policy lets no other script run, whatever a name says.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata, resources
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from checkmate.core.answer import Column
from checkmate.core.files import write_bytes
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status, format_gap, require_plan
from checkmate.look.addresses import Addresses, addresses
from checkmate.look.costs import COLUMNS, costs_of
from checkmate.look.difference import same_problem
from checkmate.look.drawings import LANES, ROLE_LOOKS, by_method, proven_area
from checkmate.look.peak import PRICES, PeakExplanation, explain_peak, nth
from checkmate.look.timeline import Timeline, timeline
from checkmate.solvers.frontier import FIGURES, Row
from checkmate.units import format_bytes, format_seconds
from checkmate.version import __version__

ALWAYS = "there all the time"  # about a role whose name says the rest
SCRIPTS = (  # in order
    "vendor/uPlot.iife.min.js",
    *("base.js", "tables.js", "chart.js", "links.js", "memory.js", "schedule.js", "addresses.js", "frontier.js"),
)


def report(
    solution: Solution,
    path: str | os.PathLike[str] = "plan.html",
    *,
    frontier: Iterable[Row] | None = None,
    prices: bool = False,
) -> Path:
    """Write a plan as one HTML page that needs no network, and give its path.

    It opens on the answer, in four figures; then come the memory over the step, the schedule, the addresses, the tables
    of what is in memory at the peak, of ops by cost and of what is run again, and the facts of plan and problem. A file
    that is there is replaced, at once.

    Args:
        path: of the page.
        frontier: rows of `checkmate.frontier` for the same problem, to be shown too.
        prices: whether to say, too, what less or more memory would change, as `checkmate.explain_peak`: two solves.

    Raises:
        TypeError: if the solution is none.
        ValueError: if the solution has no plan, or the rows are none or of another problem.
        OSError: if the page cannot be written, for example because its folder is missing.

    >>> import tempfile
    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[10, 20, 20, 5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(solve(chain, 50), Path(folder) / "plan.html")
    ...     page.name, page.read_text(encoding="utf-8")[:15]
    ('plan.html', '<!doctype html>')
    """
    if isinstance(path, Solution):
        raise TypeError("The Solution comes first: checkmate.report(solution, path).")
    plan, _ = require_plan(solution, "report on")
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file in it, such as {path / 'plan.html'}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} for the report {path.name} is missing. Make it, then again.")
    rows = None if frontier is None else list(frontier)
    if rows is not None and not rows:
        raise ValueError("There are no rows of a frontier to show; leave frontier=None for a report without one.")
    for problem in (row.solution.problem for row in rows or ()):
        if not same_problem(problem, solution.problem):
            raise ValueError(f"The frontier is of another problem: {problem!r}, not {solution.problem!r}.")
    line = timeline(plan, solution.problem)
    peak = explain_peak(solution, prices=prices)
    placed = addresses(solution)
    style = _part("vendor/uPlot.min.css") + _part("page.css")
    script = f"/*{_part('vendor/uPlot.LICENSE')}*/\n" + "".join(map(_part, SCRIPTS))
    words = {
        "title": title_of(solution),
        "version": __version__,
        "lead": f"{solution.title[0].upper()}{solution.title[1:]}.",
        "answer": list(tiles(solution)),
        "figures": solution.facts,
        "memory_text": memory_text(solution, line),
        "links_text": links_text(solution, line),
        "schedule_text": schedule_text(solution),
        "addresses_text": addresses_text(placed),
        "frontier_text": "" if rows is None else frontier_text(rows),
        "facts": list(facts_of(solution.problem)),
        "data": page_data(solution, line, peak, placed, rows),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    # A long name may end a line after its underscores, as in the page's script.
    environment.filters["breakable"] = lambda text: Markup(re.sub(r"(?<=\w_)(?=[^_])", "<wbr>", escape(text)))
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    page = environment.from_string(_part("page.html")).render(
        _visible(words), style=Markup(style), style_hash=_hash(style), script=Markup(script), script_hash=_hash(script)
    )
    write_bytes(path, page.encode())
    return path


def _part(name: str) -> str:
    return (resources.files("checkmate.look") / "webpage" / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(text: str) -> str:
    """The hash by which a content security policy allows a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _visible(document: Any) -> Any:
    r"""Escape invisible characters in texts, and characters that change the direction of text.

    >>> _visible({"name": "a\u202eb\n"})
    {'name': 'a\\u202eb\\n'}
    """
    if isinstance(document, str):
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in document)
    if isinstance(document, dict):
        return {key: _visible(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [_visible(part) for part in document]
    return document


def title_of(solution: Solution) -> str:
    """The title of the page: the step, its budget, and the source of its costs."""
    problem = solution.problem
    source = re.split("[,;]", problem.profile.source)[0]
    costs = "" if source == "given" else f", {source}"
    return f"checkmate: {problem.name or 'a step'} within {format_bytes(solution.budget)}{costs}"


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def tiles(solution: Solution) -> Iterator[tuple[str, str, str]]:
    """The first figures of the page, for readers who know neither solver nor schedule: name, figure and meaning."""
    assert solution.schedule is not None
    problem, peak = solution.problem, solution.peak or 0
    all_of_it, ops = format_bytes(problem.keep_all_peak), len(problem.graph.ops)
    share = f"{peak / problem.keep_all_peak:.1%} of {all_of_it}" if problem.keep_all_peak else all_of_it
    yield "Peak memory", format_bytes(peak), f"{share}, which plain PyTorch takes: it keeps everything"
    yield "Budget", format_bytes(solution.budget), f"{format_bytes(solution.budget - peak)} of it left at the peak"
    again = f"{int((solution.schedule.recomputed > 0).sum()):,} of {_counted(ops, 'op')} run again"
    steps = f"{format_seconds(solution.cost)} a step, {format_seconds(problem.keep_all_cost)} with each op once"
    only = solution.spent_on == "recomputation"
    why = again if only else f"{again}; {solution.spent_on}"
    if guessed := len(problem.profile.estimated):
        steps = f"estimated{'' if guessed == ops else f' for {guessed:,} of the ops'}, {steps}"
    yield "Recomputation" if only else "Time added", f"{solution.overhead:+.2%}", f"{steps}: {why}"
    proof = "of the step is the most that a better schedule could save: proven"
    best = "proven: no schedule within the budget takes less time"
    yield "Gap", format_gap(solution.gap), best if solution.status is Status.OPTIMAL else proof


def facts_of(problem: Problem) -> Iterator[tuple[str, str]]:
    """The facts of a problem, beside `Solution.facts`: name and text."""
    graph, forward = problem.graph, problem.graph.forward_length
    yield "ops", f"{len(graph.ops):,}: {forward:,} in the forward, {len(graph.ops) - forward:,} in the backward"
    yield "there all the time", format_bytes(problem.resident)
    for rule in problem.rules:
        cannot = f"; {_counted(len(rule.exempt), 'op')} cannot obey it" if rule.exempt else ""
        yield "rule", f"{rule.text}, for {_counted(len(rule.ops), 'op')}{cannot}"
    yield "ops that must run once", f"{sum(op.pinned is not None for op in graph.ops):,}"
    yield "keeping everything", f"{format_bytes(problem.keep_all_peak)}, {format_seconds(problem.keep_all_cost)}"
    yield "no budget can be below", f"{format_bytes(int(problem.unavoidable_bytes.max()))}"
    if problem.host is not None:
        yield "second memory", str(problem.host)
    yield "profile", problem.profile.source
    versions = [f"checkmate {__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "highspy"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    yield "written with", ", ".join(versions)


def memory_text(solution: Solution, line: Timeline) -> str:
    """Describe the picture of the memory for those who cannot see it."""
    moment, after, written = line.peak_moment, len(line.moments) - line.boundary, solution.runs_over
    where = f" ({moment.where})" if moment.where else ""
    over = f", written over {moment.over}" if moment.over else ""
    halves = f" The forward runs {_counted(line.boundary, 'op')}, the backward {after:,}." if after else ""
    held = format_bytes(line.moments[line.boundary - 1].bytes)
    between = f" When the forward ends, {held} are at hand." if 0 < line.boundary < len(line.moments) else ""
    in_place = f" What goes with a run may be written over by it: {_counted(written, 'run')} do so." if written else ""
    return (
        f"Bytes at hand while each op runs, from {format_bytes(int(line.bytes[0]))} at the first op to "
        f"{format_bytes(int(line.bytes[-1]))} at the last. The peak of {format_bytes(line.peak)} is at {moment.name}"
        f"{over}{where}, execution {moment.index + 1:,} of {len(line.moments):,}, in the {moment.phase}; the budget is "
        f"{format_bytes(solution.budget)}.{halves}{between}{in_place}"
    )


def links_text(solution: Solution, line: Timeline) -> str:
    """Describe the strips below the memory; empty if the plan uses no link."""
    if not line.lanes:
        return ""
    counts, words = {name: len(uses) for name, uses in line.lanes.items()}, list[str]()
    if line.crossings:
        sent, back = counts.pop("sent"), counts.pop("fetched")
        words = [f"{_counted(sent, 'value')} sent to the second memory and {back:,} fetched"]
    words += [f"{_counted(count, 'op')} on the link {name}" for name, count in counts.items()]
    waited = any(use.waited for uses in line.lanes.values() for use in uses)
    waits = ", framed where the step waits for one" if waited else "; it waits for none"
    away = solution.second_memory
    note = f" Below these are the bytes in the second memory, at most {format_bytes(away.peak)}." if away else ""
    return f"Below the memory is what links carry while the step runs, as bars{waits}: {', '.join(words)}.{note}"


def schedule_text(solution: Solution) -> str:
    """Describe the picture of the schedule."""
    assert solution.schedule is not None
    again = solution.schedule.recomputed
    dearest = np.argsort(-again * solution.problem.seconds, kind="stable")[:3]
    names = [solution.problem.graph.ops[k].name for k in dearest if again[k]]
    most = f" What takes most time of these: {', '.join(names)}." if names else ""
    ops, times = int((again > 0).sum()), int(again.sum())
    return (
        f"A row for each stage, which ends with the first execution of its op; a column for each op. "
        f"{ops:,} of {len(again):,} ops run again, {_counted(times, 'time')} in all.{most}"
    )


def addresses_text(placed: Addresses) -> str:
    """Describe the picture of the addresses."""
    alive = format_bytes(placed.bound)
    places = "" if not any(box.over for box in placed.boxes) else " What is written over a value takes over its place."
    low = "no arena is lower" if placed.gap == 0 else f"at most {format_gap(placed.gap, True)} of it could be saved"
    return (
        f"Each copy of a value that the step makes, and the workspace of each op, has a place in one arena of "
        f"{format_bytes(placed.height)}, for as long as it is needed. At most {alive} are alive at one moment: {low}."
        f"{places} What is there all the time lies outside."
    )


def frontier_text(rows: list[Row]) -> str:
    """Describe the picture of cost against peak."""
    plans = [row for row in rows if row.peak is not None]
    text = f"{_counted(len(plans), 'plan')} for {_counted(len({row.budget for row in rows}), 'budget')}. "
    if len(plans) == 1:
        text += f"It takes {format_seconds(plans[0].cost)} at a peak of {format_bytes(plans[0].peak or 0)}. "
    elif plans:
        low, high = (f(plans, key=lambda row: (row.cost, row.peak or 0)) for f in (min, max))
        ends = (f"{format_seconds(r.cost)} at a peak of {format_bytes(r.peak or 0)}" for r in (low, high))
        text += f"The fastest takes {next(ends)}, the slowest {next(ends)}. "
    return text + "No schedule is in the hatched part: that is proven."


def page_data(
    solution: Solution, line: Timeline, peak: PeakExplanation, placed: Addresses, rows: list[Row] | None
) -> dict[str, Any]:
    """The document that is embedded in the page; its script only shows it."""
    problem, graph = solution.problem, solution.problem.graph
    assert solution.schedule is not None
    texts, places, top = _Texts(), [op.place for op in graph.ops], line.peak_moment
    modules = [f"{p.module} ({p.kind})" if p.module and p.kind else p.module or p.kind for p in places]
    roles = line.by_role()
    first = np.array([moment.time == 0 for moment in line.moments])
    names, stages = list(roles), (first.cumsum() - first).tolist()  # stage t ends with the first execution of op t
    sizes, workspace = problem.sizes.tolist(), [moment.workspace for moment in line.moments]
    spans = sorted(line.spans, key=lambda span: -span.bytes)
    lives = [(span.born, span.died) for span in spans]
    edges = np.diff(np.pad(solution.schedule.S.T.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (kept, begins), (_, ends) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    host = {"levels": line.levels, "most": max(line.host_bytes), "bytes": line.host_bytes}
    shown = {*sizes, *workspace, *line.host_bytes, *line.bytes.tolist()}
    shown.update(size for row in roles.values() for size in row.tolist())
    return {
        "budget": {"bytes": solution.budget, "label": f"budget {format_bytes(solution.budget)}"},
        "peak": {"bytes": line.peak, "moment": top.index, "label": f"peak {format_bytes(line.peak)} at {top.name}"},
        "forward": graph.forward_length,
        "written": {size: format_bytes(size) for size in sorted(shown)},
        "roles": [  # in the order in which areas lie upon each other
            {"name": role, "fill": fill, "hatch": hatch, "about": words or ALWAYS, "bytes": roles[role].tolist()}
            for role, (fill, hatch, words) in ROLE_LOOKS.items()
            if role in roles
        ],
        "pinned": {k: op.pinned for k, op in enumerate(graph.ops) if op.pinned},
        "ops": {
            "name": [texts[op.name] for op in graph.ops],
            "target": [texts[op.target] for op in graph.ops],
            "module": [texts[module] for module in modules],
            "line": [texts[place.line] for place in places],
            "where": [texts[op.where or ""] for op in graph.ops],
            "takes": [format_seconds(seconds) for seconds in problem.seconds],
        },
        "values": {
            "name": [texts[value.name] for value in graph.values],
            "bytes": sizes,
            "producer": [graph.first_op(v) if v in problem.homes else o.producer for v, o in enumerate(graph.values)],
        },
        "moments": {
            "op": [moment.op for moment in line.moments],
            "stage": stages,
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
            [span.value, texts[span.role], span.copy, int(begin), int(end) - 1, span.uses, texts[span.over]]
            for span, (begin, end) in zip(spans, np.searchsorted(line.ticks, lives), strict=True)
        ],
        "links": {  # the traffic of each link, the waits for it, and the bytes in a second memory if it is used
            "lanes": [
                {
                    "name": name,
                    "fill": fill,
                    "hatch": hatch,
                    "bars": [(use.begin, use.end) for use in uses],
                    "waits": [use.stall for use in uses if use.waited],
                }
                for (name, uses), (fill, hatch) in zip(line.lanes.items(), cycle(LANES))
            ],
            "memory": host if line.crossings else None,
            "waits": [format_seconds(m.waited) if m.waited else "" for m in line.moments],
        }
        if line.lanes
        else None,
        # S column by column: value, first stage and last stage of each interval
        "kept": np.stack([kept, begins, ends - 1], axis=1).tolist(),
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
            {
                "id": f"table-{name}",
                "title": title,
                "heads": [(column.head, column.show is not None) for column in columns],
                "rows": [[_cell(texts, column, row) for column in columns] for row in entries],
                "go": go,
            }
            for name, title, columns, entries, go in _tables(line, problem, peak, rows, stages)
        ],
        "texts": list(texts),  # at last, when all are known: names and the cells of tables are indices of these
    }


class _Texts(dict[str, int]):
    """The index of each text in the list of all."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _cell(texts: _Texts, column: Column, row: Any) -> int | tuple[int, float | None]:
    """The index of a cell's text, with the number that it sorts by unless it sorts by its text."""
    text = texts[column.text(row)]
    return text if column.show is None and column.sort is None else (text, column.key(row))


PageTable = tuple[str, str, Sequence[Column], Sequence[Any], Sequence[int | None] | None]  # at last, moments to go to


def _tables(
    line: Timeline, problem: Problem, peak: PeakExplanation, rows: list[Row] | None, stages: list[int]
) -> Iterator[PageTable]:
    """The tables in order: name, title, columns, rows. Optional tables appear if they have rows."""
    columns: Sequence[Column] = peak.columns
    at_peak = [span.first for span in line.alive(peak.moment.index)]
    yield "peak", f"Values at the peak ({len(peak)})", columns, peak.held, at_peak
    # The ops that run again, with the price of that.
    ops, runs = costs_of(problem).rows, [list[int]() for _ in problem.graph.ops]  # indices of the moments of each op
    for moment in line.moments:
        runs[moment.op].append(moment.index)
    more, spent = [len(ms) - 1 for ms in runs], [len(ms) * op.seconds for ms, op in zip(runs, ops, strict=True)]
    before = [", ".join(ops[stages[i]].name for i in ms[1:]) for ms in runs]
    names = Column("op", "name"), Column("computes", "target")
    _, seconds, share, makes, workspace, lifetime, phase, _, where = COLUMNS
    if dear := sorted((op for op in ops if more[op.op]), key=lambda op: -more[op.op] * op.seconds):
        columns = (
            *names,
            Column("times more", lambda op: more[op.op], str),
            Column("costs", lambda op: more[op.op] * op.seconds, format_seconds),
            makes,
            Column("before", lambda op: before[op.op], sort=lambda op: stages[runs[op.op][1]]),
            where,
        )
        yield "again", f"What is run again ({len(dear)} ops)", columns, dear, [runs[op.op][1] for op in dear]
    if peak.prices:
        yield "prices", "What less or more memory would change", PRICES, peak.prices, None
    when = (
        Column("asked for after", lambda use: line.moments[use.after].name),
        Column("begins", "begin", format_seconds),
        Column("takes", lambda use: use.end - use.begin, format_seconds),
        Column("waited for", "waited", format_seconds),
    )
    if moved := line.crossings:
        columns = Column("value", "name"), Column("direction", "lane"), Column("bytes", "bytes", format_bytes), *when
        yield "transfers", f"Transfers ({len(moved)})", columns, moved, [use.after for use in moved]
    if carried := line.carried:
        columns = Column("op", "name"), Column("link", "lane"), *when
        yield "carried", f"Ops on links ({len(carried)})", columns, carried, [use.run for use in carried]
    # The costs of all ops, the most seconds first.
    over = [next((line.moments[i].over for i in ms if line.moments[i].over), "") for ms in runs]
    by_cost = sorted(ops, key=lambda op: -spent[op.op])
    columns = (
        *names,
        Column("runs", lambda op: len(runs[op.op]), str),
        Column("in all", lambda op: spent[op.op], format_seconds),
        *(seconds, share, makes, workspace, lifetime, phase),
        *[Column("written over", lambda op: over[op.op])] * any(over),
        where,
    )
    yield "ops", f"Ops by cost ({len(ops)})", columns, by_cost, [runs[op.op][0] for op in by_cost]
    if rows is not None:
        columns = *FIGURES, Column("status", lambda row: row.status.label), Column("what happened", "message")
        yield "frontier", f"Budgets and methods ({len(rows)})", columns, rows, None


def _frontier_data(solution: Solution, rows: list[Row]) -> dict[str, Any]:
    """Points by method, the area proven empty, and the seconds of the picture."""

    def point(name: str, peak: int, cost: float) -> tuple[int, float, str]:
        return peak, cost, f"{name}: peak {format_bytes(peak)}, step {format_seconds(cost)}"

    methods, mark = by_method(rows), (solution.peak or 0, solution.cost)
    proven, low, high = proven_area(rows, [mark, *(at for line in methods for at in line.points)])
    lines = [{"label": line.label, "points": [point(line.name, *at) for at in line.points]} for line in methods]
    return {"this": point("this plan", *mark), "methods": lines, "proven": proven, "range": (low, high)}
