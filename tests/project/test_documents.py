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
from benchmarks import pages
from benchmarks.solve import picture
from checkmate.backends.planner import CompileOptions, Options
from checkmate.units import parse_bytes
from tests.project.test_layers import SOURCES
from tests.support.processes import own_cache, run_fresh_python, run_python
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, CONTRIBUTING = ((ROOT / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING"))
PAGES = {page.stem: page.read_text() for page in sorted(DOCS.glob("*.md"))}


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
    lines = _lines(r"^checkmate ([^#\n]*)", PAGES["fit"]) + _lines(r"`checkmate (.*? .*?)`", README)
    assert len(lines) >= 10
    for line in lines:
        command, *words = line.split()
        shown, _ = shell(f"{command} --help")
        assert all(word in shown for word in words if word.startswith("--"))


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


def test_figures_on_pages_are_those_of_the_committed_rows() -> None:
    """Run ``python -m benchmarks.pages`` where a page is told here."""
    known = pages.figures()
    assert [page.name for page in pages.PAGES if pages.filled(page.read_text(), known) != page.read_text()] == []
    assert {*pages.names_on(pages.PAGES)} == known.keys()
    assert picture.PATH.read_bytes().startswith(b"\x89PNG")


def test_a_figure_is_filled_in_where_it_stands() -> None:
    known = {"one": "1 s", "all": "| a |\n|---|"}
    text = "It takes <!--one-->9 s<!---->.\n\n<!--all-->\n\n<!---->\n"
    told = "It takes <!--one-->1 s<!---->.\n\n<!--all-->\n\n| a |\n|---|\n\n<!---->\n"
    assert pages.filled(text, known) == pages.filled(told, known) == told
    for wrong, says in (("of <!--two-->9<!---->", "no figure 'two'"), ("of\n<!--one-->9<!---->", "begins a line")):
        with pytest.raises(ValueError, match=says):
            pages.filled(wrong, known)


def test_links_of_the_readme_lead_to_a_file_and_a_heading() -> None:
    links = re.findall(r"\]\(((?!https?:)[^)#]+)(?:#([^)]+))?\)", README)
    assert len(links) > 20
    for path, heading in links:
        assert (ROOT / path).exists(), path
        if heading:
            heads = _lines(r"^#+ (.*)$", (ROOT / path).read_text())
            assert heading in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, heading


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


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
    assert "plan.html" in (tmp_path / "look.html").read_text()
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
