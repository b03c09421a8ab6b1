"""What PyTorch is changed in: the list is whole, and what is to be undone is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkmate
import checkmate.capture.patches as room
from checkmate.capture.patches import OURS, PATCHES, PROCESS, WITHIN
from tests.support.processes import run_fresh_python

FOLDER = Path(room.__file__).parent
FILES = [
    file.relative_to(FOLDER).with_suffix("")
    for file in FOLDER.rglob("*.py")
    if file.stem not in ("__init__", "only_our_captures")
]
MODULES = {".".join(file.parts) for file in FILES}


def test_every_module_is_on_the_list() -> None:
    assert {patch.module for patch in PATCHES} == MODULES
    assert {patch.when for patch in PATCHES} == {OURS, PROCESS, WITHIN}


def test_importing_checkmate_changes_nothing() -> None:
    code = "import checkmate, sys; print(*[name for name in sys.modules if name.split('.')[0] == 'torch'])"
    assert run_fresh_python("-c", code).stdout.strip() == ""


def _changed() -> Any:
    """What tracing an op calls, for ops where that was set, and Dynamo's setting for recurrent modules."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    ops = [getattr(p, name) for p in packets if isinstance(p, torch._ops.OpOverloadPacket) for name in p.overloads()]
    return {op: dict(op.py_kernels) for op in ops if op.py_kernels}, torch._dynamo.config.allow_rnn


@pytest.mark.slow
def test_what_is_changed_while_a_step_is_captured_is_undone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def solving(*args: Any, **options: Any) -> Any:
        seen.append(_changed())
        return checkmate.solve(*args, **options)

    before = _changed()
    monkeypatch.setattr("checkmate.solvers.plan_cache.attempt", solving)
    step = checkmate.compile(lambda x: x.prod(0).square().sum(), budget="1 MB", method="next-use", cache=False)
    step(torch.ones(3, 4, requires_grad=True)).backward()
    assert len(seen) == 1
    assert seen[0] != before
    assert _changed() == before
