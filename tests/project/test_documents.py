"""What the README and CONTRIBUTING say is so."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

import checkmate
from benchmarks.common.rows import read
from checkmate.cli.app import main
from tests.support.processes import run_python
from tests.support.sampling import long, slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FOLDERS = ("checkmate", "solvers", "profiling")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.slow
def test_the_first_example_runs_and_prints_what_the_readme_shows() -> None:
    """Times, and what follows from them (a proof within the time as well), differ; the lines and the counts do not."""
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", README, flags=re.DOTALL)[:2]
    run = run_python("-c", code)
    printed = run.stdout.strip()
    assert [line[:13] for line in printed.splitlines()[1:]] == [line[:13] for line in shown.strip().splitlines()[1:]]
    for what in (r"^  budget .*", r"of \d+ ops"):
        what = re.compile(what, flags=re.MULTILINE)
        assert re.findall(what, printed) == re.findall(what, shown) != []


@pytest.mark.slow
@pytest.mark.long
def test_the_example_of_the_largest_batch_runs() -> None:
    """To the letter, but for the seconds that it took; a busy machine may not come to the end in time."""
    blocks = re.findall(r"```(?:python)?\n(.*?)```", README, flags=re.DOTALL)
    code, shown = next(pair for pair in pairwise(blocks) if "found =" in pair[0])
    run = run_python("-c", code)
    took = r"found in .*"
    assert re.sub(took, "", run.stdout) == re.sub(took, "", shown) or "ended by time limit" in run.stdout
    assert float(re.findall(r"so (.*) times as large", run.stdout)[0]) > 1.5


def test_the_commands_of_the_readme_are_ones_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^checkmate (.*?) *#", README, flags=re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        command, *words = line.split()
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words if word.startswith("--"))


def test_every_room_has_its_line() -> None:
    folders = {source.parent for folder in FOLDERS for source in ROOT.glob(f"{folder}/**/*.py")}
    rooms = {f"{folder.relative_to(ROOT).as_posix()}/" for folder in folders} - {"checkmate/"}
    lines = re.findall(r"^\| `((?:checkmate|solvers|profiling)/(?:.*/)?)` \|", CONTRIBUTING, flags=re.MULTILINE)
    assert sorted(lines) == sorted(rooms)


def test_what_it_names_is_there() -> None:
    for path in re.findall(r"`((?:checkmate|solvers|profiling|tests)/[\w/.]*)`", CONTRIBUTING):
        assert (ROOT / path).exists(), path


def test_every_command_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make (\w+)", README + CONTRIBUTING)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_committed_rows_keep_their_promises() -> None:
    rows = read(ROOT / "benchmarks" / "results" / "step.jsonl")
    assert all(row["bitwise"] and row["measured_peak"] == row["predicted_peak"] <= row["budget"] for row in rows)


def test_the_figures_of_the_largest_batch_come_from_the_committed_rows() -> None:
    rows = read(ROOT / "benchmarks" / "results" / "largest_batch.jsonl")
    sizes = {(row["network"], row["size"], row["keep_all"]) for row in rows}
    shown = re.findall(r"(VGG-19|ResNet-50|MobileNetV2|U-Net|FCN-8|SegNet)(?: takes)? (\d+)\D+?(\d+)", README)
    assert len(shown) == 6
    assert {(name.replace("-", "").lower(), int(size), int(kept)) for name, size, kept in shown} <= sizes


def test_the_figures_of_losses_in_parts_come_from_the_committed_rows() -> None:
    ways, rows = (read(ROOT / "benchmarks" / "results" / f"{name}.jsonl") for name in ("loss", "splits"))
    written = {
        f"| {row['network']} | {row['keep_all'] / 1e9:.2f} GB | {row['before'] / 1e9:.2f} GB "
        f"| {row['after'] / 1e9:.2f} GB | {1 - row['after'] / row['before']:.1%} "
        f"| {row['split_seconds'] / row['seconds'] - 1:.1%} |"
        for row in rows
    }
    assert all(row["same_bits"] for row in ways if row["way"].startswith("checkmate"))
    for row in ways:
        numbers = "same bits" if row["same_bits"] else f"differ by {row['difference']:.0e}"
        written.add(f"| {row['way']} | {row['peak'] / 1e6:.1f} MB | {row['ratio']:.2f} | {numbers} |")
    shown = re.findall(r"^\| .* \|$", (ROOT / "docs" / "loss.md").read_text(), flags=re.MULTILINE)
    figures = [line for line in shown if re.search(r"\d", line)]
    assert len(figures) >= 8
    assert {*figures} <= written


def test_the_figures_of_ops_in_parts_come_from_the_committed_rows() -> None:
    rows = read(ROOT / "benchmarks" / "results" / "splits.jsonl")
    measured = [row for row in rows if row["measured"]]
    assert measured
    assert all(row["measured_peak"] <= row["after"] for row in measured)
    assert all(row["same_bits"] or row["numerics"] == "rounding" for row in measured)
    written = set()
    for row in rows:
        unit, name = (1e6, "MB") if row["measured"] else (1e9, "GB")
        digits = 1 if row["measured"] else 2
        sizes = " | ".join(f"{row[key] / unit:.{digits}f} {name}" for key in ("keep_all", "before", "after"))
        gain, longer = 1 - row["after"] / row["before"], row["split_seconds"] / row["seconds"] - 1
        written.add(f"| {row['network']} | {sizes} | {gain:.1%} | {longer:.1%} |")
    shown = re.findall(r"^\| .* \|$", (ROOT / "docs" / "splits.md").read_text(), flags=re.MULTILINE)
    figures = [line for line in shown if re.search(r"\d", line)]
    assert len(figures) >= 8
    assert {*figures} <= written


def test_the_figures_of_planning_come_from_the_committed_rows() -> None:
    rows = read(ROOT / "benchmarks" / "results" / "solve.jsonl")
    rows = [row for row in rows if row["method"] == "auto" and row.get("cost_ratio")]
    written = {
        f"| {row['graph']} | {row['ops']} | {row['share']:.0%} | {row['cost_ratio'] - 1:.1%} | {row['gap']:.2%} "
        f"| {row['first_plan_seconds']:.1f} s | {row['seconds']:.1f} s |"
        for row in rows
    }
    shown = re.findall(r"^\| \w[\w-]* \| \d+ \| .* s \|$", README, flags=re.MULTILINE)
    assert len(shown) >= 8
    assert set(shown) <= written


def test_the_figures_of_the_stages_come_from_the_committed_table() -> None:
    idea, table = (ROOT / "docs" / "idea.md").read_text(), (ROOT / "benchmarks/results/stages.md").read_text()
    said = idea.partition("**What each stage is worth**")[2].partition("**The gap**")[0]
    figures = re.findall(r"\d+\.\d+", said)
    assert len(figures) >= 8
    assert set(figures) <= set(re.findall(r"\d+\.\d+", table))


@pytest.mark.parametrize("page", [slow("idea"), long("guide")])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    assert examples
    script = tmp_path / "page.py"
    script.write_text("\n".join(examples))
    run_python(str(script), CHECKMATE_CACHE_DIR=str(tmp_path), PYTHONPATH=str(ROOT))


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    shown = re.findall(r"^\.\. auto\w+:: checkmate\.(\w+)", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    errors = {
        node.name
        for node in ast.parse((ROOT / "checkmate" / "errors.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert errors <= set(checkmate.__all__)
    assert {*shown} >= {*checkmate.__all__} - errors


@pytest.mark.slow
def test_the_pages_can_be_made_and_all_their_links_lead_somewhere(tmp_path: Path) -> None:
    run_python("-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path))
    page = (tmp_path / "api.html").read_text()
    assert 'id="checkmate.compile"' in page
    assert "checkmate.explain_peak" in page
