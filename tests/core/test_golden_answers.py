"""Answers as they are printed, shown in a notebook, listed as records and written on the page, beside texts in a file.

A change of ``golden_answers.txt`` is one that users see. ``python -m tests.core.test_golden_answers`` writes it anew.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import checkmate
from checkmate import Problem, Solution, Status
from checkmate.cli.json_output import finite, solution_record, steps_of
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.plan import Free, Plan, Run, Start
from checkmate.core.problem import Profile
from checkmate.core.rules import with_rules
from checkmate.look.addresses import addresses
from checkmate.look.costs import Break, Explanation, costs_of, pinned_ops
from checkmate.look.difference import diff
from checkmate.look.peak import Price, explain_peak
from checkmate.memory.report import ArenaReport, ArenaUse, HostUse
from checkmate.sizes.fits_page import NOT_ASKED, Fits, LargestSizes, MemoryOption
from checkmate.sizes.largest_batch import LargestBatch, SizePoint
from checkmate.sizes.memory_parts import Parts
from checkmate.solvers.catalogue import METHODS, Catalogue
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.frontier import Frontier, Row
from checkmate.solvers.search.min_budget import MinBudget
from tests.look.test_timeline import AGAIN, _chain
from tests.look.test_transfers import SOLUTION as SENDS

GOLDEN = Path(__file__).with_name("golden_answers.txt")
INF = float("inf")


def _by_hand(problem: Problem, budget: int, found: Any, **fields: Any) -> Solution:
    return certify(problem, budget, found, method="by hand", seconds=1.5, **fields)


KEPT = _by_hand(_chain(), 200, np.eye(4, dtype=bool))
RUNS_AGAIN = _by_hand(_chain(), 150, AGAIN)
IN_PLACE = _by_hand(
    Problem.from_dag(
        [[], [0], [1], [0, 2], [3]], [1] * 5, [64, 64, 64, 128, 128], workspace=[0, 0, 8, 0, 0],
        over={2: [1], 4: [3]}, forward=2,
    ),
    320, np.eye(5, dtype=bool),
)  # fmt: skip
DROPS = _by_hand(
    Problem.from_dag([[], [], [1], [1, 2], [0, 1, 3]], [1] * 5, [20, 20, 20, 20, 5], over={3: [1]}), 85,
    np.eye(5, dtype=bool),
)  # fmt: skip
NONE = Solution(Status.NOT_FOUND, _chain(), 20, "milp", bound=2.0, message="ended; what was found does not fit")


def _on_links() -> Solution:
    """Two layers whose parameters are gathered, the second while the first runs; a gradient is summed over ranks."""
    ops = (
        Op("gather0", "gather", (0,), (2,), "forward", link="gathers"),
        Op("layer0", "mm", (2,), (3,), "forward", None, "net.0 (Linear, net.py:1)"),
        Op("gather1", "gather", (1,), (4,), "forward", link="gathers"),
        Op("layer1", "mm", (3, 4), (5,), "forward", None, "net.1 (Linear, net.py:2)"),
        Op("gradient", "mm_backward", (3, 5), (6,), "backward"),
        Op("sum", "sum", (6,), (7,), "backward", "sums over ranks", link="sums"),
    )
    sizes = {"shard0": 1, "shard1": 1, "v0": 4, "v1": 8, "v2": 4, "v3": 8, "v4": 2, "v5": 2}
    values = tuple(Value(n, size, None if i < 2 else i - 2) for i, (n, size) in enumerate(sizes.items()))
    problem = Problem(Graph(ops, values, (7,)), Profile([2.0, 1.0, 3.0, 1.0, 1.0, 2.0], [0] * 6, 2))
    runs = (Run(0), Start(2), Run(1), Free(2), Run(2), Run(3), Free(4), Run(4), Run(5))
    return _by_hand(problem, 40, Plan(runs, boundary=7))


def _frontier() -> Frontier:
    found = Row.of("greedy", RUNS_AGAIN, 145), Row.of("milp", replace(KEPT, seconds=70.0)), Row.of("milp", NONE)
    return Frontier(found)


def _fits() -> Fits:
    plain, kept = Parts(7, 7, 14, 30, 20, 3, 5, "d"), Parts(7, 2, 14, 30, 10, 3, 5, "c")
    ways = (
        MemoryOption("recomputation", {}, 60, 55, True, RUNS_AGAIN, reserved=2097152),
        MemoryOption("loss in parts", {}, None, None, False, why_not="it has no logits"),
        MemoryOption("second memory", {"host": '"1 GB"'}, 90, 80, False, why_not="no plan was found"),
        MemoryOption("all of it", {}, None, None, False, why_not=NOT_ASKED),
    )
    return Fits(
        "cpu", 80, 100, False, "It fits.", "step = ...", "torch.optim.SGD", plain, kept, 15.0, None, ways,
        LargestSizes(8, 4, 6, 12, False, 9.0, 0.25), "", ("costs: given",), _chain(), 0.5, 2.0,
    )  # fmt: skip


def _answers() -> Iterator[tuple[str, Any]]:
    """An instance of each kind of answer, made without a clock or a search."""
    yield "Solution", RUNS_AGAIN
    yield "Solution, second memory", replace(SENDS, problem=replace(SENDS.problem, splits=("the loss in 4 parts",)))
    yield "Solution, in place", replace(IN_PLACE, details={"allocated_peak": 512, "reserved_peak": 1024})
    yield "Solution, no plan", NONE
    yield "Costs", costs_of(IN_PLACE.problem, top=2)
    peak = explain_peak(SENDS, prices=False, top=2)
    prices = (
        Price(-1, 9, Status.INFEASIBLE, INF, INF, INF, INF),
        Price(1, 11, Status.FEASIBLE, 5.0, 4.5, -1.0, -1.5),
    )
    yield "PeakExplanation", replace(peak, prices=prices, better=replace(SENDS, cost=5.0))
    yield "PeakExplanation, dropping", explain_peak(DROPS, prices=False)
    yield "PeakExplanation, again", explain_peak(RUNS_AGAIN, prices=False)
    yield "Difference", diff(KEPT, RUNS_AGAIN, top=1)
    kept = certify(SENDS.problem, 100, np.eye(5, dtype=bool), method="keep")
    yield "Difference, second memory", diff(kept, SENDS)
    ops = tuple(
        replace(op, pinned="draws random numbers" if k in (0, 3) else None) for k, op in enumerate(_chain().graph.ops)
    )
    problem = with_rules(replace(_chain(), graph=replace(_chain().graph, ops=ops)), {"net.*": "recompute"})
    smallest = MinBudget(150, 140, ("the loss in 4 parts",))
    yield "Explanation", Explanation(pinned_ops(problem), (), "", problem, smallest, top=1)
    breaks = (Break("net.py:7", "it calls print"), Break("net.py:9", "it branches on data"))
    yield "Explanation, refused", Explanation((), breaks, "It has graph breaks.", None, None)
    yield "Addresses", addresses(IN_PLACE)
    points = (
        SizePoint.of(2, KEPT),
        SizePoint.of(3, RUNS_AGAIN),
    )
    about = "not found", {"ap-greedy": points[0], "chen-sqrt": None}, ("chen-sqrt",), 145, 9.5, "time limit"
    yield "LargestBatch", LargestBatch(3, RUNS_AGAIN, 200, "one-forward", points, 2, points[0], *about)
    yield "Fits", _fits()
    yield "Fits, not all asked", replace(_fits(), largest=None, why_no_largest=NOT_ASKED, memory_bytes=0)
    use = ArenaUse(7, 1, 4096, 12, 3000, 1, 64, 0, 1, 0, 128, planned=4000, counted=3900, resident=4096, outside=5)
    host = HostUse("pinned", 100, 200, 200, 0.25, 512, 3, 0)
    yield "ArenaReport", ArenaReport((use,), (host,))
    yield "ArenaReport, empty", ArenaReport(())
    yield "Frontier", _frontier()
    yield "methods", Catalogue({name: METHODS[name] for name in ("auto", "ap-greedy")})


def _lines(html: str) -> str:
    """HTML with a line for each row of a table, and a stroke between cells."""
    html = html.replace("</td><td>", " | ").replace("</th><th>", " | ")
    return re.sub(r"(</div>|</tr>|</table>|<tbody>|</svg>)", r"\1\n", html).rstrip("\n")


def _rounded(cell: Any) -> Any:
    return float(f"{cell:.6g}") if isinstance(cell, float) else cell


def _page(solution: Solution, **options: Any) -> Iterator[tuple[str, str]]:
    """The sentences of a page, its tables, and the data of its pictures, by name."""
    with tempfile.TemporaryDirectory() as folder:
        text = checkmate.report(solution, Path(folder) / "plan.html", **options).read_text(encoding="utf-8")
    (document,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(document)
    texts = data.pop("texts")
    ops, moments, values = data["ops"], data["moments"], data["values"]
    told_by_index = (ops, "name"), (ops, "target"), (ops, "module"), (ops, "line"), (ops, "where"), (values, "name")
    for part, name in (*told_by_index, (moments, "over")):
        part[name] = [texts[i] for i in part[name]]
    data["spans"] = [[value, texts[role], *rest, texts[over]] for value, role, *rest, over in data["spans"]]
    data["arena"]["boxes"] = [[*rest, texts[name], texts[over]] for *rest, name, over in data["arena"]["boxes"]]
    told = re.sub(
        r"<(style|script).*?</\1>|<p class=\"(hint|warning).*?</p>|<nav.*?</nav>|<wbr>", "", text, flags=re.DOTALL
    )
    told = re.sub(
        r"<div><dt>written with</dt>.*?</div>|<footer>.*?</footer>|<head>.*?</head>", "", told, flags=re.DOTALL
    )
    told = re.sub(r"</dt><dd>|</dd><dd>|<span class=\"more\">", " | ", told)
    told = re.sub(r"<[^>]*>", "", told)
    yield "words", "\n".join(line.strip() for line in told.splitlines() if line.strip())
    for table in data.pop("tables"):
        heads = " | ".join(f"{head}{'#' * number}" for head, number in table["heads"])
        cells = [[cell if isinstance(cell, list) else [cell] for cell in row] for row in table["rows"]]
        told_cells = ([" ".join([texts[i], *(f"({_rounded(k)})" for k in key)]) for i, *key in row] for row in cells)
        rows = map(" | ".join, told_cells)
        yield table["id"], "\n".join([table["title"], heads, *rows, f"go: {table.get('go')}"])
    data["roles"] = {role["name"]: role["bytes"] for role in data["roles"]}
    del data["frontier"], data["written"]  # bounds; texts of numbers
    yield "pictures", "\n".join(f"{name}: {json.dumps(part, ensure_ascii=False)}" for name, part in data.items())


def _blocks() -> Iterator[tuple[str, str]]:
    for name, answer in _answers():
        yield f"{name}: text", str(answer)
        yield f"{name}: html", _lines(answer._repr_html_())
        kind, _, again = name.partition(", ")
        if not again and hasattr(answer, "records"):
            yield f"{kind}: records", "\n".join(map(repr, answer.records()))
        if not again and hasattr(answer, "summary"):
            yield f"{kind}: summary", "\n".join(f"{key}: {part!r}" for key, part in answer.summary().items())
    pages = {
        "runs again": (RUNS_AGAIN, {"frontier": _frontier()}),
        "second memory": (SENDS, {"prices": True}),
        "in place": (IN_PLACE, {}),
        "links": (_on_links(), {}),
    }
    for name, (solution, options) in pages.items():
        yield from ((f"page, {name}: {part}", text) for part, text in _page(solution, **options))
    for name, solution in {"second memory": SENDS, "links": _on_links(), "no plan": NONE}.items():
        document = finite(solution_record(solution)) | ({"steps": steps_of(solution)} if solution.plan else {})
        yield f"json, {name}", "\n".join(f"{key}: {json.dumps(part)}" for key, part in document.items())


def _written() -> str:
    return "\n".join(f"===== {name}\n{text}\n" for name, text in _blocks())


def _read(text: str) -> dict[str, str]:
    return dict(block.split("\n", 1) for block in text.removeprefix("===== ").split("\n===== "))


def test_answers_are_as_before() -> None:
    now, before = _read(_written()), _read(GOLDEN.read_text(encoding="utf-8"))
    assert list(now) == list(before)
    for name, text in now.items():
        assert text == before[name], name


if __name__ == "__main__":
    GOLDEN.write_text(_written(), encoding="utf-8")
