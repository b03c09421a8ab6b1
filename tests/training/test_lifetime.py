"""A step that is deleted gives back all that it held, whatever else lives on."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import checkmate
from checkmate.memory import native
from checkmate.memory.arena import Arena
from tests.support.bits import assert_same_bits
from tests.support.sampling import long, slow

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors and arenas are looked at as Linux has them"),
]

ELSEWHERE: dict[str, Any] = {"host_budget": "1 MB", "host": "file:"}
WAYS: dict[str, dict[str, Any]] = {"allocator": {"memory": "allocator"}, "second memory": ELSEWHERE}  # beside an arena


class _Loss(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


torch.manual_seed(0)
MODEL = _Loss(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
BATCH = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))


def loss_fn(x: Tensor) -> Tensor:
    """The loss of a user, which outlives the step."""
    return MODEL(x)


def _compiled(what: Any, **options: Any) -> tuple[Any, Callable[[], object]]:
    step = checkmate.compile(what, **options)
    return step, lambda: step(BATCH).backward()


def _whole(**options: Any) -> tuple[Any, Callable[[], object]]:
    step = checkmate.training_step(loss_fn, torch.optim.SGD(MODEL.parameters(), lr=0.1), **options)
    return step, lambda: step(BATCH)


KINDS = {"function": partial(_compiled, loss_fn), "module": partial(_compiled, MODEL), "training step": _whole}


@pytest.fixture(scope="module")
def budgets() -> dict[str, int]:
    """A budget for each way: ops run again in the one; the other needs the second memory, whatever links take."""
    native.start()
    native.wait()
    step, train = _compiled(loss_fn, budget="1 GB", time_limit=1, **ELSEWHERE)
    train()  # what a process has once is there from now on
    (plan,) = step.plans
    there, here = plan.problem, plan.problem.with_host(None)
    least_there, least = (checkmate.min_budget(problem, time_limit=1).peak for problem in (there, here))
    return {"allocator": (least + here.keep_all_peak) // 2, "second memory": (least_there + least) // 2}


def _held() -> dict[str, Any]:
    """Count all that steps may hold, but for tensors without data: Dynamo keeps some of its own."""
    MODEL.zero_grad()
    gc.collect()
    gc.collect()  # what Dynamo held of a step that the first has found
    things = gc.get_objects()
    kinds = Counter(map(type, things))
    of_tensors = {kind for kind in kinds if issubclass(kind, Tensor) and kind is not FakeTensor}
    return {
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("checkmate")],
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "arenas": kinds[Arena],
        "modules": sum(count for kind, count in kinds.items() if issubclass(kind, torch.fx.GraphModule)),
        "tensors": Counter((str(t.shape), t.dtype) for t in things if type(t) in of_tensors),
    }


def _train(make: Callable[..., tuple[Any, Callable[[], object]]], **options: Any) -> dict[str, Any]:
    """Train three steps, and count what is held then."""
    step, train = make(**options)
    for _ in range(3):
        train()
    assert step.plans
    return _held()


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        long("function", "second memory"),
        slow("module", "second memory"),
        slow("training step", "second memory"),
        slow("function", "allocator"),
    ],
)
def test_what_a_deleted_step_held_is_given_back(kind: str, way: str, budgets: dict[str, int]) -> None:
    before = _held()
    during = _train(KINDS[kind], budget=budgets[way], time_limit=1, **WAYS[way])
    assert during["modules"] > before["modules"]
    assert (during["arenas"] > before["arenas"]) == (way != "allocator")
    if way == "second memory":
        assert during["descriptors"] > before["descriptors"]
        assert {"checkmate-out_0", "checkmate-back_0"} <= {*during["threads"]}
    until = time.monotonic() + 60  # a process that planned on is ended, which its thread has to see
    while (after := _held()) != before and time.monotonic() < until:
        time.sleep(0.05)
    assert after == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_keeps_no_batch(kind: str) -> None:
    (step, _), batch = KINDS[kind](budget="1 GB"), torch.randn(512, 32)
    gone = weakref.ref(batch)
    loss = step(batch)
    if loss.requires_grad:
        loss.backward()
    del batch, loss
    gc.collect()
    assert gone() is None
    step(BATCH)


@pytest.mark.slow
def test_a_loss_that_is_not_differentiated_yet_outlives_its_step(budgets: dict[str, int]) -> None:
    step, _ = _compiled(loss_fn, budget=budgets["second memory"], time_limit=1, **ELSEWHERE)
    loss = step(BATCH)
    del step
    gc.collect()
    found = torch.autograd.grad(loss, [*MODEL.parameters()])
    assert_same_bits(found, torch.autograd.grad(loss_fn(BATCH), [*MODEL.parameters()]))
