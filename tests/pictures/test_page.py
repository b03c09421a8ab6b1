"""The report: what its page says, without a browser, and how it behaves in a real one.

The browser is Chromium, without a window. Where it is not installed its tests skip, or fail if ``CI`` is set.
"""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import os
import re
import shutil
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
from checkmate import Problem, Schedule, Solution
from checkmate.core.graph import Graph
from checkmate.core.problem import Profile
from checkmate.inspection.timeline import timeline
from checkmate.plot.style import ROLE_STYLES
from checkmate.solvers.common.incumbent import certify
from checkmate.units import format_bytes, format_seconds
from checkmate.webpage.page_data import _intervals
from tests.inspection.test_timeline import _chain
from tests.inspection.test_transfers import SOLUTION as SENDS
from tests.project.test_import_without_torch import BLOCK, _python
from tests.support import oracle
from tests.support.all_plans import random_chain_with_links
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "checkmate" / "webpage" / "vendor"
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
    """As the page shows it."""
    return name.replace(HOSTILE[5], r"\u202eback\u2028line\x00\ud800")


def _hostile() -> Solution:
    """A chain whose names, targets and places would run something, if a page let them."""
    chain = dags.unit_chain(4)
    ops = tuple(
        replace(
            op, name=f"{HOSTILE[k % 7]}{k}", target=HOSTILE[(k + 1) % 7], where=f"{HOSTILE[(k + 2) % 7]} (A, b.py:1)"
        )
        for k, op in enumerate(chain.graph.ops)
    )
    values = tuple(replace(value, name=HOSTILE[v % 7]) for v, value in enumerate(chain.graph.values))
    graph = Graph(ops, values, chain.graph.outputs)
    return checkmate.solve(Problem(graph, Profile(chain.seconds, chain.workspace, 0, HOSTILE[0])), 4)


@cache
def _again() -> Solution:
    """A chain of 17 ops within 4 bytes, of which ops run again."""
    return checkmate.solve(dags.unit_chain(8), 4)


@cache
def _resnet() -> Solution:
    """A step with modules' sizes and times, op 7 run again."""
    problem = dags.resnet()
    return checkmate.solve(problem, int(0.7 * problem.keep_all_peak), method="next-use", time_limit=2)


@cache
def _on_links() -> Solution:
    """A step with ops on a link: started before they are needed, some waited for, one run again."""
    problem = random_chain_with_links(1)
    return checkmate.solve(problem, int(0.9 * problem.keep_all_peak))


@cache
def _rows() -> checkmate.Frontier:
    return checkmate.frontier(dags.unit_chain(8), [2, 3, 4, 6, 10], methods=["auto", "checkpoint-all"], jobs=1)


@cache
def _in_place() -> Solution:
    """Five ops, of which the third is written over the second's value, the last over the fourth's."""
    problem = Problem.from_dag(
        [[], [0], [1], [0, 2], [3]], [1] * 5, [64, 64, 64, 128, 128], workspace=[0, 0, 8, 0, 0],
        over={2: [1], 4: [3]}, forward=2,
    )  # fmt: skip
    return checkmate.solve(problem, 256, method="checkpoint-all")


def _plan(solution: Solution) -> Schedule:
    assert solution.schedule is not None
    return solution.schedule


