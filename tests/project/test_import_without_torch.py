"""Data types and solvers live without PyTorch, and PyTorch is not loaded before it is needed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import checkmate
from tests.project.test_layers import SOURCES
from tests.support.processes import run_fresh_python

BLOCK = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""


def _python(code: str) -> str:
    return run_fresh_python("-c", code).stdout.strip()


def test_every_solver_imports_without_torch() -> None:
    names = sorted(name for name in SOURCES if name.startswith("checkmate.solvers"))
    code = "import importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    assert _python(f"{BLOCK}{code}print(len({names}))") == str(len(names))


def test_a_problem_is_solved_without_torch_and_what_needs_it_says_so() -> None:
    code = """
import checkmate
problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], [1, 1, 1, 1], [1, 1, 1, 1])
print(checkmate.solve(problem, budget=3, method="milp").cost, checkmate.min_budget(problem).peak)
for name in ("compile", "trace"):
    try:
        getattr(checkmate, name)
    except ModuleNotFoundError as error:
        print(error.name)
"""
    assert _python(BLOCK + code).split() == ["4.0", "3", "torch", "torch"]


def test_a_plain_import_loads_no_torch_and_hides_no_standard_package(tmp_path: Path) -> None:
    """Python 3.15 has a package ``profiling``, which cProfile imports: it is found though the checkout comes first."""
    (tmp_path / "profiling").mkdir()
    (tmp_path / "profiling" / "__init__.py").write_text("")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import profiling, cProfile, checkmate"
    assert (
        _python(f"{code}; print('torch' in sys.modules, profiling.__file__)")
        == f"False {tmp_path}/profiling/__init__.py"
    )


def test_every_public_name_is_there() -> None:
    for name in checkmate.__all__:
        assert getattr(checkmate, name).__module__.startswith("checkmate."), name
    assert set(checkmate.__all__) <= set(dir(checkmate))


def test_a_name_that_moved_is_found_by_the_error_of_who_writes_it() -> None:
    for name in checkmate._MOVED:
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; write from ") as error:
            getattr(checkmate, name)
        module, attribute = re.findall(r"write from (\S+) import (\w+)$", str(error.value))[0]
        assert callable(getattr(importlib.import_module(module), attribute))
    with pytest.raises(AttributeError, match=r"no attribute 'fit'$"):
        _ = checkmate.fit


@pytest.mark.slow
def test_after_a_plain_import_the_meter_of_memory_is_there_and_an_unknown_name_is_an_attribute_error() -> None:
    code = "import checkmate; print(checkmate.memory.measure_peak(lambda: bytes(9)).peak, hasattr(checkmate, 'compil'))"
    assert _python(code) == "0 False"
