"""Who may import whom: each room only what stands before it, as CONTRIBUTING.md draws it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {
        "errors",
        "ctc",
        "cudnn",
        "figures",
        "folding",
        "formulas",
        "provenance",
        "reasons",
        "recurrent",
        "randomness",
        "statusline",
        "version",
    },
    {"units", "asking", "autocast", "display", "target", "fake", "layouts", "memory", "runtime", "files"},
    {"earlier", "graph", "kernels", "messages", "nodes", "questions", "rewrite"},
    {"admitted", "problem", "devices", "numbers", "predicates", "undefined"},
    {"schedule", "aliases", "fan", "costs", "results", "speaking", "state"},
    {"plan", "contributions"},
    {"solution", "timeline"},
    {"solvers", "capture", "throughput", "records", "plot_graph", "difference"},
    {"profiling", "codegen", "ranks", "plot", "peak"},
    {"writes"},
    {"backend", "report_data"},
    {"captures", "divergence", "inductor", "report"},
    {"verification"},
    {"compiler"},
    {"dynamo", "explanation", "sized_steps"},
    {"batch", "doctor"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
INSIDE_FUNCTIONS = {  # for short cuts in the user's interface
    ("checkmate/problem.py", "checkmate.solvers.solve"),
    ("checkmate/solution.py", "checkmate.peak"),
    ("checkmate/solution.py", "checkmate.report"),
    ("checkmate/costs.py", "checkmate.compiler"),
}
WITHOUT_TORCH = {
    "errors",
    "units",
    "graph",
    "problem",
    "schedule",
    "plan",
    "solution",
    "solvers",
    "__init__",
    "costs",
    "difference",
    "display",
    "files",
    "folding",
    "figures",
    "peak",
    "plot",
    "plot_graph",
    "report",
    "report_data",
    "timeline",
    "records",
    "statusline",
    "throughput",
    "version",
}
SOURCES = [*sorted((ROOT / "checkmate").glob("*.py")), *sorted((ROOT / "solvers").glob("*.py"))]
SOURCES += sorted((ROOT / "profiling").glob("*.py"))


def _imports(source: Path) -> Iterator[tuple[str, bool]]:
    """Each module imported at run time, and whether inside a function; what only type checkers see is left out."""
    tree = ast.parse(source.read_text())
    unseen = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    hidden = {id(child) for node in unseen for child in ast.walk(node)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {id(child) for node in functions for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inner) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # from checkmate import plan
            yield from ((n if node.module == "checkmate" else str(node.module), id(node) in inner) for n in names)


def _room(source: Path) -> str:
    return source.stem if source.parent.name == "checkmate" else source.parent.name


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_imports_only_what_stands_before_it(source: Path) -> None:
    room = _room(source)
    for module, inside in _imports(source):
        top, *rest = module.split(".")
        assert top != "torch" or room not in WITHOUT_TORCH, f"{source} imports {module}"
        assert top not in ("solvers", "profiling"), f"{source}: write checkmate.{module}"
        if top != "checkmate" or room == "__init__" or (inside and _allowed(source, module)):
            continue
        assert {room, rest[0]} != {"solvers", "profiling"}, f"{source} imports {module}"
        assert rest[0] == room or LAYER_OF[rest[0]] < LAYER_OF[room], f"{source} imports {module}"


def _allowed(source: Path, module: str) -> bool:
    return (source.relative_to(ROOT).as_posix(), module) in INSIDE_FUNCTIONS


@pytest.mark.parametrize("folder", ["solvers", "profiling"])
def test_the_two_links_are_there(folder: str) -> None:
    assert (ROOT / "checkmate" / folder).readlink() == Path("..") / folder


@pytest.mark.parametrize("folder", ["solvers", "profiling"])
def test_the_two_folders_are_no_regular_packages(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()
