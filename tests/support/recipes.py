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
    compiled, begin = list[Any](), dist.init_process_group

    def noted(make: Any, **more: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            compiled.append(make(*args, **options, **more))
            return compiled[-1]

        return call

    def join(*args: Any, **options: Any) -> None:
        if not dist.is_initialized():  # a store serves one group: its keys would be taken for those of the next
            begin(*args, **options)

    def step_plainly(loss_fn: Any, optimizer: Any, *, clip_norm: float, **options: Any) -> Any:
        return plain_step(loss_fn, [optimizer], clip_norm)

    # How the recipe and its patches are, plainly and planned; the one line that a recipe may have does nothing plainly.
    code = RECIPES[name]
    plain = {"compile": lambda fn, **options: fn, "training_step": step_plainly}
    planned = {
        "compile": noted(checkmate.compile, time_limit=2),
        "training_step": noted(checkmate.training_step, time_limit=2, verify=True),
    }
    lines = nullcontext(), nullcontext()
    if found := re.search(r"from (checkmate\.integrations\.\w+) import (WithinBudget|within_budget)", code):
        module = import_module(found[1])
        really = getattr(module, found[2])
        nothing = lambda *args, **options: really.__base__() if isinstance(really, type) else args[0]  # noqa: E731
        within = noted(really, time_limit=2, wait="best")
        lines = patch.object(module, found[2], nothing), patch.object(module, found[2], within)
    ways = (code.replace("trainer = WholeSteps(", "trainer = Trainer("), plain), (code, planned)
    states = []
    with patch.object(dist, "init_process_group", join), patch.object(dist, "destroy_process_group", lambda: None):
        for (text, calls), line in zip(ways, lines, strict=True):
            with patch.multiple(checkmate, **calls), line:
                states.append(_left(run(text)))
    if dist.is_initialized():
        dist.destroy_process_group()
    assert len(states[0]) > 5
    assert_same_bits(*reversed(states))
    plans = [plan for step in compiled for plan in _plans_of(step)]
    assert any(plan.schedule.recomputed.sum() > 0 for plan in plans), [
        checkmate.min_budget(plan.problem) for plan in plans
    ]


def _plans_of(step: Any) -> Any:
    step = getattr(step, "planned", step)  # of a callback
    return getattr(step, "_checkmate_planned", step).plans


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
