"""Steps that are deleted give back all that they held; within a hard limit a step trains where plain PyTorch dies."""

from __future__ import annotations

import copy
import gc
import re
import resource
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.resident import give_back, status
from benchmarks.hard_limit import MARGIN, PLENTY, limited, plan, told
from checkmate.memory import native
from checkmate.memory.arena import Arena
from tests.support.bits import assert_same_bits
from tests.support.processes import fork_server
from tests.support.sampling import long, slow

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors, arenas and limits are as Linux has them"),
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


# ---------------------------------------------------------------- within a hard limit on the process, RLIMIT_DATA

WITHIN = 550_000_000  # bytes beside what a process has, of which a step may plan with half
STEPS = 30  # `benchmarks/results/hard_limit.jsonl` has a hundred


@pytest.mark.long
def test_what_dies_plainly_within_a_limit_trains_in_an_arena_to_the_same_bits() -> None:
    native.start()
    assert native.wait() is None  # once, and kept: the processes find it
    made = told(plan, 0.6)
    budget, planned = made["budget"], made["planned"]
    assert planned > 200_000_000  # of which a twentieth is more than what else a process takes, now and then
    with_plenty = told(limited, "plain", 0, int(PLENTY * planned), STEPS)
    plain = told(limited, "plain", 0, int(MARGIN * planned), STEPS)
    arena = told(limited, "arena", budget, int(MARGIN * planned), STEPS)
    assert with_plenty["error"] is None
    assert len(set(with_plenty["losses"])) == STEPS
    assert plain["losses"] == []
    wanted = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", plain["error"])
    assert wanted is not None
    assert int(wanted[1]) > 1_000_000  # a value of the step, not what comes with it
    assert arena["error"] is None
    assert (arena["losses"], arena["digest"]) == (with_plenty["losses"], with_plenty["digest"])
    assert arena["data_at_the_end"] <= arena["limit"]


def trains_without_a_budget() -> Iterator[dict[str, Any]]:
    """Train two steps, then the same within a limit on the process: plainly, and by plans without a budget."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(16, 16), nn.Hardswish())))
    twin, x = copy.deepcopy(net), torch.randn(800_000, 16)

    def train(module: nn.Module, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = step(x)
            loss.backward()
            optimizer.step()
        return [loss.detach(), *module.state_dict().values()]

    expected = train(twin, lambda x: twin(x).square().mean())
    twin.zero_grad()
    native.start()
    native.wait()
    give_back()
    limit = status("VmData") + WITHIN
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        train(twin, lambda x: twin(x).square().mean())
        yield {"plainly": "trained"}
    except RuntimeError as error:
        yield {"plainly": str(error)}
    twin.zero_grad()
    give_back()
    step = checkmate.compile(lambda x: net(x).square().mean(), time_limit=5)
    assert_same_bits(train(net, step), expected)
    (plan,) = step.plans
    yield {"again": int(plan.schedule.recomputed.sum()), "planned": plan.peak, "left": limit - status("VmData")}


@pytest.mark.slow
def test_what_dies_plainly_trains_without_a_budget() -> None:
    """The budget is the limit that it finds; the bits are the same."""
    plainly, found = apart(trains_without_a_budget, method=fork_server().get_start_method())
    assert "can't allocate memory" in plainly["plainly"]
    assert found["again"] > 0
    assert found["planned"] > WITHIN // 4
    assert found["left"] >= 0
