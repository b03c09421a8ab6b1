"""Private names of PyTorch are known, found where they are, and refused where they are not."""

from __future__ import annotations

import ast
import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import checkmate.torch_internals as room
from checkmate.backends import capture_cache as _all_patches  # noqa: F401  # which puts them in place
from checkmate.errors import Unsupported
from checkmate.torch_internals import names
from checkmate.torch_internals.names import LacksError, Name, Table
from tests.project.test_layers import SOURCES
from tests.support.processes import run_fresh_python

_OURS = "checkmate.torch_internals"
MODULES = [importlib.import_module(f"{_OURS}.{found.name}") for found in pkgutil.iter_modules(room.__path__)]
ROWS = [name for table in names.TABLES for name in table.names.values()]
HIDDEN = """
import logging
from checkmate.torch_internals import names
logging.disable()  # of what is left out
find = names.Name.find
def hiding(self):
    if self.name == {name!r}:
        raise names.LacksError("hidden: " + self.name)
    return find(self)
names.Name.find = hiding
import torch, checkmate
torch.manual_seed(0)
x, model = torch.randn(4, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
try:
    bits = []
    for step in (model, checkmate.compile(model, budget="1 MB", cache=False)):
        grads = torch.autograd.grad(step(x).sum(), list(model.parameters()))
        bits.append([grad.numpy().tobytes() for grad in grads])
    print("works" if bits[0] == bits[1] else "wrong")
except checkmate.errors.Unsupported as error:
    print("refused" if "hidden: {name}" in str(error) else error)
"""


def _names_of_torch(source: Path) -> Iterator[str]:
    """Dotted names of PyTorch in a file: imports, and attributes of modules."""
    tree, modules = ast.parse(source.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or "torch": a.name for a in node.names if a.name.partition(".")[0] == "torch"}
            yield from (a.name for a in node.names if a.name.startswith("torch."))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            yield from (f"{node.module}.{a.name}" for a in node.names)
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id in modules:
            yield ".".join([modules[node.id], *parts])


def test_no_other_room_knows_a_private_name() -> None:
    others = {module: _names_of_torch(source) for module, source in SOURCES.items() if not module.startswith(_OURS)}
    assert len(others) > 100
    for module, found in others.items():
        names = [name for name in found if not name.startswith("torch.ops.")]  # ATen's own names
        private = [n for n in names if any(part.startswith("_") and part[:2] != "__" for part in n.split("."))]
        assert private == [], module


def _used() -> set[str]:
    """Names that are imported from this room, looked up, or wrapped."""
    found: set[str] = set()
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS):
                found.update(alias.name for alias in node.names)
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            is_row = isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("Name", "_method")
            if isinstance(node, ast.Call) and not is_row and node.args and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return found


def test_each_name_is_needed_and_is_there_and_says_what_for() -> None:
    assert {row.name for row in ROWS} - _used() == set()
    assert [row.name for row in ROWS if names.is_expected(row) != bool(_finds(row))] == []
    assert all(row.what and row.without for row in ROWS)
    assert names.LEFT_OUT == []
    assert len({row.name for row in ROWS}) == len(ROWS)


def _finds(row: Name) -> Any:
    try:
        return row.find()
    except LacksError:
        return None


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with one function, ``old``, and tables of names without a row."""
    monkeypatch.setattr(names, "LEFT_OUT", [])
    monkeypatch.setattr(names, "TABLES", [])
    found: Any = ModuleType("a_module_of_pytorch")
    found.old = lambda x: x + 1
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


@pytest.mark.usefixtures("holder")
def test_the_latest_place_that_there_is() -> None:
    table = Table(Name("decode", "json:no_such", "an example", formerly=("no_such_module:x", "json:loads")))
    assert table.get("decode")("[1]") == [1]


@pytest.mark.usefixtures("holder")
def test_what_is_not_there_is_no_class_of_anything_and_refuses_to_be_used() -> None:
    table = Table(Name("Missing", "json", "an example", "examples are refused"))
    missing = table.get("Missing")
    assert not isinstance(1, missing)
    says = r"has no json\.Missing \(an example\)\. Without it, examples are refused"
    for use in (missing, lambda: missing.attribute, type("Child", (missing,), {})):
        with pytest.raises(Unsupported, match=says):
            use()
    with pytest.raises(AttributeError, match="no private name"):
        table.get("unheard_of")


def test_the_other_function_is_put_around_what_there_is(holder: Any) -> None:
    table = Table(Name("new", holder.__name__, "an example", formerly=(f"{holder.__name__}:old",)))
    table.wrap("new", lambda plain: lambda x: 2 * plain(x))
    assert holder.old(1) == 4
    assert names.LEFT_OUT == []


def test_what_is_not_there_or_called_otherwise_is_left_out_and_said(
    holder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = holder.old
    for name, said in (("new", "has no a_module_of_pytorch.new"), ("old", "calls a_module_of_pytorch.old otherwise")):
        table = Table(Name(name, holder.__name__, "an example"))
        with caplog.at_level(logging.WARNING):
            table.wrap(name, lambda plain: lambda x, y: plain(x))
        assert holder.old is plain
        assert names.LEFT_OUT.pop() == name
        assert said in caplog.text
    # an install as a whole
    names.put_in_place("an example", lambda: Table(Name("new", holder.__name__, "an example")).get("new").attribute)
    assert names.LEFT_OUT == ["an example"]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_without_any_one_of_them_a_step_works_or_is_refused_by_its_name(row: Name) -> None:
    said = run_fresh_python("-c", HIDDEN.format(name=row.name)).stdout.strip()
    assert said in (("refused", "works") if row.without == names.NOTHING else ("works",)), said


@pytest.mark.slow
def test_a_refusal_names_what_is_left_out_and_what_each_step_needs() -> None:
    code = HIDDEN.format(name="ContextVarVariable.call_method")
    code = code.replace("torch.manual_seed(0)", "import contextvars; var = contextvars.ContextVar('var')")
    code = code.replace("compile(model,", "compile(lambda x: (var.reset(var.set(1)), model(x).sum())[1],")
    said = run_fresh_python("-c", code).stdout
    assert "On this PyTorch it leaves out: ContextVarVariable.call_method (checkmate doctor)." in said
