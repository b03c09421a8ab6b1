"""Within a hard limit on memory, 5 % above what the plan says, plain PyTorch dies and a step in an arena trains."""

from __future__ import annotations

import copy
import re
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.resident import give_back, status
from benchmarks.hard_limit import MARGIN, PLENTY, limited, plan, told
from checkmate.memory import native
from tests.support.bits import assert_same_bits
from tests.support.processes import fork_server

WITHIN = 550_000_000  # bytes beside what a process has, of which a step may plan with half
STEPS = 30  # `benchmarks/results/hard_limit.jsonl` has a hundred

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all of a process's data on Linux only"),
]


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


def test_what_dies_plainly_trains_without_a_budget() -> None:
    """The budget is the limit that it finds; the bits are the same."""
    plainly, found = apart(trains_without_a_budget, method=fork_server().get_start_method())
    assert "can't allocate memory" in plainly["plainly"]
    assert found["again"] > 0
    assert found["planned"] > WITHIN // 4
    assert found["left"] >= 0
