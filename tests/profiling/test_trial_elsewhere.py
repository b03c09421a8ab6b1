"""What costs of another place say of ops that run block by block is tried before it runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.capture.inplace import kernels, rules
from checkmate.capture.inplace.rules import TABLE
from checkmate.profiling import trial

aten = torch.ops.aten
NORM = aten.native_batch_norm_backward.default


class _Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8))

    def step(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self(x), torch.zeros(4, dtype=torch.int64))


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_known", {})


def _slower(problem: checkmate.Problem) -> set[str]:
    return {problem.graph.ops[way.op].target for way in problem.profile.ways if way.slower}


def _last_bit(*args: Any, out: Tensor) -> Any:
    made = kernels.batch_norm_backward_over(*args, out=out)
    out.view(torch.int32)[-1, -1] ^= 1
    return made


@pytest.mark.slow
def test_what_leaves_other_bits_here_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _Net(), torch.randn(4, 3, 8, 8)
    estimate = "roofline:laptop"
    good = checkmate.trace(net.step, x, profile=estimate)
    assert _slower(good) == {"aten.native_batch_norm_backward.default"}
    wrong = {**TABLE, NORM: replace(TABLE[NORM], into=_last_bit)}
    monkeypatch.setattr(rules, "TABLE", wrong)
    assert _slower(checkmate.trace(net.step, x, profile=estimate)) == _slower(good)  # it has been tried
    trial._known.clear()
    found = checkmate.trace(net.step, x, profile=estimate)
    assert _slower(found) == set()
    assert {way for way in good.profile.ways if not way.slower} == {*found.profile.ways}
    trial._known.clear()
    assert _slower(checkmate.trace(net.step, x, profile=good.profile)) == set()  # handed in


def test_what_is_measured_here_or_has_no_data_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ways_of", lambda *_: pytest.fail("it is tried"))
    assert _slower(checkmate.trace(_Net().step, torch.randn(4, 3, 8, 8)))
    with torch.device("meta"):
        net, x, target = _Net(), torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
    assert _slower(checkmate.trace(lambda x, y: F.cross_entropy(net(x), y), x, target, profile="roofline:laptop"))
