"""Rooms import one way: each only those before it, as CONTRIBUTING.md lists them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import checkmate
from tests.project.lines import MOST, by_folder
from tests.project.lines import ROOMS as TOPS

ROOT = Path(__file__).parents[2]
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
    ("codegen", "profiling", "inspection", "updates"),
    ("backends", "plot"),
    ("verification", "webpage"),
    ("compiler",),
    ("training",),
    ("tracing",),
    ("costs", "dynamo", "batch", "demo"),
    ("selftest", "fitting", "integrations"),
    ("cli",),
    ("__main__",),
)
LINE = {room: number for number, line in enumerate(ROOMS) for room in line}
WITHOUT_TORCH = {
    *("errors", "version", "statusline", "units", "core", "inspection", "plot", "webpage", "__init__"),
    *("solvers", "solvers.common", "solvers.linear", "solvers.search", "solvers.baselines", "solvers.host"),
}


def _module(source: Path) -> str:
    """A file's name as it is imported, through the links ``checkmate/solvers`` and ``checkmate/profiling``."""
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "checkmate" else ("checkmate", *parts))


FOLDERS = [path for path in (ROOT / "checkmate").iterdir() if path.is_dir() and not path.is_symlink()]
FILES = [*(ROOT / "checkmate").glob("*.py"), *(file for folder in FOLDERS for file in folder.rglob("*.py"))]
FILES += [*(ROOT / "solvers").rglob("*.py"), *(ROOT / "profiling").rglob("*.py")]
SOURCES = {_module(file).removesuffix(".__init__"): file for file in sorted(FILES)}


def _imports(source: Path) -> Iterator[str]:
    """Every module imported anywhere: at the top, within functions, and for type checkers only."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(name: str) -> str | None:
    """The module that a dotted name is, or is in."""
    while name not in SOURCES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in SOURCES else None


def _room(module: str) -> str:
    _, first, *rest = (*module.split("."), "__init__")[:4]
    return f"solvers.{rest[0]}" if first == "solvers" and f"solvers.{rest[0]}" in LINE else first


def _arrows() -> Iterator[tuple[str, str]]:
    for module, source in SOURCES.items():
        for target in {_file_of(name) for name in _imports(source)} - {None, module}:
            yield module, target


def _wrong_imports(module: str) -> Iterator[str]:
    room = _room(module)
    if room not in LINE and room != "__init__":
        yield f"{module}: a new room needs its line in ROOMS"
        return
    for name in _imports(SOURCES[module]):
        top = name.split(".")[0]
        if top in ("solvers", "profiling"):
            yield f"{module}: write checkmate.{name}"
        target = _file_of(name) if top == "checkmate" and room != "__init__" else None
        apart = _room(target) if target is not None and _room(target) != room else None
        if (apart is not None and LINE[apart] >= LINE[room]) or (
            room in WITHOUT_TORCH and (top == "torch" or (apart is not None and apart not in WITHOUT_TORCH))
        ):
            yield f"{module} imports {name}"


def test_a_room_imports_only_those_before_its_own() -> None:
    assert [wrong for module in SOURCES for wrong in _wrong_imports(module)] == []


def test_no_circle_of_files() -> None:
    circles = [sorted(c) for c in nx.strongly_connected_components(nx.DiGraph(_arrows())) if len(c) > 1]
    assert circles == []


def test_a_room_is_no_larger_than_a_person_can_keep_in_mind() -> None:
    """And the product has no more lines than agreed."""
    counts = by_folder()
    assert {folder.split("/")[0] for folder in counts} == {*TOPS}
    assert counts.total() <= MOST
    folders = {source.parent for source in SOURCES.values()}
    assert {str(f.relative_to(ROOT)): n for f in folders if (n := len([*f.glob("*.py")])) > 15} == {}


@pytest.mark.parametrize("folder", ["solvers", "profiling"])
def test_the_two_folders_are_linked_and_no_regular_packages(folder: str) -> None:
    assert (ROOT / "checkmate" / folder).readlink() == Path("..") / folder
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_rooms_bear_no_name_of_a_public_function() -> None:
    assert {room.partition(".")[0] for room in LINE} & {*checkmate.__all__} <= {"memory", "plot"}
