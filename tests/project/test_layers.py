"""Rooms import one way: each only those before it, as CONTRIBUTING.md lists them."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import checkmate
from tests.project.lines import MOST, ROOT, TOPS, by_folder, files

ROOMS = (  # each imports itself and rooms of lines above it; those of one line know nothing of each other
    ("errors", "version", "statusline"),
    ("units", "torch_internals"),
    ("core", "devices"),
    ("memory", "tags", "host"),
    ("capture", "solvers.common"),
    ("solvers.linear",),
    ("solvers.search",),
    ("solvers.baselines", "solvers.host"),
    ("solvers",),
    ("codegen", "profiling", "look", "updates"),
    ("backends", "plot"),
    ("verification",),
    ("compiler",),
    ("training",),
    ("tracing",),
    ("dynamo", "sizes", "step_costs", "demo"),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
LINE = {room: number for number, line in enumerate(ROOMS) for room in line}
WITHOUT_TORCH = {
    *("errors", "version", "statusline", "units", "core", "look", "plot", "__init__"),
    *("solvers", "solvers.common", "solvers.linear", "solvers.search", "solvers.baselines", "solvers.host"),
}


def _module(source: Path) -> str:
    """A file's name as it is imported, through the links ``checkmate/solvers`` and ``checkmate/profiling``."""
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "checkmate" else ("checkmate", *parts))


SOURCES = {_module(file).removesuffix(".__init__"): file for file in files()}


@functools.cache
def _imports(source: Path) -> tuple[str, ...]:
    """Every module imported anywhere: at the top, within functions, and for type checkers only."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def _module_of(name: str) -> str | None:
    """The module that a dotted name is, or is in."""
    while name not in SOURCES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in SOURCES else None


def _room(module: str) -> str:
    _, first, *rest = (*module.split("."), "__init__")[:4]
    return f"solvers.{rest[0]}" if first == "solvers" and f"solvers.{rest[0]}" in LINE else first


def _wrong_imports(module: str) -> Iterator[str]:
    room = _room(module)
    if room not in LINE and room != "__init__":
        yield f"{module}: a new room needs its line in ROOMS"
        return
    for name in _imports(SOURCES[module]):
        top = name.split(".")[0]
        if top in ("solvers", "profiling"):
            yield f"{module}: write checkmate.{name}"
        target = _module_of(name) if top == "checkmate" and room != "__init__" else None
        apart = _room(target) if target is not None and _room(target) != room else None
        if (apart is not None and LINE[apart] >= LINE[room]) or (
            room in WITHOUT_TORCH and (top == "torch" or (apart is not None and apart not in WITHOUT_TORCH))
        ):
            yield f"{module} imports {name}"


def test_a_room_imports_only_those_before_its_own() -> None:
    assert [wrong for module in SOURCES for wrong in _wrong_imports(module)] == []


def test_no_circle_of_files() -> None:
    arrows = [(module, _module_of(name)) for module, source in SOURCES.items() for name in _imports(source)]
    graph = nx.DiGraph((module, target) for module, target in arrows if target not in (None, module))
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_a_room_is_no_larger_than_a_person_can_keep_in_mind() -> None:
    """The product has no more lines than agreed, and a room has 15 files at most."""
    lines, in_room = by_folder(), Counter(source.parent for source in SOURCES.values())
    assert {folder.split("/")[0] for folder in lines} == {*TOPS}
    assert lines.total() <= MOST
    assert {str(folder): count for folder, count in in_room.items() if count > 15} == {}


@pytest.mark.parametrize("folder", ["solvers", "profiling"])
def test_the_two_folders_are_linked_and_no_regular_packages(folder: str) -> None:
    assert (ROOT / "checkmate" / folder).readlink() == Path("..") / folder
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_rooms_bear_no_name_of_a_public_function() -> None:
    assert {room.partition(".")[0] for room in LINE} & {*checkmate.__all__} <= {"memory", "plot"}
