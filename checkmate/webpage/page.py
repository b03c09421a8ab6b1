"""A plan as one HTML page: the summary in words, pictures to point at, tables to sort. It needs no network.

The page's parts stand beside this file. What comes from the user's model (names of ops, module paths) is in the page
as escaped text, or as JSON in a script element that does not run; the page's own script writes it as text only, and a
content security policy lets no other script run, whatever a name says.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.core.files import write_bytes
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution, Status
from checkmate.inspection.peak import PeakExplanation, explain_peak
from checkmate.inspection.timeline import Timeline, timeline
from checkmate.units import format_bytes, format_seconds
from checkmate.version import __version__
from checkmate.webpage.page_data import page_data

if TYPE_CHECKING:
    from checkmate.solvers.frontier import Row

SCRIPTS = ("base", "step", "tables", "memory", "schedule", "frontier")  # in this order


def report(
    solution: Solution,
    path: str | os.PathLike[str],
    *,
    frontier: Iterable[Row] | None = None,
    prices: bool = False,
) -> Path:
    """Write a plan as one HTML page that needs no network, and give its path.

    It has the summary, the memory over the step, the schedule, the tables of what is in memory at the peak, of ops by
    cost and of what is run again, and the problem's facts. A file that is there is replaced, at once.

    Args:
        solution: one with a plan.
        path: of the page, such as ``"plan.html"``.
        frontier: rows of `checkmate.frontier` for the same problem, to be shown too.
        prices: whether to say, too, what less or more memory would change; takes two solves, as
            `checkmate.inspection.peak.explain_peak` does.

    Raises:
        ValueError: if the solution has no plan, or the rows are none or of another problem.
        OSError: if the page cannot be written, for example because its folder is missing.

    >>> import tempfile
    >>> from checkmate import solve
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1, 2, 3, 4], sizes=[10, 20, 20, 5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(solve(chain, 50), Path(folder) / "plan.html")
    ...     page.name, page.read_text(encoding="utf-8")[:15]
    ('plan.html', '<!doctype html>')
    """
    if solution.plan is None or solution.schedule is None:
        reason = (solution.message or solution.status.meaning).rstrip(".")
        longer = "" if solution.status is Status.INFEASIBLE else ", or with a longer time_limit"
        raise ValueError(f"There is no plan to report on: {reason}. Solve again within a larger budget{longer}.")
    path = Path(path)
    _check_target(path)
    rows = None if frontier is None else _rows_of(frontier, solution.problem)
    line = timeline(solution.plan, solution.problem)
    peak = explain_peak(solution, prices=prices)
    write_bytes(path, _page(solution, line, peak, rows).encode())
    return path


def _check_target(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file in it, such as {path / 'plan.html'}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} for the report {path.name} is missing. Make it, then again.")


def _rows_of(frontier: Iterable[Row], problem: Problem) -> list[Row]:
    rows = list(frontier)
    if not rows:
        raise ValueError("There are no rows of a frontier to show; leave frontier=None for a report without one.")
    for row in rows:
        other = row.solution.problem
        if other is not problem and (
            other.graph != problem.graph or not np.array_equal(other.seconds, problem.seconds)
        ):
            raise ValueError(f"The frontier is of another problem: {other!r}, not {problem!r}.")
    return rows


def _page(solution: Solution, line: Timeline, peak: PeakExplanation, rows: list[Row] | None) -> str:
    style = _part("page.css")
    script = "".join(_part(f"{name}.js") for name in SCRIPTS)
    figures = "".join(_tile(*figure) for figure in _figures(solution))
    facts = "".join(f"<div>{_term(name, text)}</div>" for name, text in _facts(solution))
    return Template(_part("page.html")).substitute(
        title=f"checkmate: a step within {format_bytes(solution.budget)}",
        version=__version__,
        summary=_html(_summary(solution)),
        figures=figures,
        memory_text=_html(_memory_text(solution, line)),
        schedule_text=_html(_schedule_text(solution)),
        frontier_link="" if rows is None else '<li><a href="#frontier">Frontier</a></li>',
        frontier_section="" if rows is None else _frontier_section(rows),
        facts=facts,
        data=_json(_plain(page_data(solution, line, peak, rows))),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def _part(name: str) -> str:
    return (resources.files("checkmate.webpage") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(text: str) -> str:
    """By which a content security policy knows a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(document: Any) -> str:
    """JSON that can stand in a script element: no "<" that could end it, nothing but ASCII."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(document: Any) -> Any:
    r"""The same, with characters in its texts that cannot be seen, or turn the text around them, written out.

    >>> _plain({"name": "a\u202eb\n"})
    {'name': 'a\\u202eb\\n'}
    """
    if isinstance(document, str):
        return document if document.isprintable() else "".join(c if c.isprintable() else _written(c) for c in document)
    if isinstance(document, dict):
        return {key: _plain(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [_plain(part) for part in document]
    return document


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _html(text: str) -> str:
    """Escaped, with places at which a long name may end a line: after its underscores, as in the page's script."""
    return re.sub(r"(?<=\w_)(?=[^_])", "<wbr>", html.escape(_plain(text)))


def _term(name: str, *texts: str) -> str:
    return f"<dt>{_html(name)}</dt>" + "".join(f"<dd>{_html(text)}</dd>" for text in texts)


def _tile(name: str, figure: str, more: str) -> str:
    return f"<div>{_term(name, figure, *[more] * bool(more))}</div>"


# words


def _summary(solution: Solution) -> str:
    """The plan in three sentences."""
    problem, peak = solution.problem, solution.peak or 0
    share = f", {peak / problem.keep_all_peak:.1%} of what keeping everything takes" if problem.keep_all_peak else ""
    ops, budget = _counted(len(problem.graph.ops), "op"), format_bytes(solution.budget)
    return (
        f"This plan runs a step of {ops} within a budget of {budget}. "
        f"Its peak is {format_bytes(peak)}{share}. {_price_in_words(solution)} {_proof_in_words(solution)}"
    )


def _price_in_words(solution: Solution) -> str:
    assert solution.schedule is not None
    again = solution.schedule.recomputed
    if not again.any():
        return f"No op runs twice: the step takes {format_seconds(solution.cost)}."
    ops, times = int((again > 0).sum()), int(again.sum())
    once = solution.problem.keep_all_cost
    return (
        f"To stay within it, {_counted(ops, 'op')} {'run' if ops > 1 else 'runs'} again, "
        f"{_counted(times, 'time')} in all, "
        f"which adds {format_seconds(solution.cost - once)} to a step of {format_seconds(once)} "
        f"({solution.overhead:+.2%})."
    )


def _proof_in_words(solution: Solution) -> str:
    if solution.status is Status.OPTIMAL:
        return "It is optimal: proven that no plan within the budget takes less time."
    return (
        f"It is proven that every plan within the budget takes at least {format_seconds(solution.bound)}, so another "
        f"one could save at most {solution.gap:.2%} of the step."
    )


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def _figures(solution: Solution) -> Iterator[tuple[str, str, str]]:
    """Name, figure and what more there is to say."""
    problem, peak = solution.problem, solution.peak or 0
    yield "status", solution.status.label, solution.message or solution.status.meaning
    yield "budget", format_bytes(solution.budget), f"{format_bytes(solution.budget - peak)} left at the peak"
    yield "peak", format_bytes(peak), f"keeping everything: {format_bytes(problem.keep_all_peak)}"
    yield "cost: one step", format_seconds(solution.cost), f"each op once: {format_seconds(problem.keep_all_cost)}"
    yield "bound", format_seconds(solution.bound), "every plan within the budget takes so long, proven"
    yield "gap", f"{solution.gap:.2%}", "of the step could be saved at most"
    yield "overhead", f"{solution.overhead:+.2%}", "recomputation, of a step that runs each op once"
    yield "solved by", solution.method, f"in {format_seconds(solution.seconds)}"


def _facts(solution: Solution) -> Iterator[tuple[str, str]]:
    problem, graph = solution.problem, solution.problem.graph
    made = [value for value in graph.values if value.producer is not None]
    estimated = len(problem.profile.estimated)
    forward = graph.forward_length
    yield "ops", f"{len(graph.ops):,}: {forward:,} in the forward, {len(graph.ops) - forward:,} in the backward"
    yield "values made", f"{len(made):,}, {format_bytes(int(problem.sizes.sum()))} in all"
    yield "results", f"{len(graph.outputs):,}, {format_bytes(int(problem.sizes[list(graph.outputs)].sum()))}"
    yield "there all the time", f"{format_bytes(problem.resident)} in {len(graph.values) - len(made):,} values"
    yield "ops that must run once", f"{sum(op.pinned is not None for op in graph.ops):,}"
    yield "keeping everything", f"{format_bytes(problem.keep_all_peak)}, {format_seconds(problem.keep_all_cost)}"
    yield "no budget can be below", f"{format_bytes(int(problem.unavoidable_bytes.max()))}"
    yield "profile", problem.profile.source + (f"; {_counted(estimated, 'op')} estimated" if estimated else "")
    yield "written with", ", ".join(_versions())


def _versions() -> Iterator[str]:
    yield f"checkmate {__version__}"
    yield f"Python {platform.python_version()}"
    for name in ("torch", "numpy", "highspy"):
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _memory_text(solution: Solution, line: Timeline) -> str:
    """What the picture of the memory shows, for who does not see it."""
    moment, after = line.peak_moment, len(line.moments) - line.boundary
    where = f" ({moment.where})" if moment.where else ""
    halves = f" The forward runs {_counted(line.boundary, 'op')}, the backward {after:,}." if after else ""
    between = ""
    if 0 < line.boundary < len(line.moments):
        held = line.moments[line.boundary - 1].bytes
        between = f" When the forward ends, {format_bytes(held)} are at hand."
    return (
        f"Bytes at hand while each op runs, from {format_bytes(int(line.bytes[0]))} at the first op to "
        f"{format_bytes(int(line.bytes[-1]))} at the last. The peak of {format_bytes(line.peak)} is at {moment.name}"
        f"{where}, execution {moment.index + 1:,} of {len(line.moments):,}, in the {moment.phase}; the budget is "
        f"{format_bytes(solution.budget)}.{halves}{between}"
    )


def _schedule_text(solution: Solution) -> str:
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


def _frontier_section(rows: list[Row]) -> str:
    found = [row for row in rows if row.peak is not None]
    text = f"{_counted(len(found), 'plan')} for {_counted(len({row.budget for row in rows}), 'budget')}. "
    if len(found) == 1:
        text += f"It takes {format_seconds(found[0].cost)} at a peak of {format_bytes(found[0].peak or 0)}. "
    elif found:
        low, high = (f(found, key=lambda row: (row.cost, row.peak or 0)) for f in (min, max))
        ends = (f"{format_seconds(r.cost)} at a peak of {format_bytes(r.peak or 0)}" for r in (low, high))
        text += f"The fastest takes {next(ends)}, the slowest {next(ends)}. "
    text += "Nothing can be in the hatched part: that is proven."
    return (
        '<section id="frontier" aria-labelledby="frontier-title"><h2 id="frontier-title">Cost against peak</h2>'
        f'<p id="frontier-text">{_html(text)}</p><div id="frontier-picture"></div></section>'
    )
