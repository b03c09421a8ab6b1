"""README, pages and CONTRIBUTING say what is so, and scripts of ``examples/`` take the bytes that they plan."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from inspect import Parameter, signature
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from docutils import nodes

import checkmate
from benchmarks.common.rows import latest, read
from benchmarks.solve import picture
from benchmarks.start.seconds import LOOP
from checkmate.backends.planner import CompileOptions, Options
from checkmate.units import format_bytes, parse_bytes
from tests.project.test_layers import SOURCES
from tests.support.processes import own_cache, run_fresh_python, run_python
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, CONTRIBUTING = ((ROOT / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING"))
PAGES = {page.stem: page.read_text() for page in sorted(DOCS.glob("*.md"))}
FIGURES = PAGES["figures"]


def _rows(name: str) -> list[dict[str, Any]]:
    return read(ROOT / "benchmarks" / "results" / f"{name}.jsonl")


def _blocks(page: str, kinds: str) -> list[str]:
    return re.findall(rf"```(?:{kinds})\n(.*?)```", PAGES[page], flags=re.DOTALL)


def _lines(pattern: str, text: str) -> list[Any]:
    """All places of a pattern, in which ^ and $ are the ends of a line."""
    return re.findall(pattern, text, flags=re.MULTILINE)


@pytest.mark.long
def test_the_example_of_the_largest_batch_runs() -> None:
    """To the letter, but for the seconds that it took; a busy machine may not come to the end in time."""
    code, shown = next(pair for pair in pairwise(_blocks("fit", "python|text")) if "max_batch_size(" in pair[0])
    run = run_python("-c", f"import torch\nimport checkmate\n{code}")
    took = r"found in .*"
    assert re.sub(took, "", run.stdout) == re.sub(took, "", shown) or "ended by time limit" in run.stdout
    assert float(re.findall(r"so (.*) times as large", run.stdout)[0]) > 1.5


def test_the_commands_of_the_pages_are_ones_that_it_knows(shell: Any) -> None:
    lines = _lines(r"^checkmate ([^#\n]*)", PAGES["another_machine"]) + _lines(r"`checkmate (.*? .*?)`", README)
    assert len(lines) >= 10
    for line in lines:
        command, *words = line.split()
        shown, _ = shell(f"{command} --help")
        assert all(word in shown for word in words if word.startswith("--"))


def test_figures_of_a_model_that_is_larger_than_its_memory() -> None:
    row = _rows("in_file")[-1]
    assert row["same_bits"]
    assert row["planned_peak"] <= row["budget_bytes"] < row["limit_bytes"] < row["homes_bytes"]
    for name in ("homes_bytes", "limit_bytes", "budget_bytes", "peak", "first_peak"):
        assert format_bytes(row[name]) in FIGURES
    assert f"A step takes {row['seconds']:.1f} s, and one of plain" in FIGURES
    assert f"in memory {row['plain_seconds']:.1f} s" in FIGURES.replace("\n", " ")


def test_figures_of_a_model_in_the_ram_of_a_small_gpu() -> None:
    for row in latest(_rows("fits"), "call", "device"):
        if row["device"] == "rtx4090":
            batch, tokens = map(int, row["call"].split("x"))
            there, seconds = row["host_bytes"] / 1e9, row["seconds"] - row["trace_seconds"]
            said = f"{there:.1f} GB | {row['speed']:.2f} | {row['speed_bound']:.2f} | {seconds:.0f} |"
            assert f"| {batch} x {tokens:,} | {said}" in PAGES["fit"]
        else:
            assert row["way"] == "recomputation"


def test_the_files_of_the_main_path_say_that_they_are() -> None:
    named = re.findall(r"(\d+) `([\w/]+\.py)`", PAGES["idea"])
    said = {}
    for file in SOURCES.values():
        for place in _lines(r"^On the main path, (\d+ of \d+): see docs/idea.md", file.read_text()):
            said[place] = file
    assert {f"{place} of {len(named)}": ROOT / path for place, path in named} == said


def test_what_contributing_names_is_there_and_every_room_has_its_line() -> None:
    rooms = {f"{file.parent.relative_to(ROOT).as_posix()}/" for file in SOURCES.values()} - {"checkmate/"}
    assert sorted(_lines(r"^\| `((?:checkmate|solvers|profiling)/(?:.*/)?)` \|", CONTRIBUTING)) == sorted(rooms)
    for path in re.findall(r"`((?:checkmate|solvers|profiling|tests)/[\w/.]*)`", CONTRIBUTING):
        assert (ROOT / path).exists(), path
    targets = {*_lines(r"^(\w+):", (ROOT / "Makefile").read_text())}
    assert {*re.findall(r"`make (\w+)", README + CONTRIBUTING)} <= targets


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_figures_of_the_largest_batch_come_from_the_committed_rows() -> None:
    sizes = {(row["network"], row["size"], row["keep_all"]) for row in _rows("largest_batch")}
    shown = re.findall(r"(VGG-19|ResNet-50|MobileNetV2|U-Net|FCN-8|SegNet)(?: takes)? (\d+)\D+?(\d+)", FIGURES)
    assert len(shown) == 6
    assert {(name.replace("-", "").lower(), int(size), int(kept)) for name, size, kept in shown} <= sizes


def test_the_figures_of_losses_in_parts_come_from_the_committed_rows() -> None:
    ways, rows = _rows("loss"), _rows("gpu_graphs")
    written = {
        f"| {row['network']} | {row['keep_all'] / 1e9:.2f} GB | {row['least'] / 1e9:.2f} GB "
        f"| {row['least_in_parts'] / 1e9:.2f} GB | {1 - row['least_in_parts'] / row['least']:.1%} |"
        for row in rows
        if row["kind"] == "float32"
    }
    assert all(row["same_bits"] for row in ways if row["way"].startswith("checkmate"))
    for row in ways:
        numbers = "same bits" if row["same_bits"] else f"differ by {row['difference']:.0e}"
        written.add(f"| {row['way']} | {row['peak'] / 1e6:.1f} MB | {row['ratio']:.2f} | {numbers} |")
    shown = _lines(r"^\| .* \|$", PAGES["loss"])
    figures = [line for line in shown if re.search(r"\d", line) and not re.match(r"\| (\d+|terms) \|", line)]
    assert len(figures) >= 8
    assert {*figures} <= written


def test_the_figures_of_what_no_longer_runs_in_parts_come_from_the_committed_rows() -> None:
    before = {(row["network"], row["numerics"]): row for row in _rows("splits")}
    for name in {name for name, _ in before}:
        exact, rounding = before[name, "exact"], before.get((name, "rounding"))
        unit, kind = (1e6, ".1f} MB") if exact["measured"] else (1e9, ".2f} GB")
        shown = [exact["before"], exact["after"], None if rounding is None else rounding["after"]]
        cells = ["" if n is None else f"{{:{kind}".format(n / unit) for n in shown]
        assert f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |") in FIGURES


def test_the_figures_of_orders_of_sums_come_from_the_committed_rows() -> None:
    orders = [row for row in _rows("orders") if row["case"] == "orders"]
    shares = {(row["capability"], row["terms"], row["dtype"]): f"{100 * row['cancelling']:.1f}" for row in orders}
    kinds = [(on, kind) for on in ("AVX512", "AVX2") for kind in ("float32", "float64", "bfloat16", "float16")]
    for terms in {row["terms"] for row in orders}:
        assert f"| {terms} | {' | '.join(shares[on, terms, kind] for on, kind in kinds)} |" in PAGES["loss"]


def test_the_figures_and_the_picture_of_planning_come_from_the_committed_rows() -> None:
    rows = [row for row in _rows("solve") if row["method"] == "auto" and row.get("cost_ratio")]
    written = {
        f"| {row['graph']} | {row['ops']} | {row['share']:.0%} | {row['cost_ratio'] - 1:.1%} | {row['gap']:.2%} "
        f"| {row['first_plan_seconds']:.1f} s | {row['seconds']:.1f} s |"
        for row in rows
    }
    shown = _lines(r"^\| \w[\w-]* \| \d+ \| \d+% \| .* s \|$", FIGURES)
    assert len(shown) >= 8
    assert {*shown} <= written
    drawn = [row for row in _rows("gpu_graphs") if (row["network"], row["kind"]) == (picture.NETWORK, "float32")][-1]
    assert f"for {drawn['overhead_at_half']:.1%} more time" in README
    assert f"({picture.PATH.relative_to(ROOT)})" in README
    assert picture.PATH.read_bytes().startswith(b"\x89PNG")


def test_the_figures_of_the_stages_come_from_the_committed_table() -> None:
    said = PAGES["idea"].partition("**What each stage is worth**")[2].partition("**The gap**")[0]
    table = (ROOT / "benchmarks/results/stages.md").read_text()
    shown, written = (re.findall(r"\d+\.\d+", text) for text in (said, table))
    assert len(shown) >= 8
    assert {*shown} <= {*written}


def test_the_figures_of_first_steps_come_from_the_committed_rows() -> None:
    rows = (row for row in _rows("start") if not row.get("times"))
    first = {(r["model"], r["by"], r["start"]): r for r in latest(rows, "model", "by", "start", "own_seconds", "batch")}
    shown = _lines(r"^\| ([\w-]+) \| (\d.* s) \|$", FIGURES.partition("Near the smallest budget")[0])
    assert len(shown) == 4
    for name, figures in shown:
        ours, later = (first[name, "checkmate", start] for start in ("cold", "warm"))
        theirs = first[name, "aot_eager", "cold"]
        seconds = [ours[f"{part}_seconds"] for part in ("step", "measure", "plan")]
        assert figures == " | ".join(f"{s:.1f} s" for s in (*seconds, later["step_seconds"], theirs["step_seconds"]))


def test_the_figures_of_a_long_loop_come_from_the_committed_rows() -> None:
    rows = {(row["by"], row["start"]): row for row in _rows("start") if row["model"] == LOOP}
    ours, theirs, later = rows["checkmate", "cold"], rows["aot_eager", "cold"], rows["checkmate", "warm"]
    capture = [ours[f"{part}_seconds"] for part in ("dynamo", "aot")]
    thousand = sum(capture) / ours["ops"] * 1000
    seconds = (ours["step_seconds"], *capture, theirs["step_seconds"], later["step_seconds"])
    shown = " | ".join([f"{ours['ops']:,}", *(f"{s:.1f} s" for s in seconds), f"{thousand:.1f} s"])
    assert f"| {LOOP} | {shown} |" in FIGURES
    assert f"{thousand:.1f} s for each thousand ops" in PAGES["supported"]


def test_the_figures_of_planning_near_the_smallest_budget_come_from_the_committed_rows() -> None:
    rows = latest((row for row in _rows("start") if row.get("times")), "model", "times")
    found = {(row["model"], row["times"]): row for row in rows}
    times = sorted({times for _, times in found})
    assert f"| network | ops | {' | '.join(f'{n:g} x' for n in times)} |" in FIGURES
    names = {name for name, _ in found}
    assert len(names) == 8
    for name in names:
        assert all(found[name, n]["peak"] <= found[name, n]["budget"] for n in times)
        seconds = " | ".join(f"{found[name, n]['plan_seconds']:.1f} s" for n in times)
        assert f"| {name} | {found[name, times[-1]]['ops']} | {seconds} |" in FIGURES


def test_the_figures_of_steps_on_a_gpu_come_from_the_committed_rows() -> None:
    found = {(row["network"], row["kind"]): row for row in latest(_rows("gpu_graphs"), "network", "kind")}

    def cells(row: dict[str, Any]) -> str:
        if "refused" in row:
            return "refused |  | "
        of_text = row["network"].startswith(("bert", "gpt2", "t5"))  # other rows are of when more ran in parts
        least = row["least_in_parts"] if of_text else row["least"]
        sizes = f"{row['keep_all'] / 1e9:.2f} GB | {least / 1e9:.2f} GB{'*' if least < row['least'] else ''}"
        return f"{sizes} | {1e3 * row['seconds']:.1f} ms"

    names = dict.fromkeys(name for name, _ in found)
    assert len(names) == 11
    for name in names:
        assert f"| {name} | {cells(found[name, 'float32'])} | {cells(found[name, 'bfloat16'])} |" in FIGURES


def test_the_picture_speaks_to_who_sees_it_first() -> None:
    problem = checkmate.Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], [1] * 5, [4] * 5, forward=3)
    plain = checkmate.solve(problem, problem.keep_all_peak, method="checkpoint-all")
    ax = picture.draw(checkmate.solve(problem, problem.keep_all_peak - 4), plain)
    said = [text.get_text() for text in (*ax.texts, *ax.get_legend().get_texts())]
    assert "the same numbers" in ax.get_title()
    assert any(text.startswith("plain PyTorch: peak ") for text in said)
    assert {"budget 12 B", "activations: made by the forward", "made again: recomputed"} <= {*said}
    assert not any("checkpoint-all" in text for text in said)


IN_THE_SUITE = ("idea", "train")  # the examples of the other pages take longer
OTHERS = [page for page, text in PAGES.items() if "```python\nimport" in text and page not in IN_THE_SUITE]


@pytest.mark.parametrize("page", [*map(slow, IN_THE_SUITE), *(long(page) for page in OTHERS if page != "ecosystem")])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    examples = _blocks(page, "python")
    assert examples
    script = tmp_path / "page.py"
    script.write_text("\n".join(examples))
    run_python(str(script), CHECKMATE_CACHE_DIR=own_cache(tmp_path / "cache"), PYTHONPATH=str(ROOT))


NO_OPTIONS = {"fn", "loss_fn", "optimizer", "problem", "make_step", "make_batch", "options"}


def _options(call: Callable[..., Any]) -> dict[str, str]:
    """The options of a call with their defaults, as the table writes them."""
    given = {
        name: parameter.default
        for name, parameter in signature(call).parameters.items()
        if name not in NO_OPTIONS and parameter.kind is not Parameter.VAR_KEYWORD
    }
    if call in (checkmate.compile, checkmate.training_step):
        defaults = {field.name: field.default for field in fields(Options)}
        given |= {name: defaults[name] for name in CompileOptions.__optional_keys__}
    cell = lambda default: "required" if default is Parameter.empty else f"`{default!r}`".replace("'", '"')  # noqa: E731
    return {name: cell(default) for name, default in given.items()}


def test_the_table_of_options_has_all_of_them_with_their_defaults() -> None:
    rows = _lines(r"^\| `(\w+)` \|(.*)\|$", PAGES["options"])
    calls = (checkmate.compile, checkmate.training_step, checkmate.solve, checkmate.max_batch_size)
    for column, call in enumerate(calls, start=1):
        cells = {name: line.split("|")[column].strip() for name, line in rows}
        assert {name: cell for name, cell in cells.items() if cell} == _options(call), call.__name__
    assert all(len(line.split("|")) == 5 and line.split("|")[0].strip() for _, line in rows)


def _texts() -> Iterator[str]:
    """All texts of the code, with an ellipsis for what is filled in."""
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_the_page_of_refusals_are_those_of_the_code() -> None:
    listed, texts = _lines(r"^\| `(.+?)` \|", PAGES["refusals"]), [*_texts()]
    assert [message for message in listed if not any(message in text for text in texts)] == []
    assert len(listed) > 70


def test_every_error_is_on_the_page_of_refusals_and_every_public_name_on_that_of_the_api() -> None:
    errors = {*_lines(r"^class (\w+)", (ROOT / "checkmate" / "errors.py").read_text())}
    assert {*_lines(r"^## (\w+Error|\w+): ", PAGES["refusals"])} == errors - {"CheckmateError"}
    assert {*_lines(r"^\.\. auto(?:class|function):: checkmate\.(\w+)$", PAGES["api"])} == {*checkmate.__all__}


def test_pages_shrink_with_the_window_and_load_nothing_from_a_network() -> None:
    settings, css = run_path(str(DOCS / "conf.py")), (DOCS / "_static" / "pages.css").read_text()
    loaded = [*settings["html_css_files"], *settings.get("html_js_files", ())]
    assert not [
        name for name in (*loaded, *_lines(r"@import|url\(", css)) if "//" in name or name in ("@import", "url(")
    ]
    assert settings["html_math_renderer"] == "mathml"
    assert "sphinx.ext.mathjax" not in settings["extensions"]
    # A column shrinks unless it has a width of its own, or the least width of what it holds.
    rules = dict(_lines(r"^(\S.*?) { (.*) }$", css))
    assert "min-width: 0" in rules[".main, .content"]
    assert not re.search(r"(?<!-)width", rules[".content"])
    # Each formula is drawn, with its tag.
    formulas = re.findall(r"\$\$(.+?)\$\$", PAGES["idea"], flags=re.DOTALL)
    assert len(formulas) > 10
    for tex in formulas:
        writer = SimpleNamespace(body=[])
        with pytest.raises(nodes.SkipNode):
            settings["write_math"](writer, nodes.math_block(tex, tex))
        (html,) = writer.body
        assert "<math" in html
        assert ("eqno" in html) == (r"\tag" in tex)


@pytest.mark.slow
def test_the_pages_can_be_made_and_all_their_links_lead_somewhere(tmp_path: Path) -> None:
    run_fresh_python("-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path))
    for path in tmp_path.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=.(?:https?:)?//.*", path.read_text()), path
    page = (tmp_path / "api.html").read_text()
    assert 'id="checkmate.compile"' in page
    assert "checkmate.explain_peak" in page
    assert "plan.html" in (tmp_path / "report.html").read_text()
    assert "uPlot" in (tmp_path / "_static" / "plan.html").read_text()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        rendered = (tmp_path / "made" / "notebooks" / f"{notebook.stem}.html").read_text()
        assert 'class="cell_output' in rendered
        assert ".png" in rendered


@pytest.mark.parametrize("name", ["long.txt", "slow.txt"])
def test_what_is_listed_as_long_or_slow_is_there(name: str) -> None:
    listed = (ROOT / "tests" / name).read_text().splitlines()[1:]
    assert listed == sorted({*listed})
    functions = cache(lambda file: {*_lines(r"^ *def (\w+)", (ROOT / file).read_text())})
    for test in listed:
        file, *_, function = test.partition("[")[0].split("::")
        assert function.rpartition(".")[2] in functions(file), f"{test} is there no more: python -m tests.suite.long"


NAMES = ("gpt2", "resnet", "lora", "lengths", "diffusion", "lightning_callback", "whole_step", "second_memory")
PRINTED = re.compile(r"^(?:plain \S+ takes|planned are|measured are) ([\d.]+ \w?B)", re.MULTILINE)


def test_every_script_is_run_here_or_by_torchrun() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*NAMES, "ranks"}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_script_takes_what_was_planned_or_less(name: str) -> None:
    printed = run_python(str(ROOT / "examples" / f"{name}.py")).stdout
    figures = [*map(parse_bytes, PRINTED.findall(printed))]
    assert figures
    for plain, planned, measured in zip(*[iter(figures)] * 3, strict=True):
        assert measured <= planned < plain
