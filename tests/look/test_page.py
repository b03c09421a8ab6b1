"""The report: what its page says, without a browser, and how it behaves in a real one."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkmate
from benchmarks.networks import dags
from checkmate import Problem, Solution
from checkmate.core.graph import Graph
from checkmate.core.problem import Profile
from checkmate.look.drawings import ROLE_LOOKS
from checkmate.look.timeline import timeline
from checkmate.units import format_bytes, format_seconds
from tests.look.browser import Page, started
from tests.look.plans import again, four_ops, frontier, no_cost, on_links
from tests.look.test_transfers import SOLUTION as SENDS
from tests.project.test_import_without_torch import BLOCK, _python
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "checkmate" / "look" / "webpage" / "vendor"
HOSTILE = (
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    '"><svg onload="window.hit = 1">',
    "{{ data }}{% raw %}${window.hit = 1}",
    "<!-- <script>",
    "\u202eback\u2028line\x00\ud800",
    "n" * 3000,
)


def _written(name: str) -> str:
    """Write a name as the page shows it."""
    return name.replace(HOSTILE[5], r"\u202eback\u2028line\x00\ud800")


def test_what_is_at_home_elsewhere_is_in_the_column_of_its_first_reader(tmp_path: Path) -> None:
    step = Problem.from_dag([[], [0]], [1, 1], [4, 4], parameters=[(8, [0], None), (8, [1], None)])
    there = step.with_host(checkmate.Host(100, send=8.0, fetch=8.0)).with_homes([2, 3], kept=[3])
    data = _data(checkmate.report(checkmate.solve(there, 40, time_limit=1), tmp_path / "page.html"))
    assert data["values"]["producer"] == [0, 1, 0, 1]
    assert {value for value, *_ in data["kept"]} >= {3}
    assert data["links"]["memory"]["bytes"] == [16, 16]


def _hostile() -> Solution:
    """A chain whose names, targets and places would run something, if a page let them."""
    chain, words = dags.unit_chain(4), [*HOSTILE, *HOSTILE]
    ops = tuple(
        replace(op, name=f"{words[k % 7]}{k}", target=words[k % 7 + 1], where=f"{words[k % 7 + 2]} (A, b.py:1)")
        for k, op in enumerate(chain.graph.ops)
    )
    values = tuple(replace(value, name=HOSTILE[v % 7]) for v, value in enumerate(chain.graph.values))
    graph = Graph(ops, values, chain.graph.outputs)
    return checkmate.solve(Problem(graph, Profile(chain.seconds, chain.workspace, 0, HOSTILE[0])), 4)


@cache
def _resnet() -> Solution:
    """A step with modules' sizes and times, op 7 run again."""
    problem = dags.resnet()
    return checkmate.solve(problem, int(0.7 * problem.keep_all_peak), method="next-use", time_limit=2)


def _long_names() -> Solution:
    """The chain of 17 ops, their names and those of their values as long as PyTorch makes them."""
    solution = again()
    graph = solution.problem.graph
    ops = tuple(replace(op, name=f"_native_batch_norm_legit_functional_backward_{k}") for k, op in enumerate(graph.ops))
    values = tuple(replace(value, name=f"{ops[0].name}_{v}") for v, value in enumerate(graph.values))
    problem = replace(solution.problem, graph=replace(graph, ops=ops, values=values))
    return replace(solution, problem=problem)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.html"


def _data(path: Path) -> dict[str, Any]:
    """The document in the page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    return json.loads(text)


class _Elements(html.parser.HTMLParser):
    """The elements of a page, as a browser without scripts sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# the page's data: tables, moments, values and boxes are held by tests/core/test_golden_answers.py


def test_every_number_of_bytes_on_the_page_is_written_as_in_the_library(path: Path) -> None:
    data = _data(checkmate.report(_resnet(), path))
    assert data["written"] == {size: format_bytes(int(size)) for size in data["written"]}
    rows = [role["bytes"] for role in data["roles"]]
    for sizes in (*rows, data["moments"]["bytes"], data["values"]["bytes"], data["moments"]["workspace"]):
        assert {str(size) for size in sizes} <= set(data["written"])


