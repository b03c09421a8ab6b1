"""Runs a recipe of docs/ecosystem.md, plainly and compiled: ``python -m tests.support.recipes Lightning``, or torchrun.

Both must leave the same bits in the model that is trained, and compiled something must run again.
"""

from __future__ import annotations

import re
import runpy
import sys
import tempfile
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import checkmate
from benchmarks.common.own_seconds import count_own_seconds
from tests.support.bits import assert_same_bits
from tests.support.whole_steps import plain_step

TEXT = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text()
RECIPES = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?```python\n(.*?)```", TEXT, flags=re.DOTALL | re.MULTILINE))


def compare(name: str) -> None:
    """Run a recipe twice.

    Raises:
        AssertionError: if anything differs, or nothing runs again.
    """
    really, begin, compiled = checkmate.compile, dist.init_process_group, []

    def compile(fn: Any, **options: Any) -> Any:
        compiled.append(really(fn, time_limit=2, **options))
        return compiled[-1]

    def join(*args: Any, **options: Any) -> None:
        if not dist.is_initialized():  # a store serves one group: its keys would be taken for those of the next
            begin(*args, **options)

    plan_whole = checkmate.training_step

    def training_step(*args: Any, **options: Any) -> Any:
        compiled.append(plan_whole(*args, time_limit=2, verify=True, **options))
        return compiled[-1]

    one_line = _lines_of(RECIPES[name], compiled)
    plainly = RECIPES[name].replace("trainer = WholeSteps(", "trainer = Trainer(")
    codes = plainly, RECIPES[name]
    states = []
    with patch.object(dist, "init_process_group", join), patch.object(dist, "destroy_process_group", lambda: None):
        ways = (_plain, compile), (_plain_step, training_step), one_line
        for code, wrap, step, line in zip(codes, *ways, strict=True):
            with patch.object(checkmate, "compile", wrap), patch.object(checkmate, "training_step", step), line:
                states.append(_left(run(code)))
    if dist.is_initialized():
        dist.destroy_process_group()
    plain, found = states
    assert len(plain) > 5
    assert_same_bits(found, plain)
    plans = [plan for step in compiled for plan in _plans_of(step)]
    assert any(plan.schedule.recomputed.sum() > 0 for plan in plans), [
        checkmate.min_budget(plan.problem) for plan in plans
    ]


def _lines_of(code: str, compiled: list[Any]) -> tuple[Any, Any]:
    """Patches of the one line that a recipe has, if it has one: plainly it does nothing."""
    found = re.search(r"from (checkmate\.integrations\.\w+) import (WithinBudget|within_budget)", code)
    if found is None:
        return nullcontext(), nullcontext()
    module, name = import_module(found[1]), found[2]
    really = getattr(module, name)

    def within(*args: Any, **options: Any) -> Any:
        result = really(*args, time_limit=2, wait="best", **options)
        compiled.append(result)
        return result

    def nothing(*args: Any, **options: Any) -> Any:
        return really.__base__() if isinstance(really, type) else args[0]

    return patch.object(module, name, nothing), patch.object(module, name, within)


def _plans_of(step: Any) -> Any:
    step = getattr(step, "planned", step)  # of a callback
    return getattr(step, "_checkmate_planned", step).plans


def _plain(fn: Any, **options: Any) -> Any:
    return fn


def _plain_step(loss_fn: Any, optimizer: Any, *, clip_norm: float, **options: Any) -> Any:
    return plain_step(loss_fn, [optimizer], clip_norm)


def run(code: str) -> dict[str, Any]:
    """The names that a script leaves. It is a module of its own, as Dynamo looks names up in modules."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "recipe.py")
        script.write_text(code)
        return runpy.run_path(str(script), run_name="recipe")


def _left(namespace: dict[str, Any]) -> list[torch.Tensor]:
    state = [getattr(t, "to_local", lambda t=t: t)().clone() for t in namespace["model"].state_dict().values()]
    return [*state, torch.get_rng_state()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    count_own_seconds()
    compare(sys.argv[1])
