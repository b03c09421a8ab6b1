"""The list of changes to PyTorch is whole, and changes that are to be undone are undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkmate
import checkmate.capture.patches as room
from checkmate.capture.patches import OURS, PATCHES, PROCESS, WITHIN
from checkmate.core.solution import Query
from checkmate.solvers.solve import attempt
from tests.support.processes import run_fresh_python

aten = torch.ops.aten


def test_every_module_is_on_the_list() -> None:
    folder = Path(room.__file__).parent
    files = (file.relative_to(folder).with_suffix("").parts for file in folder.rglob("*.py"))
    assert {patch.module for patch in PATCHES} == {
        ".".join(parts) for parts in files if parts[-1] not in ("__init__", "only_our_captures")
    }
    assert {patch.when for patch in PATCHES} == {OURS, PROCESS, WITHIN}


def test_importing_checkmate_changes_nothing() -> None:
    code = "import checkmate, sys; print(*[name for name in sys.modules if name.split('.')[0] == 'torch'])"
    assert run_fresh_python("-c", code).stdout.strip() == ""


def _changed() -> tuple[dict[Any, Any], bool]:
    """Functions that tracing calls in place of ops, and Dynamo's setting for recurrent modules."""
    packets = [getattr(aten, name) for name in dir(aten)]
    ops = [getattr(p, name) for p in packets if isinstance(p, torch._ops.OpOverloadPacket) for name in p.overloads()]
    return {op: dict(op.py_kernels) for op in ops if op.py_kernels}, torch._dynamo.config.allow_rnn


def test_what_is_changed_while_a_step_is_captured_is_undone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def solving(query: Query) -> Any:
        seen.append(_changed())
        return attempt(query)

    before = _changed()
    monkeypatch.setattr("checkmate.solvers.solve.attempt", solving)
    step = checkmate.compile(lambda x: x.prod(0).square().sum(), budget="1 MB", method="next-use", cache=False)
    step(torch.ones(3, 4, requires_grad=True)).backward()
    (within,) = seen
    for op in (aten.upsample_bilinear2d.vec, aten.dropout.default, aten.prod.dim_int):
        assert within[0].get(op) != before[0].get(op)
    assert within[1] != before[1]
    assert _changed() == before