def _data(path: Path) -> dict[str, Any]:
    """The document in the page, texts in place of their indices."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    data = json.loads(text)
    named = ("name", "target", "module", "line", "where")
    for column in (data["values"]["name"], *(data["ops"][name] for name in named)):
        column[:] = [data["texts"][i] for i in column]
    for table in data["tables"]:
        assert all(len(row) == len(table["heads"]) for row in table["rows"])
        rows = [[cell if isinstance(cell, list) else [cell] for cell in row] for row in table["rows"]]
        named = [[[data["texts"][i], *key] for i, *key in row] for row in rows]
        table["rows"] = [[cell if len(cell) > 1 else cell[0] for cell in row] for row in named]
    return data


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


# the page's data


@pytest.mark.parametrize("seed", range(5))
def test_the_data_are_those_of_the_timeline(seed: int, tmp_path: Path) -> None:
    problem = oracle.random_problem(seed)
    solution = checkmate.solve(problem, checkmate.min_budget(problem).peak)
    data = _data(checkmate.report(solution, tmp_path / "plan.html"))
    line, R = timeline(solution.plan, problem), _plan(solution).R
    moments = data["moments"]
    assert moments["op"] == [moment.op for moment in line.moments]
    assert moments["begin"] == [*(moment.begin for moment in line.moments), line.seconds]
    assert moments["begins"] == [format_seconds(moment.begin) for moment in line.moments]
    assert [bool(nth) for nth in moments["nth"]] == [moment.time > 0 for moment in line.moments]
    assert moments["bytes"] == line.bytes.tolist()
    assert moments["boundary"] == line.boundary
    assert data["peak"]["bytes"] == solution.peak
    assert data["peak"]["moment"] == line.peak_moment.index
    assert data["ops"]["takes"] == [format_seconds(seconds) for seconds in problem.seconds]
    assert {role["name"]: role["bytes"] for role in data["roles"]} == {
        role: row.tolist() for role, row in line.by_role().items()
    }
    for index, moment in enumerate(line.moments):
        assert R[moments["stage"][index], moment.op]
        here = [data["values"]["name"][v] for v, _, _, first, last, _, _ in data["spans"] if first <= index <= last]
        assert here == [span.name for span in line.alive(index)]


def test_every_number_of_bytes_on_the_page_is_written_as_in_the_library(tmp_path: Path) -> None:
    solution = _resnet()
    data = _data(checkmate.report(solution, tmp_path / "plan.html"))
    assert data["written"] == {size: format_bytes(int(size)) for size in data["written"]}
    rows = [role["bytes"] for role in data["roles"]]
    for sizes in (*rows, data["moments"]["bytes"], data["values"]["bytes"], data["moments"]["workspace"]):
        assert {str(size) for size in sizes} <= set(data["written"])


def test_the_tables_of_ops_count_what_the_schedule_runs(tmp_path: Path) -> None:
    solution = _resnet()
    problem, runs = solution.problem, _plan(solution).R.sum(axis=0)
    names = [op.name for op in problem.graph.ops]
    tables = {table["id"]: table for table in _data(checkmate.report(solution, tmp_path / "plan.html"))["tables"]}
    by_cost = np.argsort(-runs * problem.seconds, kind="stable")
    rows = tables["table-ops"]["rows"]
    assert [row[0] for row in rows] == [names[k] for k in by_cost]
    assert [row[3] for row in rows] == [[str(runs[k]), runs[k]] for k in by_cost]
    assert [row[5][1] for row in rows] == pytest.approx([runs[k] * problem.seconds[k] for k in by_cost])
    assert sum(row[5][1] for row in rows) == pytest.approx(solution.cost)
    assert [row[7][1] for row in rows] == [sum(problem.sizes[v] for v in problem.graph.ops[k].outputs) for k in by_cost]
    again = tables["table-again"]["rows"]
    assert {row[0]: row[2][1] for row in again} == {names[k]: n - 1 for k, n in enumerate(runs) if n > 1}
    assert sum(row[3][1] for row in again) == pytest.approx(solution.cost - problem.keep_all_cost)
    for row in again:
        k = names.index(row[0])
        stages = [t for t in np.flatnonzero(_plan(solution).R[:, k]) if t != k]
        assert row[5] == [", ".join(names[t] for t in stages), stages[0]]


@pytest.mark.parametrize("seed", range(5))
def test_the_schedule_is_told_by_intervals(seed: int) -> None:
    problem = oracle.random_problem(seed)
    S = _plan(checkmate.solve(problem, checkmate.min_budget(problem).peak)).S
    again = np.zeros_like(S)
    for value, first, last in _intervals(S):
        assert not again[max(0, first - 1) : last + 2, value].any()  # intervals do not touch
        again[first : last + 1, value] = True
    assert np.array_equal(again, S)


@pytest.mark.slow
def test_the_frontier_is_that_of_the_rows(tmp_path: Path) -> None:
    page = checkmate.report(_again(), tmp_path / "plan.html", frontier=_rows())
    data = _data(page)
    auto, keep_all = data["frontier"]["methods"]
    assert [point[:2] for point in auto["points"]] == [[3, 45], [4, 26], [6, 21], [10, 17]]  # as known of this chain
    assert auto["points"][0][2] == "auto: peak 3 B, step 45.0 s"
    assert data["frontier"]["this"] == [4, 26, "this plan: peak 4 B, step 26.0 s"]
    assert auto["label"] == "auto (4 of 5 budgets)"
    assert [point[:2] for point in keep_all["points"]] == [[10, 17]]
    left, *budgets, right = (peak for peak, _ in data["frontier"]["proven"])
    nothing, *bounds, once = (seconds for _, seconds in data["frontier"]["proven"])
    low, high = data["frontier"]["range"]
    assert (left, budgets, right) == (pytest.approx(1.6), [2, 3, 4, 6, 10], pytest.approx(10.4))
    assert nothing == bounds[0] == high  # nothing fits 2 bytes
    assert bounds[1:] == [max(row.bound for row in _rows() if row.budget >= b) for b in budgets[1:]]
    assert bounds[1:] == pytest.approx([45, 26, 21, 17])
    assert once == 17
    assert low < 17
    assert high > 45
    (table,) = (table for table in data["tables"] if table["id"] == "table-frontier")
    assert [row[1][1] for row in table["rows"]] == [row.budget for row in _rows()]
    assert 'href="#frontier"' in page.read_text()
    plain = checkmate.report(_again(), tmp_path / "plan.html").read_text()
    assert "#frontier" not in plain.split("<script")[0].split("<nav")[1]


def test_a_bound_holds_for_all_smaller_budgets(tmp_path: Path) -> None:
    weaker = [replace(row, bound=20.0) if row.budget == 4 else row for row in _rows()]
    shade = dict(_data(checkmate.report(_again(), tmp_path / "a.html", frontier=weaker))["frontier"]["proven"])
    assert shade[4] == pytest.approx(21.0)  # of 6 bytes


# the file


def test_the_page_loads_nothing_and_runs_its_own_script_only(tmp_path: Path) -> None:
    for solution in (_again(), _hostile()):
        text = checkmate.report(solution, tmp_path / "plan.html").read_bytes().decode()
        elements = _Elements(text)
        tags = [tag for tag, _ in elements.found]
        assert tags.count("script") == 2
        assert not {"img", "iframe", "object", "svg", "embed", "base", "form"} & set(tags)
        for _, attributes in elements.found:
            assert not any(name.startswith("on") or name == "style" for name in attributes)
            for name in ("src", "href"):
                assert re.match(r"#|data:,$", attributes.get(name) or "#")
        assert set(re.findall(r"https?://[\w./]*", text)) == {"https://github.com/leeoniya/uPlot"}  # in a comment
        policy = next(a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
        (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_no_name_is_lost(tmp_path: Path) -> None:
    solution = _hostile()
    path = checkmate.report(solution, tmp_path / "plan.html")
    (written,) = re.findall(r'id="data">(.*)</script>$', path.read_text(), flags=re.MULTILINE)
    assert not set("<>&'") & set(written)  # nothing that could end the script or begin a comment
    assert "\\u202eback" in path.read_text()
    assert not {"\u202e", "\u2028", "\x00"} & set(path.read_text())  # nothing that turns a sentence around
    data = _data(path)
    assert data["ops"]["name"] == [_written(op.name) for op in solution.problem.graph.ops]
    assert data["values"]["name"] == [_written(value.name) for value in solution.problem.graph.values]


def test_it_returns_the_path_and_replaces_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text("old")
    mode = path.stat().st_mode  # others may read it as any file
    assert checkmate.report(_again(), str(path)) == path
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert f"checkmate {checkmate.__version__}" in " ".join(_Elements(text).texts)
    assert [(file.name, file.stat().st_mode) for file in tmp_path.iterdir()] == [("plan.html", mode)]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    nothing, path = checkmate.solve(dags.unit_chain(4), 1), tmp_path / "plan.html"
    for given, at, rows, error, says in (
        (nothing, path, None, ValueError, r"no plan to report on: No schedule fits 1 B: .*Solve again within a larger"),
        (_again(), tmp_path / "missing" / "plan.html", None, FileNotFoundError,
         r"The folder .*missing for the report plan\.html is missing\. Make it"),
        (_again(), tmp_path, None, IsADirectoryError, r"is a folder\. Name a file in it, such as .*plan\.html"),
        (_again(), path, [], ValueError, "no rows of a frontier"),
        (_resnet(), path, _rows(), ValueError, "of another problem"),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            checkmate.report(given, at, frontier=rows)
    assert not list(tmp_path.iterdir())


def test_an_installed_package_has_the_parts_of_the_page() -> None:
    (line,) = re.findall(r"^checkmate = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    patterns = re.findall(r'"(.*?)"', line)
    parts = [path for path in (ROOT / "checkmate" / "webpage").rglob("*") if path.suffix in (".js", ".css", ".html")]
    parts.append(VENDOR / "uPlot.LICENSE")
    assert len(parts) >= 3
    for part in parts:
        assert any(fnmatch(part.relative_to(ROOT / "checkmate").as_posix(), pattern) for pattern in patterns)


def test_what_others_wrote_is_unchanged_and_comes_with_its_licence(tmp_path: Path) -> None:
    about = (VENDOR / "README.md").read_text()
    (version,) = re.findall(r"^# uPlot ([\d.]+)$", about, flags=re.MULTILINE)
    assert f"(v{version})" in (VENDOR / "uPlot.iife.min.js").read_text()[:80]
    sums = dict(line.split("  ")[::-1] for line in re.findall(r"[0-9a-f]{64}  .*", about))
    files = [path for path in VENDOR.iterdir() if path.suffix in (".js", ".css")]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == sums
    text = checkmate.report(_again(), tmp_path / "plan.html").read_text(encoding="utf-8")
    assert (VENDOR / "uPlot.LICENSE").read_text().strip() in text


@pytest.mark.slow
def test_it_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    code = f"""
import checkmate, sys
problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], [1, 1, 1, 1], [1, 1, 1, 1])
page = checkmate.report(checkmate.solve(problem, budget=3), {str(tmp_path / "plan.html")!r})
print(page.exists(), "matplotlib" in sys.modules)
"""
    assert _python(BLOCK + code) == "True False"


# in a browser


def _missing() -> str:
    """What lacks for the tests in a browser, in words."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    lacks = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacks)} not found: apt-get install chromium chromium-driver" if lacks else ""


