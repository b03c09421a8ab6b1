"""Plant small mistakes in the product, one at a time, and name a test that finds each.

    python -m tests.suite.mutants [PATH ...] [--count 200] [--seconds 40] [--seed 0]    # after those of covered.py

A mutant is one operator, comparison, constant or call of a function changed within the files that are named. The tests
that run its line, by the coverage that was recorded, run in a fork of this process in which the function has the
mutant's code: those of the same room first, short ones before long ones, for so many seconds at most, until one fails
that passes without it. One row for each mutant is written, to tests/suite/mutants.jsonl: where tests become fewer or
other ones, the same mutants have to be found. A mutant that no test finds changes nothing that matters, or a test is
missing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tests.suite.covered import ROOT, covering_tests, seconds_of_tests

SPINE = ("checkmate/core", "checkmate/codegen/emit.py", "solvers/common/incumbent.py", "solvers/plan_cache.py")
SPINE += ("profiling/measure.py", "solvers/linear/equations.py", "checkmate/memory/meter.py", "checkmate/verification")
MUTANTS = ROOT / "tests" / "suite" / "mutants.jsonl"
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
Mutant = tuple[str, int, str, str]  # file, line, what it was, what it becomes


class _Mutate(ast.NodeTransformer):
    """Change the ``wanted``-th place of a file that can be changed, and note which it was; with None, note all."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted, self.places, self.depth = wanted, list[tuple[int, str, str]](), 0

    def _place(self, node: Any, changed: ast.AST) -> Any:
        self.places.append((node.lineno, ast.unparse(node), ast.unparse(changed)))
        return ast.copy_location(changed, node) if len(self.places) - 1 == self.wanted else node

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            self.depth += 1
            # Neither decorators nor defaults, which have run.
            of_lambda = isinstance(node, ast.Lambda)
            node.body = self.visit(node.body) if of_lambda else [self.visit(one) for one in node.body]
            self.depth -= 1
            return node
        # Texts of errors and of logs are no mistakes.
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) or (self.depth and isinstance(node, ast.ClassDef)):
            return node
        if isinstance(node, ast.Expr):
            if not self.depth or not isinstance(node.value, ast.Call) or "log." in ast.unparse(node.value.func):
                return node
            node = self._place(node, ast.Pass())
        node = self.generic_visit(node)
        return self._changed(node) if self.depth else node

    def _changed(self, node: Any) -> ast.AST:
        swap = SWAPS.get(type(node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", node)))
        new: Any = copy(node)
        if isinstance(node, ast.Compare) and swap:
            new.ops = [swap(), *node.ops[1:]]
        elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and swap:
            new.op = swap()
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            new = node.operand
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            new.value = not node.value if isinstance(node.value, bool) else node.value + 1
        elif isinstance(node, (ast.Break, ast.Continue)) and swap:
            new = swap()
        else:
            return node
        return self._place(node, new)


def _plant(functions: list[types.FunctionType], file: Path, wanted: int) -> None:
    """Give those functions that are of a file the code of its mutant."""
    tree = ast.fix_missing_locations(_Mutate(wanted).visit(ast.parse(file.read_text())))
    codes: dict[tuple[str, int], types.CodeType] = {}
    todo = [compile(tree, str(file), "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        todo += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    for function in functions:
        if os.path.realpath(function.__code__.co_filename) == str(file):
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                function.__code__ = new


def _fails(tests: list[str], seconds: float, *mutant: Any) -> str | None:
    """Run tests in a fork until one fails: its name, or "time" where the fork does not end."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)

        class Tell:
            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.failed:
                    os.write(write, report.nodeid.encode())
                    os._exit(1)

        if mutant:
            _plant(*mutant)
        # No name: it failed before a test did, as where a mutant breaks what a conftest calls.
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[Tell()])
        os.write(write, b"" if code in (0, 5) else tests[0].encode())
        os._exit(0)
    os.close(write)
    ended = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return "time"
        time.sleep(0.02)
    with os.fdopen(read) as said:
        return said.read() or None


def _places(paths: list[str]) -> Iterator[tuple[Path, int, Mutant]]:
    """All mutants of the files, in order."""
    for path in paths:
        whole = (ROOT / path).resolve()
        for file in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
            mutate = _Mutate()
            mutate.visit(ast.parse(file.read_text()))
            for number, (line, old, new) in enumerate(mutate.places):
                yield file, number, (str(file.relative_to(ROOT)), line, old, new)


def main() -> None:
    """Plant the mutants, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=SPINE)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=MUTANTS)
    asked = parser.parse_args()

    covered, takes = covering_tests(), seconds_of_tests()
    places = list(_places(asked.paths))
    chosen = random.Random(asked.seed).sample(places, min(asked.count, len(places)))

    # Load all that the tests import before the first fork.
    pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", str(ROOT / "tests")])
    importlib.import_module("torch._dynamo")
    gc.unfreeze()  # conftest.py freezes what is imported, and nothing frozen is listed
    functions = [one for one in gc.get_objects() if isinstance(one, types.FunctionType)]
    gc.freeze()
    sound = set[str]()  # tests that pass in a fork without a mutant
    found = 0
    known = len(asked.out.read_text().splitlines()) if asked.out.exists() else 0  # a run goes on where one has ended
    for count, (file, number, (name, line, old, new)) in enumerate(chosen[known:], start=known + 1):
        tests = sorted(covered.get((file, line), ()))
        room = set(Path(name).parent.parts)
        tests.sort(key=lambda test: (-len(room & set(Path(test.split("::")[0]).parts)), takes[test]))
        row = {"file": name, "line": line, "from": old, "to": new, "tests": len(tests), "by": None}
        spent, began = 0.0, time.monotonic()
        while tests and spent < asked.seconds and row["by"] is None:
            block = [tests.pop(0)]
            while tests and len(block) < 40 and sum(takes[test] for test in block) < 10:
                block.append(tests.pop(0))
            spent += sum(takes[test] for test in block)
            killer = _fails(block, 30 + 4 * sum(takes[test] for test in block), functions, file, number)
            if killer is None or killer in sound or killer == "time":
                row["by"] = killer
            elif _fails([killer], 60) is None:
                sound.add(killer)
                row["by"] = killer
        found += row["by"] is not None
        said = f"{name}:{line}: {old} -> {new}: {row['by']}"
        sys.stdout.write(f"{count}/{len(chosen)}, {found} found, {time.monotonic() - began:.1f} s: {said}\n")
        sys.stdout.flush()
        with asked.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
