"""A plan as one HTML page: a summary in words, interactive pictures, sortable tables. It needs no network.

The page is the Jinja2 template ``page.html``; its words are made in ``captions.py``, what its script draws in
``page_data.py``, and this file joins them. What comes from the user's model (names of ops, module paths) is in the page
as escaped text, or as JSON in a script element that does not run; the page's own script writes it as text only, and a
content security policy lets no other script run, whatever a name says.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from checkmate.core.files import write_bytes
from checkmate.core.solution import Solution, Status, check_solution
from checkmate.inspection.addresses import addresses
from checkmate.inspection.difference import same_problem
from checkmate.inspection.peak import explain_peak
from checkmate.inspection.timeline import timeline
from checkmate.version import __version__
from checkmate.webpage import captions
from checkmate.webpage.page_data import page_data

if TYPE_CHECKING:
    from checkmate.solvers.frontier import Row

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

    It opens on the answer, in four figures and some sentences; then come the memory over the step, the schedule, the
    addresses, the tables of what is in memory at the peak, of ops by cost and of what is run again, and the facts of
    plan and problem. A file that is there is replaced, at once.

    Args:
        path: of the page.
        frontier: rows of `checkmate.frontier` for the same problem, to be shown too.
        prices: whether to say, too, what less or more memory would change; takes two solves, as
            `checkmate.inspection.peak.explain_peak` does.

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
    check_solution(solution)
    if solution.plan is None or solution.schedule is None:
        reason = (solution.message or solution.status.meaning).rstrip(".")
        longer = "" if solution.status is Status.INFEASIBLE else ", or with a longer time_limit"
        raise ValueError(f"There is no plan to report on: {reason}. Solve again within a larger budget{longer}.")
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
    line = timeline(solution.plan, solution.problem)
    peak = explain_peak(solution, prices=prices)
    placed = addresses(solution)
    style = _part("vendor/uPlot.min.css") + _part("page.css")
    script = f"/*{_part('vendor/uPlot.LICENSE')}*/\n" + "".join(map(_part, SCRIPTS))
    said = {
        "summary": captions.summary(solution),
        "answer": list(captions.answer(solution)),
        "figures": [("status", solution.title), *solution.facts],
        "memory_text": captions.memory_text(solution, line),
        "links_text": captions.links_text(solution, line),
        "schedule_text": captions.schedule_text(solution),
        "addresses_text": captions.addresses_text(placed),
        "frontier_text": "" if rows is None else captions.frontier_text(rows),
        "facts": list(captions.facts(solution)),
        "data": page_data(solution, line, peak, placed, rows),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    # A long name may end a line after its underscores, as in the page's script.
    environment.filters["breakable"] = lambda text: Markup(re.sub(r"(?<=\w_)(?=[^_])", "<wbr>", escape(text)))
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    page = environment.from_string(_part("page.html")).render(
        _visible(said),
        title=_visible(captions.title(solution)),
        version=__version__,
        style=Markup(style),
        style_hash=_hash(style),
        script=Markup(script),
        script_hash=_hash(script),
    )
    write_bytes(path, page.encode())
    return path


def _part(name: str) -> str:
    return (resources.files("checkmate.webpage") / name).read_text(encoding="utf-8").replace("\r\n", "\n")


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