def test_the_frontier_is_that_of_the_rows(path: Path) -> None:
    drawn = _data(checkmate.report(again(), path, frontier=frontier()))["frontier"]
    ((left, *budgets, right), seconds), (low, high) = zip(*drawn["proven"], strict=True), drawn["range"]
    bounds = [max(row.bound for row in frontier() if row.budget >= budget) for budget in (3, 4, 6, 10)]
    assert (left, budgets, right) == (pytest.approx(1.6), [2, 3, 4, 6, 10], pytest.approx(10.4))
    assert seconds == (high, high, *bounds, 17)  # nothing fits 2 bytes
    assert bounds == pytest.approx([45, 26, 21, 17])
    assert low < 17
    assert high > 45
    assert 'href="#frontier"' in path.read_text()
    assert "#frontier" not in checkmate.report(again(), path).read_text().split("<script")[0].split("<nav")[1]
    weaker = [replace(row, bound=20.0) if row.budget == 4 else row for row in frontier()]
    proven = dict(_data(checkmate.report(again(), path, frontier=weaker))["frontier"]["proven"])
    assert proven[4] == pytest.approx(21.0)  # a bound holds for all smaller budgets: that of 6 bytes


# the file


def test_the_page_loads_nothing_and_runs_its_own_script_only(path: Path) -> None:
    for solution in (again(), _hostile()):
        text = checkmate.report(solution, path).read_bytes().decode()
        elements = _Elements(text).found
        tags = [tag for tag, _ in elements]
        assert tags.count("script") == 2
        assert not {"img", "iframe", "object", "svg", "embed", "base", "form"} & set(tags)
        for _, attributes in elements:
            assert not any(name.startswith("on") or name == "style" for name in attributes)
            for name in ("src", "href"):
                assert re.match(r"#|data:,$", attributes.get(name) or "#")
        assert set(re.findall(r"https?://[\w./]*", text)) == {"https://github.com/leeoniya/uPlot"}  # in a comment
        policy = next(a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy")
        (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_no_name_is_lost(path: Path) -> None:
    data, graph = _data(checkmate.report(_hostile(), path)), _hostile().problem.graph
    (written,) = re.findall(r'id="data">(.*)</script>$', path.read_text(), flags=re.MULTILINE)
    assert not set("<>&'") & set(written)  # nothing that could end the script or begin a comment
    assert "\\u202eback" in path.read_text()
    assert not {"\u202e", "\u2028", "\x00"} & set(path.read_text())  # nothing that turns a sentence around
    for named, told in ((graph.ops, data["ops"]), (graph.values, data["values"])):
        assert [data["texts"][i] for i in told["name"]] == [_written(one.name) for one in named]


def test_it_returns_the_path_and_replaces_what_is_there(path: Path) -> None:
    path.write_text("old")
    mode = path.stat().st_mode  # others may read it as any file
    assert checkmate.report(again(), str(path)) == path
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert f"checkmate {checkmate.__version__}" in " ".join(_Elements(text).texts)
    assert [(file.name, file.stat().st_mode) for file in path.parent.iterdir()] == [("plan.html", mode)]


def test_errors_say_what_to_do(path: Path) -> None:
    nothing, folder = checkmate.solve(dags.unit_chain(4), 1), path.parent
    for given, at, rows, error, says in (
        (nothing, path, None, ValueError, r"no plan to report on: No schedule fits 1 B: .*Smallest budget that works"),
        (again(), folder / "missing" / "plan.html", None, FileNotFoundError,
         r"The folder .*missing for the report plan\.html is missing\. Make it"),
        (again(), folder, None, IsADirectoryError, r"is a folder\. Name a file in it, such as .*plan\.html"),
        (again(), path, [], ValueError, "no rows of a frontier"),
        (_resnet(), path, frontier(), ValueError, "of another problem"),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            checkmate.report(given, at, frontier=rows)
    assert not list(folder.iterdir())


def test_an_installed_package_has_the_parts_of_the_page() -> None:
    (line,) = re.findall(r"^checkmate = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    patterns = re.findall(r'"(.*?)"', line)
    parts = [path for path in VENDOR.parent.rglob("*") if path.suffix in (".js", ".css", ".html")]
    assert len(parts) >= 2
    for part in (*parts, VENDOR / "uPlot.LICENSE"):
        assert any(fnmatch(part.relative_to(ROOT / "checkmate").as_posix(), pattern) for pattern in patterns)


def test_what_others_wrote_is_unchanged_and_comes_with_its_licence(path: Path) -> None:
    about = (VENDOR / "README.md").read_text()
    (version,) = re.findall(r"^# uPlot ([\d.]+)$", about, flags=re.MULTILINE)
    assert f"(v{version})" in (VENDOR / "uPlot.iife.min.js").read_text()[:80]
    sums = dict(line.split("  ")[::-1] for line in re.findall(r"[0-9a-f]{64}  .*", about))
    files = [path for path in VENDOR.iterdir() if path.suffix in (".js", ".css")]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == sums
    text = checkmate.report(again(), path).read_text(encoding="utf-8")
    assert (VENDOR / "uPlot.LICENSE").read_text().strip() in text


@pytest.mark.slow
def test_it_needs_neither_torch_nor_matplotlib(path: Path) -> None:
    code = f"""
import checkmate, sys
problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], [1, 1, 1, 1], [1, 1, 1, 1])
page = checkmate.report(checkmate.solve(problem, budget=3), {str(path)!r})
print(page.exists(), "matplotlib" in sys.modules)
"""
    assert _python(BLOCK + code) == "True False"


# in a browser


@pytest.fixture(scope="module")
def _browser() -> Iterator[Any]:
    with started() as driver:
        yield driver


Open = Callable[..., Page]


@pytest.fixture
def opened(_browser: Any, path: Path) -> Iterator[Open]:
    """Opens the report of a solution; afterwards the console must be empty."""

    def show(solution: Solution, *, width: int = 1280, scheme: str = "light", **options: Any) -> Page:
        return Page(_browser, checkmate.report(solution, path, **options), width=width, scheme=scheme)

    yield show
    assert _browser.get_log("browser") == []


@pytest.mark.slow
def test_all_pictures_are_drawn(opened: Open) -> None:
    page = opened(again(), frontier=frontier())
    areas, *others = page.js("""
        return [...document.querySelectorAll(".picture canvas")].map((canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const pixels = {};
          for (let i = 0; i < data.length; i += 4) if (data[i + 3]) {
            const colour = "#" + [0, 1, 2].map((n) => data[i + n].toString(16).padStart(2, "0")).join("");
            pixels[colour] = (pixels[colour] ?? 0) + 1;
          }
          return pixels;
        })""")
    assert len(others) == 3
    assert min(sum(pixels.values()) for pixels in others) > 100
    roles = timeline(again().plan, again().problem).by_role()
    assert min(areas[ROLE_LOOKS[role][0].lower()] for role in roles) > 1000
    assert page.texts("#frontier .legend span") == [
        "auto (4 of 5 budgets)", "checkpoint-all (1 of 5 budgets)", "this plan", "proven: no schedule is here",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_legend_has_the_bytes_of_each_role_at_the_op_shown(opened: Open) -> None:
    page, line = opened(_resnet()), timeline(_resnet().plan, _resnet().problem)
    page.press("#memory-area", "HOME")
    for index in (0, 1):
        expected = [f"{role} {format_bytes(row[index])}" for role, row in reversed(line.by_role().items())]
        assert [" ".join(item.split("\n")[:2]) for item in page.texts(".under .legend li")] == expected
        page.press("#memory-area", "ARROW_RIGHT")


def test_arrow_keys_move_from_op_to_op(opened: Open) -> None:
    line, page = timeline(again().plan, again().problem), opened(again())
    N, peak = len(line.moments), line.peak_moment.index
    runs_again = [moment.index for moment in line.moments if moment.time]
    assert page.shown == peak
    assert page.text("#memory-readout h3") == f"{line.peak_moment.name} (the peak)"
    expected = {
        "HOME": 0, "ARROW_RIGHT": 1, "ARROW_UP": 2, "ARROW_LEFT": 1, "ARROW_DOWN": 0, "PAGE_UP": round(N / 10),
        "PAGE_DOWN": 0, "r": runs_again[0], "R": runs_again[1], "p": peak, "END": N - 1,
    }  # fmt: skip
    for key, index in expected.items():
        page.press("#memory-area", key)
        moment = line.moments[index]
        assert page.shown == index
        times = {1: ", run for the 2nd time", 2: ", run for the 3rd time"}.get(moment.time, "")
        said = page.one("#memory-area").get_attribute("aria-valuetext")
        assert said == f"{moment.name}{times}, {format_bytes(moment.bytes)} at hand, {index + 1} of {N}"
        assert page.op_shown == moment.name
        names = page.js("return [...document.querySelectorAll('#memory-readout tbody th')].map(e => e.textContent)")
        alive = sorted(span.name for span in line.alive(index))
        assert sorted(re.sub(r" \(copy \d+\)", "", name) for name in names) == alive
    page.press("#memory-area", "ARROW_RIGHT")
    assert page.shown == N - 1  # the last stays


def test_the_op_shown_says_where_it_is_from(opened: Open) -> None:
    page = opened(four_ops())
    page.press("#memory-area", "HOME")
    assert dict(zip(page.texts("#memory-readout dt"), page.texts("#memory-readout dd"), strict=True)) == {
        "computes": "mm", "execution": "1 of 4, in the forward", "begins at": "0.0 µs", "takes": "1.0 s",
        "at hand": "25 B, 1 value", "module": "net.0 (Linear)", "line": "net.py:1",
    }  # fmt: skip


@pytest.mark.parametrize("along", ["time", slow("ops")])
def test_the_pointer_finds_each_op_in_order(opened: Open, along: str) -> None:
    page = opened(four_ops())
    page.scale(along)
    area, seen = page.in_sight("#memory-area"), []
    width = area.size["width"]
    for x in range(76 - width // 2, width // 2 - 15, 24):  # from the middle
        page.point(area, x)
        seen.append(page.shown)
    assert list(dict.fromkeys(seen)) == [0, 1, 2, 3]
    expected = [1 / 15, 2 / 15, 4 / 15, 8 / 15] if along == "time" else [0.25] * 4
    assert np.bincount(seen) / len(seen) == pytest.approx(expected, abs=2.5 / len(seen))
    assert page.text("#memory-readout h3") == "d (the peak)"


@pytest.mark.slow
def test_zooming_in_leaves_the_op_shown_in_sight(opened: Open) -> None:
    page = opened(again())
    page.press("#memory-area", "+", "+")
    area = page.in_sight("#memory-area")
    peak, half, N = page.shown, area.size["width"] // 2, int(area.get_attribute("aria-valuemax"))

    def ends() -> list[int]:
        found = []
        for x in (78 - half, half - 18):
            page.point(area, x)
            found.append(page.shown)
        return found

    first, last = ends()
    assert 0 <= first <= peak <= last < N
    assert last - first + 1 <= N / 4 + 2
    page.press("#memory-area", "0")
    assert ends() == [0, N - 1]


def test_dragging_zooms_in_and_a_double_click_shows_the_whole_step(opened: Open) -> None:
    page = opened(four_ops())
    area = page.in_sight("#memory-area")
    half = area.size["width"] // 2

    def at_the_left_end() -> int:
        page.point(area, 76 - half)
        return page.shown

    assert at_the_left_end() == 0
    drag = page.mouse.move_to_element_with_offset(area, 0, 0).click_and_hold()
    drag.move_by_offset(half - 16, 0).release().perform()
    assert at_the_left_end() == 3
    assert page.focused == area  # the keys work as well
    page.press("#memory-area", "ARROW_LEFT")
    assert page.shown == 2
    page.mouse.double_click(area).perform()
    assert at_the_left_end() == 0


def test_heads_sort_by_click_and_by_keyboard_and_rows_are_filtered(opened: Open) -> None:
    page, problem, runs = opened(_resnet()), _resnet().problem, _resnet().schedule.R.sum(axis=0)
    by_cost = [problem.graph.ops[k].name for k in np.argsort(-runs * problem.seconds, kind="stable")]
    assert page.column("table-ops", 0) == by_cost[:20]
    each = "#table-ops thead th:nth-child(5)"
    page.one(f"{each} button").click()
    assert page.one(each).get_attribute("aria-sort") == "descending"
    assert page.column("table-ops", 4) == [format_seconds(s) for s in sorted(problem.seconds, reverse=True)[:20]]
    page.press(f"{each} button", "ENTER")
    assert page.one(each).get_attribute("aria-sort") == "ascending"
    assert page.column("table-ops", 4) == [format_seconds(s) for s in sorted(problem.seconds)[:20]]
    page.press("#table-ops thead th:nth-child(3) button", "SPACE")
    assert page.column("table-ops", 2) == [str(n) for n in sorted(runs.tolist(), reverse=True)[:20]]
    assert page.one(each).get_attribute("aria-sort") is None
    assert page.one("#table-ops [role=status]").get_attribute("textContent") == "Sorted by runs, descending"
    page.one("#table-ops .controls button").click()
    names = page.column("table-ops", 0)
    assert sorted(names) == sorted(by_cost)  # all are shown
    page.one("#table-ops-filter").send_keys("NORM_BACK")
    assert sorted(page.column("table-ops", 0)) == sorted(name for name in names if "norm_back" in name)


def test_what_has_no_number_stands_last(opened: Open) -> None:
    page = opened(again(), frontier=frontier())
    for _ in range(2):
        page.press("#table-frontier thead th:nth-child(4) button", "ENTER")
        assert page.column("table-frontier", 3)[-5:] == ["-"] * 5
    assert page.column("table-frontier", 3)[:5] == ["17.0 s", "17.0 s", "21.0 s", "26.0 s", "45.0 s"]


def test_a_name_in_a_table_and_a_run_in_the_schedule_lead_to_the_memory(opened: Open) -> None:
    page = opened(again())
    name = page.one("#table-ops tbody tr:nth-child(3) button")
    text = name.text
    name.click()
    assert page.focused.get_attribute("id") == "memory-area"
    assert page.op_shown == text
    page.one("#schedule-readout button").click()
    line = timeline(again().plan, again().problem)
    assert page.shown == next(moment.index for moment in line.moments if moment.time)


@pytest.mark.slow
def test_the_schedule_is_read_by_keyboard_and_pointer(opened: Open) -> None:
    page, R, S = opened(again()), again().schedule.R, again().schedule.S
    recomputed = [(t, k) for t, k in np.argwhere(R).tolist() if k < t]

    def title() -> str:
        return page.text("#schedule-readout h3")

    def facts() -> list[str]:
        return page.texts("#schedule-readout dd")

    assert title() == f"Stage {recomputed[0][0]}, op {recomputed[0][1]}"
    for key, (t, k) in (("r", recomputed[1]), ("r", recomputed[2]), ("R", recomputed[1])):
        page.press("#schedule-area", key)
        assert title() == f"Stage {t}, op {k}"
        assert f"op{k} is run again, for the " in facts()[0]
    t = recomputed[1][0]
    page.press("#schedule-area", "END")
    assert title() == f"Stage {t}, op {t}"
    assert "for the first time" in facts()[0]
    page.press("#schedule-area", "HOME")
    for k in range(t):
        runs, at_hand = facts()[:2]
        assert ("is run again" in runs) == bool(R[t, k])
        assert at_hand.startswith(f"v{k} (1 B)" if S[t, k] else "nothing")
        page.press("#schedule-area", "ARROW_RIGHT")
    page.press("#schedule-area", "ARROW_UP")
    assert title() == f"Stage {t - 1}, op {t}"
    assert "cannot run yet" in facts()[0]
    area, seen = page.in_sight("#schedule-area"), set()
    for y in range(-area.size["height"] // 2 + 45, area.size["height"] // 2, 20):
        page.point(area, 66 - area.size["width"] // 2, y)
        seen.add(title())
    assert {f"Stage {t}, op 0" for t in range(17)} <= seen


def test_what_an_op_writes_over_is_shown_beside_it(opened: Open) -> None:
    problem = Problem.from_dag(
        [[], [0], [1], [0, 2], [3]], [1] * 5, [64, 64, 64, 128, 128], workspace=[0, 0, 8, 0, 0],
        over={2: [1], 4: [3]}, forward=2,
    )  # fmt: skip
    page = opened(checkmate.solve(problem, 256, method="checkpoint-all"))
    page.press("#memory-area", "HOME", "ARROW_RIGHT", "ARROW_RIGHT")
    assert page.one("#memory-area").get_attribute("aria-valuetext").startswith("op2, over v1, ")
    assert "writes over\nv1" in page.text("#memory-readout")
    assert "v2, in place of v1" in page.text("#memory .values")
    page.press("#schedule-area", *["ARROW_DOWN", "ARROW_RIGHT"] * 2)
    assert "op2 runs for the first time and ends the stage, over v1." in page.text("#schedule-readout")


def test_links_are_drawn_under_the_memory(opened: Open) -> None:
    page = opened(SENDS)
    pixels = """
        const canvas = document.querySelector("#links-area canvas");
        const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
        const pen = copy.getContext("2d", { willReadFrequently: true });
        pen.drawImage(canvas, 0, 0);
        const sharp = canvas.width / canvas.clientWidth;
        const over = document.querySelector("#memory-area .u-over");
        return arguments[0].map(([seconds, y]) => {
          const x = (over.offsetLeft + seconds / 6 * over.clientWidth) * sharp;
          return [...pen.getImageData(x - 6, y * sharp, 12, 1).data].some((part, i) => i % 4 === 3 && part > 0);
        });
    """
    page.press("#memory-area", "END")  # the op shown is shaded: away from what is looked at
    inside = [(1.5, 11), (3.5, 33), (4.5, 33), (3.0, 110), (0.5, 33), (2.5, 11), (0.5, 110)]
    assert page.js(pixels, inside) == [True] * 4 + [False] * 3
    page.press("#memory-area", "ARROW_LEFT")
    assert "then waits\n1.0 s" in page.text("#memory-readout")
    page.scale("ops")
    ops = [(6 / 5 * op, y) for op, y in ((1.5, 11), (2.5, 11), (0.5, 11), (3.8, 33), (2.7, 33))]
    assert page.js(pixels, ops) == [True, False, False, True, False]


def test_the_pointer_finds_each_box_and_a_click_leads_to_its_op(opened: Open) -> None:
    placed, page = checkmate.addresses(_resnet()), opened(_resnet())
    largest = sorted(placed.boxes, key=lambda box: -box.bytes * (box.last + 1 - box.first))[:5]
    executions = 1 + max(box.last for box in placed.boxes)
    area = page.in_sight("#addresses-area")
    left, right, top, bottom = 74, 14, 8, 38  # around what is drawn
    wide, high = area.size["width"] - left - right, area.size["height"] - top - bottom
    for box in largest:
        x = left + wide * (box.first + box.last + 1) / 2 / executions - area.size["width"] / 2
        y = top + high * (1 - (box.offset + box.bytes / 2) / placed.height) - area.size["height"] / 2
        page.point(area, x, y)
        said = page.text("#addresses-readout")
        assert said.startswith(f"{box.name} ({box.role}): {format_bytes(box.bytes)} from byte {box.offset} on")
        assert f"{box.first + 1} to {box.last + 1}" in said
    page.mouse.click().perform()
    assert page.shown == largest[-1].first


def _plans_pointed_at(page: Page) -> list[str]:
    """Read what is said where each plan lies in the picture of the frontier, the page's own one last."""
    drawn, area = _data(page.path)["frontier"], page.in_sight("#frontier-area")
    (left, _), *_, (right, _) = drawn["proven"]
    low, high = drawn["range"]
    wide, tall = area.size["width"] - 74 - 16, area.size["height"] - 10 - 38  # less what is around the plot
    said = []
    for peak, cost, _ in (*(at for method in drawn["methods"] for at in method["points"]), drawn["this"]):
        x, y = 74 + wide * (peak - left) / (right - left), 10 + tall * (high - cost) / (high - low)
        page.point(area, x - area.size["width"] / 2, y - area.size["height"] / 2)
        said.append(page.text("#frontier-readout"))
    return said


def test_the_pointer_finds_each_plan_of_the_frontier(opened: Open) -> None:
    steps = {3: "45.0 s", 4: "26.0 s", 6: "21.0 s", 10: "17.0 s"}
    auto = {peak: f"auto: peak {peak} B, step {step}" for peak, step in steps.items()}
    auto[4] += "; this plan: peak 4 B, step 26.0 s"
    auto[10] += "; checkpoint-all: peak 10 B, step 17.0 s"
    assert _plans_pointed_at(opened(again(), frontier=frontier())) == [*auto.values(), auto[10], auto[4]]


def test_rows_without_any_plan_are_shown(opened: Open) -> None:
    page = opened(again(), frontier=checkmate.frontier(dags.unit_chain(8), [1, 2], jobs=1))
    assert page.texts("#frontier .legend span")[0] == "auto (0 of 2 budgets)"
    assert _plans_pointed_at(page) == ["this plan: peak 4 B, step 26.0 s"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_page(opened: Open, width: int, scheme: str) -> None:
    for solution, rows in ((again(), frontier()), (_hostile(), None), (on_links(), None)):
        page = opened(solution, width=width, scheme=scheme, frontier=rows)
        assert page.js("return document.documentElement.scrollWidth") <= width
        wide = page.js("""
            return [...document.querySelectorAll("body *")]
              .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
              .filter((e) => !e.closest(".wide, .readout, .unseen, .skip")).map((e) => e.outerHTML.slice(0, 80))""")
        assert wide == []


@pytest.mark.parametrize("width", [360, 1280])
def test_names_break_after_underscores(opened: Open, width: int) -> None:
    """Wherever it is shown; a name that nothing breaks may stand out of its table, which scrolls."""
    lines = opened(_long_names(), width=width).js(
        """
        return [...document.querySelectorAll(arguments[0])].filter((e) => e.offsetParent).map((element) => {
          const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
          const lines = [];
          let top = null;
          for (let node = walker.nextNode(); node; node = walker.nextNode()) for (let i = 0; i < node.length; i++) {
            const range = document.createRange();
            range.setStart(node, i);
            range.setEnd(node, i + 1);
            const box = range.getClientRects()[0];
            // a space at the end of a line has no box
            if (box && (top === null || box.top - top > box.height / 2)) [top] = [box.top, lines.push("")];
            lines[lines.length - 1] += node.data[i];
          }
          return lines;
        })""",
        "#memory-readout h3, #memory-readout dd, #memory-readout tbody th, #memory-text, #table-ops th[scope=row]",
    )
    broken = [some for some in lines if len(some) > 1 and any("native" in line for line in some)]
    assert broken
    assert [some for some in broken if any(line[-1] not in "_ " for line in some[:-1])] == []


def test_a_table_on_a_phone_scrolls_within_itself(opened: Open) -> None:
    page = opened(_long_names(), width=360, frontier=None)
    tables = page.js("""
        return [...document.querySelectorAll(".values, .wide")].map((box) => {
          box.scrollTo(10000, 0);
          const cell = box.querySelector("tbody tr td:last-child").getBoundingClientRect();
          return [box.scrollWidth > box.clientWidth, box.scrollLeft > 0,
            cell.right <= box.getBoundingClientRect().right + 1];
        })""")
    assert tables == [[True] * 3] * 4
    assert page.js("scrollTo(10000, 0); return scrollX") == 0
    assert page.js("return document.documentElement.scrollWidth") <= 360
    readout = "const box = document.getElementById('memory-readout'); return [box.scrollWidth, box.clientWidth]"
    wide, room = page.js(readout)
    assert wide <= room


def _apart(one: dict[str, float], other: dict[str, float]) -> bool:
    beside = one["right"] <= other["left"] or other["right"] <= one["left"]
    return beside or one["bottom"] <= other["top"] or other["bottom"] <= one["top"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, long(390), long(768), 1400])
def test_words_in_the_picture_of_the_memory_do_not_overlap(opened: Open, width: int) -> None:
    """The budget's once ran into the mark of the peak, on a phone."""
    wider = replace(again(), budget=5), replace(again(), budget=10**6)
    for solution in (again(), _resnet(), SENDS, on_links(), _long_names(), *wider):
        boxes, (left, right, top), room = opened(solution, width=width).js("""
            const over = document.querySelector("#memory-area .u-over").getBoundingClientRect();
            const mark = document.querySelector("#memory-area .mark").getBoundingClientRect();
            return [memory.labels(), [mark.left - over.left, mark.right - over.left, mark.top - over.top], over.width];
        """)
        words = [box["words"] for box in boxes]
        (own,) = [box for box in boxes if box["words"].startswith("budget")]
        assert sum(word.startswith("peak") for word in words) == 1
        middle = (left + right) / 2
        triangle = {"left": middle - 8, "right": middle + 8, "top": top - 15, "bottom": top}
        for one, other in (*itertools.combinations(boxes, 2), (own, triangle)):
            assert _apart(one, other), (width, one, other)
        for box in boxes:
            if box["words"] not in ("forward", "backward"):
                assert 0 <= box["left"], box
                assert box["right"] <= room + 3, box
        line = timeline(solution.plan, solution.problem)
        parts = {f"{role} {format_bytes(row[line.peak_moment.index])}" for role, row in line.by_role().items()}
        named = {word for word in words if not word.startswith(("budget", "peak", "forward", "backward"))}
        assert named
        assert named <= parts


def test_links_that_carry_ops_are_drawn_in_lanes_of_their_own(opened: Open) -> None:
    lanes, both = (opened(solution, width=390).one("#links-area").size["height"] for solution in (on_links(), SENDS))
    assert lanes == both - (22 + 12 + 60)  # less than two lanes and the bytes there


def test_hostile_names_do_nothing_but_stand_there(opened: Open) -> None:
    page = opened(_hostile())
    page.press("#memory-area", "HOME", *["ARROW_RIGHT"] * 8)
    page.press("#schedule-area", "r", "ARROW_LEFT")
    page.press("#table-ops thead th:nth-child(1) button", "ENTER")
    assert page.js("return window.hit") is None
    assert page.js("return document.scripts.length") == 2
    assert page.all("img, #memory-picture svg, #all-tables svg") == []
    assert {_written(op.name) for op in _hostile().problem.graph.ops[:5]} <= {*page.column("table-ops", 0)}


def test_everything_has_a_name_for_who_does_not_see_it(opened: Open) -> None:
    page = opened(again(), prices=True, frontier=frontier())
    assert page.all("canvas:not([aria-hidden=true])") == []
    tables = page.js("""
        return [...document.querySelectorAll("table")].map((table) => [table.caption.textContent,
          table.querySelectorAll("thead th:not([scope=col]), tbody th:not([scope=row])").length])""")
    assert len(tables) == 6
    assert all(caption and not without for caption, without in tables)
    for element in page.all("button:not(table *), select, input, [tabindex], nav, section"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    assert page.js("return [...document.querySelectorAll('table button')].every((b) => b.textContent)")
    lacking_and_double = page.js("""
        const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
        const refs = [...document.querySelectorAll("[aria-describedby], [aria-labelledby], label")].flatMap((e) =>
            [e.getAttribute("aria-describedby"), e.getAttribute("aria-labelledby"), e.getAttribute("for")]
            .filter(Boolean).join(" ").split(" "));
        return [refs.filter((ref) => !ids.includes(ref)), ids.filter((id, i) => ids.indexOf(id) !== i)]""")
    assert lacking_and_double == [[], []]
    page.press("body a.skip")
    reached = set()
    for _ in range(30):
        page.press(":focus", "TAB")
        reached.add(page.focused.get_attribute("id"))
    assert {"memory-area", "memory-scale", "memory-readout", "schedule-area"} <= reached


def _luminance(colour: str) -> float:
    """Relative, as the Web Content Accessibility Guidelines define it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_ground(opened: Open, scheme: str) -> None:
    page = opened(again(), scheme=scheme)

    def light(name: str) -> float:
        return _luminance(page.js("return colour(arguments[0])", name))

    assert (light("paper") > 0.5) == (scheme == "light")
    signs = [(sign, "paper", 3) for sign in ("again", "mark", "focus")]  # lines, of which less is asked
    for name, ground, least in [*itertools.product(("ink", "soft", "accent"), ("paper", "panel"), [4.5]), *signs]:
        low, high = sorted((light(name), light(ground)))
        assert (high + 0.05) / (low + 0.05) >= least, (name, ground)


@pytest.mark.slow
def test_it_prints_in_light_colours_and_is_dark_again_afterwards(opened: Open) -> None:
    page = opened(again(), scheme="dark")
    page.js("addEventListener('beforeprint', () => { window.printed = colour('paper'); })")
    dark = page.js("return colour('paper')")
    assert base64.b64decode(page.driver.print_page()).startswith(b"%PDF")
    assert page.js("return [window.printed, colour('paper')]") == ["#ffffff", dark]


def test_a_step_of_no_seconds_and_no_bytes_is_shown(opened: Open) -> None:
    page = opened(no_cost())
    assert page.text("#memory-readout h3") == "op0 (the peak)"
    page.press("#memory-area", "+", "r", "ARROW_RIGHT")
    assert page.shown == 0
    # a first op of no seconds ends where the picture begins: that must not be taken for being out of sight
    page = opened(checkmate.solve(Problem.from_dag([[], [0], [1]], [0.0, 1.0, 1.0], [1, 0, 0]), 9))
    assert page.text("#memory-readout h3") == "op0 (the peak)"
    area = page.in_sight("#memory-area")
    page.point(area, area.size["width"] // 2 - 16)
    assert page.text("#memory-readout h3") == "op2"


@pytest.mark.long
def test_thousands_of_ops_open_in_two_seconds(opened: Open) -> None:
    """GPT-2 with 48 layers, 3,836 ops: what the page computes until its last picture is drawn."""
    problem = Problem.from_json(ROOT / "benchmarks" / "problems" / "gpt2-48.json.gz")
    solution = checkmate.solve(problem, int(0.6 * problem.keep_all_peak), method="next-use", time_limit=5)
    page = opened(solution)
    assert page.path.stat().st_size < 5_000_000
    assert page.js("return performance.getEntriesByName('drawn').length") == 1
    metrics = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    assert 0 < next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration") < 2
    page.press("#memory-area", "END")
    line = timeline(solution.plan, problem)
    assert page.op_shown == line.moments[-1].name
    assert page.shown == len(line.moments) - 1