@pytest.fixture(scope="module")
def _browser() -> Iterator[Any]:
    if missing := _missing():
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})  # seconds that it computes
    yield driver
    driver.quit()


Open = Callable[..., Any]


@pytest.fixture
def opened(_browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the report of a solution; afterwards the console must be empty."""

    def show(solution: Solution, *, width: int = 1280, scheme: str = "light", **options: Any) -> Any:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        _browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        _browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        _browser.get(checkmate.report(solution, tmp_path / "plan.html", **options).as_uri())
        return _browser

    yield show
    assert _browser.get_log("browser") == []


def _one(driver: Any, css: str) -> Any:
    (found,) = driver.find_elements("css selector", css)
    return found


def _press(driver: Any, css: str, *keys: str) -> None:
    """Keys, as the element with the focus gets them."""
    driver.execute_script("document.querySelector(arguments[0]).focus()", css)
    for key in keys:
        driver.switch_to.active_element.send_keys(key)


def _shown(driver: Any) -> int:
    """Index of the moment that the picture of the memory shows."""
    return int(_one(driver, "#memory-area").get_attribute("aria-valuenow")) - 1


def _column(driver: Any, table: str, c: int) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((row) => row.children[arguments[1]].textContent)",
        f"#{table} tbody tr",
        c,
    )


def _keys() -> Any:
    from selenium.webdriver.common.keys import Keys

    return Keys


def _mouse(driver: Any) -> Any:
    from selenium.webdriver import ActionChains

    return ActionChains(driver, duration=0)


def _in_sight(driver: Any, css: str) -> Any:
    """The element, in the middle of the window."""
    element = _one(driver, css)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    return element


def _point(driver: Any, element: Any, x: float, y: float = 0) -> None:
    """The pointer, at so many pixels from the middle of the element."""
    _mouse(driver).move_to_element_with_offset(element, round(x), round(y)).perform()


def _scale(driver: Any, along: str) -> None:
    script = "const s = document.getElementById('memory-scale'); s.value = arguments[0];"
    driver.execute_script(f"{script} s.dispatchEvent(new Event('change'))", along)


def _apart(one: dict[str, float], other: dict[str, float]) -> bool:
    beside = one["right"] <= other["left"] or other["right"] <= one["left"]
    return beside or one["bottom"] <= other["top"] or other["bottom"] <= one["top"]


@pytest.mark.slow
def test_all_pictures_are_drawn(opened: Open) -> None:
    driver = opened(_again(), frontier=_rows())
    areas, *others = driver.execute_script("""
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
    roles = timeline(_again().plan, _again().problem).by_role()
    assert min(areas[ROLE_STYLES[role][0].lower()] for role in roles) > 1000
    assert [e.text for e in driver.find_elements("css selector", "#frontier .legend span")] == [
        "auto (4 of 5 budgets)", "checkpoint-all (1 of 5 budgets)", "this plan", "proven: no schedule is here",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_legend_has_the_bytes_of_each_role_at_the_op_shown(opened: Open) -> None:
    solution = _resnet()
    line = timeline(solution.plan, solution.problem)
    driver = opened(solution)
    _press(driver, "#memory-area", _keys().HOME)
    for index in (0, 1):
        expected = [f"{role} {format_bytes(row[index])}" for role, row in reversed(line.by_role().items())]
        items = driver.find_elements("css selector", ".under .legend li")
        assert [" ".join(item.text.split("\n")[:2]) for item in items] == expected
        _press(driver, "#memory-area", _keys().ARROW_RIGHT)


def test_arrow_keys_move_from_op_to_op(opened: Open) -> None:
    solution = _again()
    line = timeline(solution.plan, solution.problem)
    N, peak = len(line.moments), line.peak_moment.index
    again = [moment.index for moment in line.moments if moment.time]
    driver, keys = opened(solution), _keys()
    assert _shown(driver) == peak
    assert _one(driver, "#memory-readout h3").text == f"{line.peak_moment.name} (the peak)"
    expected = {
        keys.HOME: 0, keys.ARROW_RIGHT: 1, keys.ARROW_UP: 2, keys.ARROW_LEFT: 1, keys.ARROW_DOWN: 0,
        keys.PAGE_UP: round(N / 10), keys.PAGE_DOWN: 0, "r": again[0], "R": again[1], "p": peak, keys.END: N - 1,
    }  # fmt: skip
    for key, index in expected.items():
        _press(driver, "#memory-area", key)
        moment = line.moments[index]
        assert _shown(driver) == index
        times = ", run for the 2nd time" if moment.time == 1 else ", run for the 3rd time" if moment.time == 2 else ""
        said = _one(driver, "#memory-area").get_attribute("aria-valuetext")
        assert said == f"{moment.name}{times}, {format_bytes(moment.bytes)} at hand, {index + 1} of {N}"
        assert _one(driver, "#memory-readout h3").text.removesuffix(" (the peak)") == moment.name
        names = driver.execute_script(
            "return [...document.querySelectorAll('#memory-readout tbody th')].map(e => e.textContent)"
        )
        assert sorted(re.sub(r" \(copy \d+\)", "", name) for name in names) == sorted(
            span.name for span in line.alive(index)
        )
    _press(driver, "#memory-area", keys.ARROW_RIGHT)
    assert _shown(driver) == N - 1  # the last stays


def test_the_op_shown_says_where_it_is_from(opened: Open) -> None:
    driver = opened(certify(_chain(), 200, np.eye(4, dtype=bool), method="by hand"))
    _press(driver, "#memory-area", _keys().HOME)
    facts = dict(zip(*(
        [e.text for e in driver.find_elements("css selector", f"#memory-readout {tag}")] for tag in ("dt", "dd")
    ), strict=True))  # fmt: skip
    assert facts == {
        "computes": "mm", "execution": "1 of 4, in the forward", "begins at": "0.0 µs", "takes": "1.0 s",
        "at hand": "25 B, 1 value", "module": "net.0 (Linear)", "line": "net.py:1",
    }  # fmt: skip


@pytest.mark.parametrize("along", ["time", slow("ops")])
def test_the_pointer_finds_each_op_in_order(opened: Open, along: str) -> None:
    solution = certify(_chain(), 200, np.eye(4, dtype=bool), method="by hand")
    driver = opened(solution)
    _scale(driver, along)
    area = _in_sight(driver, "#memory-area")
    width = area.size["width"]
    seen = []
    for x in range(76 - width // 2, width // 2 - 15, 24):  # from the middle
        _point(driver, area, x)
        seen.append(_shown(driver))
    assert list(dict.fromkeys(seen)) == [0, 1, 2, 3]
    share = np.bincount(seen) / len(seen)
    expected = [1 / 15, 2 / 15, 4 / 15, 8 / 15] if along == "time" else [0.25] * 4
    assert share == pytest.approx(expected, abs=2.5 / len(seen))
    assert _one(driver, "#memory-readout h3").text == "d (the peak)"


@pytest.mark.slow
def test_zooming_in_leaves_the_op_shown_in_sight(opened: Open) -> None:
    driver = opened(_again())
    _press(driver, "#memory-area", "+", "+")
    area = _in_sight(driver, "#memory-area")
    peak, half = _shown(driver), area.size["width"] // 2
    N = int(area.get_attribute("aria-valuemax"))

    def ends() -> tuple[int, int]:
        found = []
        for x in (78 - half, half - 18):
            _point(driver, area, x)
            found.append(_shown(driver))
        return found[0], found[1]

    first, last = ends()
    assert 0 <= first <= peak <= last < N
    assert last - first + 1 <= N / 4 + 2
    _press(driver, "#memory-area", "0")
    assert ends() == (0, N - 1)


def test_dragging_zooms_in_and_a_double_click_shows_the_whole_step(opened: Open) -> None:
    driver = opened(certify(_chain(), 200, np.eye(4, dtype=bool), method="by hand"))
    area = _in_sight(driver, "#memory-area")
    left, right = 76 - area.size["width"] // 2, area.size["width"] // 2 - 16

    def at_the_left_end() -> int:
        _point(driver, area, left)
        return _shown(driver)

    assert at_the_left_end() == 0
    _mouse(driver).move_to_element_with_offset(area, 0, 0).click_and_hold().move_by_offset(right, 0).release().perform()
    assert at_the_left_end() == 3
    assert driver.switch_to.active_element == area  # the keys work as well
    _press(driver, "#memory-area", _keys().ARROW_LEFT)
    assert _shown(driver) == 2
    _mouse(driver).double_click(area).perform()
    assert at_the_left_end() == 0


def test_heads_sort_by_click_and_by_keyboard_and_rows_are_filtered(opened: Open) -> None:
    solution = _resnet()
    problem = solution.problem
    driver, keys = opened(solution), _keys()
    runs = _plan(solution).R.sum(axis=0)
    spent = runs * problem.seconds
    by_cost = [problem.graph.ops[k].name for k in np.argsort(-spent, kind="stable")]
    shown = _column(driver, "table-ops", 0)
    assert shown == by_cost[: len(shown)]
    assert len(shown) == 20
    each = "#table-ops thead th:nth-child(5)"
    _one(driver, f"{each} button").click()
    assert _one(driver, each).get_attribute("aria-sort") == "descending"
    assert _column(driver, "table-ops", 4) == [format_seconds(s) for s in sorted(problem.seconds, reverse=True)[:20]]
    _press(driver, f"{each} button", keys.ENTER)
    assert _one(driver, each).get_attribute("aria-sort") == "ascending"
    assert _column(driver, "table-ops", 4) == [format_seconds(s) for s in sorted(problem.seconds)[:20]]
    _press(driver, "#table-ops thead th:nth-child(4) button", keys.SPACE)
    assert _column(driver, "table-ops", 3) == [str(n) for n in sorted(runs.tolist(), reverse=True)[:20]]
    assert _one(driver, each).get_attribute("aria-sort") is None
    assert _one(driver, "#table-ops [role=status]").get_attribute("textContent") == "Sorted by runs, descending"
    _one(driver, "#table-ops .controls button").click()
    names = _column(driver, "table-ops", 0)
    assert sorted(names) == sorted(op.name for op in problem.graph.ops)  # all are shown
    _one(driver, "#table-ops-filter").send_keys("NORM_BACK")
    assert sorted(_column(driver, "table-ops", 0)) == sorted(name for name in names if "norm_back" in name)


def test_what_has_no_number_stands_last(opened: Open) -> None:
    driver = opened(_again(), frontier=_rows())
    step = "#table-frontier thead th:nth-child(4) button"
    for ends in (["-"] * 5, ["-"] * 5):
        _press(driver, step, _keys().ENTER)
        assert _column(driver, "table-frontier", 3)[-5:] == ends
    assert _column(driver, "table-frontier", 3)[:5] == ["17.0 s", "17.0 s", "21.0 s", "26.0 s", "45.0 s"]


def test_a_name_in_a_table_and_a_run_in_the_schedule_lead_to_the_memory(opened: Open) -> None:
    driver = opened(_again())
    name = _one(driver, "#table-ops tbody tr:nth-child(3) button")
    text = name.text
    name.click()
    assert driver.switch_to.active_element.get_attribute("id") == "memory-area"
    assert _one(driver, "#memory-readout h3").text.removesuffix(" (the peak)") == text
    _one(driver, "#schedule-readout button").click()
    line = timeline(_again().plan, _again().problem)
    assert _shown(driver) == next(moment.index for moment in line.moments if moment.time)


@pytest.mark.slow
def test_the_schedule_is_read_by_keyboard_and_pointer(opened: Open) -> None:
    solution = _again()
    R, S = _plan(solution).R, _plan(solution).S
    again = [(t, k) for t, k in np.argwhere(R).tolist() if k < t]
    driver, keys = opened(solution), _keys()
    title, facts = "#schedule-readout h3", "#schedule-readout dd"
    assert _one(driver, title).text == f"Stage {again[0][0]}, op {again[0][1]}"
    for key, (t, k) in (("r", again[1]), ("r", again[2]), ("R", again[1])):
        _press(driver, "#schedule-area", key)
        assert _one(driver, title).text == f"Stage {t}, op {k}"
        assert f"op{k} is run again, for the " in driver.find_elements("css selector", facts)[0].text
    _press(driver, "#schedule-area", keys.END)
    t = again[1][0]
    assert _one(driver, title).text == f"Stage {t}, op {t}"
    assert "for the first time" in driver.find_elements("css selector", facts)[0].text
    _press(driver, "#schedule-area", keys.HOME)
    for k in range(t):
        runs, at_hand = (e.text for e in driver.find_elements("css selector", facts)[:2])
        assert ("is run again" in runs) == bool(R[t, k])
        assert at_hand.startswith(f"v{k} (1 B)" if S[t, k] else "nothing")
        _press(driver, "#schedule-area", keys.ARROW_RIGHT)
    _press(driver, "#schedule-area", keys.ARROW_UP)
    assert _one(driver, title).text == f"Stage {t - 1}, op {t}"
    assert "cannot run yet" in driver.find_elements("css selector", facts)[0].text
    area = _in_sight(driver, "#schedule-area")
    seen = set()
    for y in range(-area.size["height"] // 2 + 45, area.size["height"] // 2, 20):
        _point(driver, area, 66 - area.size["width"] // 2, y)
        seen.add(_one(driver, title).text)
    assert {f"Stage {t}, op 0" for t in range(17)} <= seen


def test_what_an_op_writes_over_is_shown_beside_it(opened: Open) -> None:
    driver = opened(_in_place())
    _press(driver, "#memory-area", _keys().HOME, _keys().ARROW_RIGHT, _keys().ARROW_RIGHT)
    assert _one(driver, "#memory-area").get_attribute("aria-valuetext").startswith("op2, over v1, ")
    assert "writes over\nv1" in _one(driver, "#memory-readout").text
    assert "v2, in place of v1" in _one(driver, "#memory .values").text
    _press(driver, "#schedule-area", *[_keys().ARROW_DOWN, _keys().ARROW_RIGHT] * 2)
    assert "op2 runs for the first time and ends the stage, over v1." in _one(driver, "#schedule-readout").text


def test_links_are_drawn_under_the_memory(opened: Open) -> None:
    browser = opened(SENDS)
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
    _press(browser, "#memory-area", _keys().END)  # the op shown is shaded: away from what is looked at
    inside = [(1.5, 11), (3.5, 33), (4.5, 33), (3.0, 110), (0.5, 33), (2.5, 11), (0.5, 110)]
    assert browser.execute_script(pixels, inside) == [True] * 4 + [False] * 3
    _press(browser, "#memory-area", _keys().ARROW_LEFT)
    assert "then waits\n1.0 s" in _one(browser, "#memory-readout").text
    _scale(browser, "ops")
    ops = [(6 / 5 * op, y) for op, y in ((1.5, 11), (2.5, 11), (0.5, 11), (3.8, 33), (2.7, 33))]
    assert browser.execute_script(pixels, ops) == [True, False, False, True, False]


def test_the_pointer_finds_each_box_and_a_click_leads_to_its_op(opened: Open) -> None:
    solution = _resnet()
    placed = checkmate.addresses(solution)
    largest = sorted(placed.boxes, key=lambda box: -box.bytes * (box.last + 1 - box.first))[:5]
    executions = 1 + max(box.last for box in placed.boxes)
    driver = opened(solution)
    area = _in_sight(driver, "#addresses-area")
    left, right, top, bottom = 74, 14, 8, 38  # around what is drawn
    wide, high = area.size["width"] - left - right, area.size["height"] - top - bottom
    for box in largest:
        x = left + wide * (box.first + box.last + 1) / 2 / executions - area.size["width"] / 2
        y = top + high * (1 - (box.offset + box.bytes / 2) / placed.height) - area.size["height"] / 2
        _point(driver, area, x, y)
        said = _one(driver, "#addresses-readout").text
        assert said.startswith(f"{box.name} ({box.role}): {format_bytes(box.bytes)} from byte {box.offset} on")
        assert f"{box.first + 1} to {box.last + 1}" in said
    _mouse(driver).click().perform()
    assert _shown(driver) == largest[-1].first


def _plans_pointed_at(driver: Any, page: Path) -> list[str]:
    """What is said where each plan lies in the picture of the frontier, the page's own one last."""
    frontier, area = _data(page)["frontier"], _one(driver, "#frontier-area")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", area)
    (left, _), *_, (right, _) = frontier["proven"]
    low, high = frontier["range"]
    wide, tall = area.size["width"] - 74 - 16, area.size["height"] - 10 - 38  # less what is around the plot
    said = []
    for peak, cost, _ in (*(at for method in frontier["methods"] for at in method["points"]), frontier["this"]):
        x, y = 74 + wide * (peak - left) / (right - left), 10 + tall * (high - cost) / (high - low)
        at = round(x - area.size["width"] / 2), round(y - area.size["height"] / 2)
        _point(driver, area, *at)
        said.append(_one(driver, "#frontier-readout").text)
    return said


def test_the_pointer_finds_each_plan_of_the_frontier(opened: Open, tmp_path: Path) -> None:
    driver = opened(_again(), frontier=_rows())
    steps = {3: "45.0 s", 4: "26.0 s", 6: "21.0 s", 10: "17.0 s"}
    auto = {peak: f"auto: peak {peak} B, step {step}" for peak, step in steps.items()}
    auto[4] += "; this plan: peak 4 B, step 26.0 s"
    auto[10] += "; checkpoint-all: peak 10 B, step 17.0 s"
    assert _plans_pointed_at(driver, tmp_path / "plan.html") == [*auto.values(), auto[10], auto[4]]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_page(opened: Open, width: int, scheme: str) -> None:
    for solution, rows in ((_again(), _rows()), (_hostile(), None), (_on_links(), None)):
        driver = opened(solution, width=width, scheme=scheme, frontier=rows)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        wide = driver.execute_script(
            "return [...document.querySelectorAll('body *')].filter((e) =>"
            " e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.wide, .readout, .unseen, .skip'))"
            ".map((e) => e.outerHTML.slice(0, 80))"
        )
        assert wide == []


def _long_names() -> Solution:
    """The chain of 17 ops, their names and those of their values as long as PyTorch makes them."""
    solution = _again()
    graph = solution.problem.graph
    ops = tuple(replace(op, name=f"_native_batch_norm_legit_functional_backward_{k}") for k, op in enumerate(graph.ops))
    values = tuple(replace(value, name=f"{ops[0].name}_{v}") for v, value in enumerate(graph.values))
    problem = replace(solution.problem, graph=replace(graph, ops=ops, values=values))
    return replace(solution, problem=problem)


@pytest.mark.parametrize("width", [360, 1280])
def test_names_break_after_underscores(opened: Open, width: int) -> None:
    """Wherever it is shown; a name that nothing breaks may stand out of its table, which scrolls."""
    driver = opened(_long_names(), width=width)
    lines = driver.execute_script(
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


def test_the_values_alive_take_the_height_of_their_box(opened: Open) -> None:
    """They once stood below the facts, where four of a hundred could be seen."""
    driver = opened(_resnet())
    box, values = (_one(driver, css).rect for css in ("#memory-readout", "#memory-readout .values"))
    assert values["height"] > 0.9 * box["height"]
    shown = driver.execute_script(
        "const box = document.querySelector('.values').getBoundingClientRect();"
        "return [...document.querySelectorAll('.values tbody tr')].filter((row) => {"
        " const r = row.getBoundingClientRect(); return r.top >= box.top && r.bottom <= box.bottom; }).length"
    )
    assert shown >= 8
    facts = _one(driver, "#memory-readout .facts").rect
    assert facts["x"] + facts["width"] <= values["x"]


def test_a_table_on_a_phone_scrolls_within_itself(opened: Open) -> None:
    driver = opened(_long_names(), width=360, frontier=None)
    tables = driver.execute_script(
        """return [...document.querySelectorAll(".values, .wide")].map((box) => {
          box.scrollTo(10000, 0);
          const cell = box.querySelector("tbody tr td:last-child").getBoundingClientRect();
          return [box.scrollWidth > box.clientWidth, box.scrollLeft > 0,
            cell.right <= box.getBoundingClientRect().right + 1];
        })"""
    )
    assert len(tables) == 4
    assert all(all(facts) for facts in tables)
    assert driver.execute_script("scrollTo(10000, 0); return scrollX") == 0
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
    readout = "const box = document.getElementById('memory-readout'); return [box.scrollWidth, box.clientWidth]"
    wide, room = driver.execute_script(readout)
    assert wide <= room


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, long(390), long(768), 1400])
def test_words_in_the_picture_of_the_memory_do_not_overlap(opened: Open, width: int) -> None:
    """The budget's once ran into the mark of the peak, on a phone."""
    wider = replace(_again(), budget=5), replace(_again(), budget=10**6)
    for solution in (_again(), _resnet(), SENDS, _on_links(), _long_names(), *wider):
        driver = opened(solution, width=width)
        boxes, at, sizes = driver.execute_script("""
            const over = document.querySelector("#memory-area .u-over");
            const mark = document.querySelector("#memory-area .mark").getBoundingClientRect();
            const { left, top, width, height } = over.getBoundingClientRect();
            return [memory.labels(), [mark.left - left, mark.right - left, mark.top - top], [width, height]];
        """)
        words = [box["words"] for box in boxes]
        (own,) = [box for box in boxes if box["words"].startswith("budget")]
        assert sum(word.startswith("peak") for word in words) == 1
        middle = (at[0] + at[1]) / 2
        triangle = {"left": middle - 8, "right": middle + 8, "top": at[2] - 15, "bottom": at[2]}
        for one, other in (*itertools.combinations(boxes, 2), (own, triangle)):
            assert _apart(one, other), (width, one, other)
        for box in boxes:
            if box["words"] not in ("forward", "backward"):
                assert 0 <= box["left"], box
                assert box["right"] <= sizes[0] + 3, box
        peak = timeline(solution.plan, solution.problem)
        parts = {f"{role} {format_bytes(row[peak.peak_moment.index])}" for role, row in peak.by_role().items()}
        named = {word for word in words if not word.startswith(("budget", "peak", "forward", "backward"))}
        assert named
        assert named <= parts


def test_links_that_carry_ops_are_drawn_in_lanes_of_their_own(opened: Open) -> None:
    driver = opened(_on_links(), width=390)
    tall = _one(driver, "#links-area").size["height"]
    less = 22 + 12 + 60  # than two lanes and the bytes there
    assert tall == _one(opened(SENDS, width=390), "#links-area").size["height"] - less


@pytest.mark.parametrize("width", [360, 1280])
def test_what_a_legend_says_stands_nearer_to_its_own_entry_than_to_the_next(opened: Open, width: int) -> None:
    driver = opened(_resnet(), width=width)
    gaps = driver.execute_script(
        """const rows = [...document.querySelectorAll(".under .legend li")].map((li) =>
          ["span", ".about"].map((css) => {
            const range = document.createRange();
            range.selectNodeContents(li.querySelector(css));
            return range.getBoundingClientRect();
          }));
        return rows.slice(1).map(([name], i) => [rows[i][1].top - rows[i][0].bottom, name.top - rows[i][1].bottom])"""
    )
    assert len(gaps) >= 4
    assert all(2 * max(own, 0) < next_one for own, next_one in gaps)


def test_hostile_names_do_nothing_but_stand_there(opened: Open) -> None:
    solution = _hostile()
    driver = opened(solution)
    _press(driver, "#memory-area", _keys().HOME, *[_keys().ARROW_RIGHT] * 8)
    _press(driver, "#schedule-area", "r", _keys().ARROW_LEFT)
    _press(driver, "#table-ops thead th:nth-child(1) button", _keys().ENTER)
    assert driver.execute_script("return window.hit") is None
    assert driver.execute_script("return document.scripts.length") == 2
    assert driver.find_elements("css selector", "img, #memory-picture svg, #all-tables svg") == []
    shown = _column(driver, "table-ops", 0)
    for name in (op.name for op in solution.problem.graph.ops[:5]):
        assert _written(name) in shown


def test_everything_has_a_name_for_who_does_not_see_it(opened: Open) -> None:
    driver = opened(_again(), prices=True, frontier=_rows())
    assert driver.find_elements("css selector", "canvas:not([aria-hidden=true])") == []
    tables = driver.execute_script(
        "return [...document.querySelectorAll('table')].map((table) => [table.caption.textContent,"
        " table.querySelectorAll('thead th:not([scope=col]), tbody th:not([scope=row])').length])"
    )
    assert len(tables) == 6
    assert all(caption and not without for caption, without in tables)
    named = "button:not(table *), select, input, [tabindex], nav, section"
    for element in driver.find_elements("css selector", named):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    assert driver.execute_script("return [...document.querySelectorAll('table button')].every((b) => b.textContent)")
    missing = driver.execute_script("""
        const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
        const refs = [...document.querySelectorAll("[aria-describedby], [aria-labelledby], label")].flatMap((e) =>
            [e.getAttribute("aria-describedby"), e.getAttribute("aria-labelledby"), e.getAttribute("for")]
            .filter(Boolean).join(" ").split(" "));
        return [refs.filter((ref) => !ids.includes(ref)), ids.filter((id, i) => ids.indexOf(id) !== i)]""")
    assert missing == [[], []]
    _press(driver, "body a.skip")
    reached = set()
    for _ in range(30):
        driver.switch_to.active_element.send_keys(_keys().TAB)
        reached.add(driver.switch_to.active_element.get_attribute("id"))
    assert {"memory-area", "memory-scale", "memory-readout", "schedule-area"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_ground(opened: Open, scheme: str) -> None:
    driver = opened(_again(), scheme=scheme)
    names = ("ink", "soft", "accent", "paper", "panel", "again", "mark", "focus")
    light = {name: _luminance(driver.execute_script("return colour(arguments[0])", name)) for name in names}
    assert (light["paper"] > 0.5) == (scheme == "light")
    for text in ("ink", "soft", "accent"):
        for ground in ("paper", "panel"):
            low, high = sorted((light[text], light[ground]))
            assert (high + 0.05) / (low + 0.05) >= 4.5
    for sign in ("again", "mark", "focus"):  # lines, of which less is asked
        low, high = sorted((light[sign], light["paper"]))
        assert (high + 0.05) / (low + 0.05) >= 3


def _luminance(colour: str) -> float:
    """Relative, as the Web Content Accessibility Guidelines define it."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.slow
def test_it_prints_in_light_colours_and_is_dark_again_afterwards(opened: Open) -> None:
    driver = opened(_again(), scheme="dark")
    driver.execute_script("addEventListener('beforeprint', () => { window.printed = colour('paper'); })")
    dark = driver.execute_script("return colour('paper')")
    assert base64.b64decode(driver.print_page()).startswith(b"%PDF")
    assert driver.execute_script("return [window.printed, colour('paper')]") == ["#ffffff", dark]


def test_a_step_of_no_seconds_and_no_bytes_is_shown(opened: Open) -> None:
    driver = opened(checkmate.solve(Problem.from_dag([[]], [0.0], [0]), 1))
    assert _one(driver, "#memory-readout h3").text == "op0 (the peak)"
    _press(driver, "#memory-area", "+", "r", _keys().ARROW_RIGHT)
    assert _shown(driver) == 0
    # a first op of no seconds ends where the picture begins: that must not be taken for being out of sight
    driver = opened(checkmate.solve(Problem.from_dag([[], [0], [1]], [0.0, 1.0, 1.0], [1, 0, 0]), 9))
    assert _one(driver, "#memory-readout h3").text == "op0 (the peak)"
    area = _in_sight(driver, "#memory-area")
    _point(driver, area, area.size["width"] // 2 - 16)
    assert _one(driver, "#memory-readout h3").text == "op2"


def test_rows_without_any_plan_are_shown(opened: Open, tmp_path: Path) -> None:
    rows = checkmate.frontier(dags.unit_chain(8), [1, 2], jobs=1)
    driver = opened(_again(), frontier=rows)
    assert driver.find_elements("css selector", "#frontier .legend span")[0].text == "auto (0 of 2 budgets)"
    assert _plans_pointed_at(driver, tmp_path / "plan.html") == ["this plan: peak 4 B, step 26.0 s"]


@pytest.mark.long
def test_thousands_of_ops_open_in_two_seconds(opened: Open, tmp_path: Path) -> None:
    """GPT-2 with 48 layers, 3,836 ops: what the page computes until its last picture is drawn."""
    problem = Problem.from_json(ROOT / "benchmarks" / "problems" / "gpt2-48.json.gz")
    solution = checkmate.solve(problem, int(0.6 * problem.keep_all_peak), method="next-use", time_limit=5)
    driver = opened(solution)
    assert (tmp_path / "plan.html").stat().st_size < 5_000_000
    assert driver.execute_script("return performance.getEntriesByName('drawn').length") == 1
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    assert 0 < next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration") < 2
    _press(driver, "#memory-area", _keys().END)
    line = timeline(solution.plan, problem)
    assert _one(driver, "#memory-readout h3").text == line.moments[-1].name
    assert _shown(driver) == len(line.moments) - 1
