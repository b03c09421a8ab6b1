"""Two ranks that train by kernels of groups, over gloo on the CPU: bits, one plan for both, and peaks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.capture.fusion.kernels import Kernels
from examples.ranks import shard
from tests.support.bits import assert_same_bits
from tests.support.ranks import Net, batch, everywhere, local, play
from tests.support.stepping import train
from tests.support.whole_steps import plain_step, planned_step, train_whole

pytestmark = [pytest.mark.long, pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")]
SIZE, WIDTH, SECONDS = 512, 128, 0.3
OF_GROUPS: tuple[Kernels, ...] = tuple(kernels for kernels in get_args(Kernels) if kernels != "eager")
_net = partial(Net, WIDTH, blocks=4)


def _smallest(kernels: Kernels) -> int:
    """Bytes, the same on all ranks, that need something to run again."""
    found = [checkmate.min_budget(checkmate.trace(_net(), *batch(SIZE, WIDTH), kernels=kernels), time_limit=1.0).peak]
    dist.broadcast_object_list(found)
    return int(1.05 * found[0])


def _one_plan(plans: list[checkmate.Solution]) -> checkmate.Solution:
    """Hold all ranks to one plan, of groups, in which something runs again."""
    (plan,) = plans
    targets = [op.target for op in plan.problem.graph.ops]
    assert any(target.startswith("checkmate.fused") for target in targets)
    assert len(set(everywhere((str(plan.plan), plan.peak, tuple(targets))))) == 1
    return plan


def _left(model: nn.Module) -> tuple[Any, list[int]]:
    """All that three steps leave, and the peak of each."""
    found = train(model, model, batch(SIZE, WIDTH), seed=5 + dist.get_rank())
    return local({**vars(found), "peaks": None}), found.peaks


class Scenes:
    """Scenes that the same ranks play one after the other."""

    def around() -> None:
        """A wrapper exchanges gradients outside of the plan."""
        for kernels in OF_GROUPS:
            budget = _smallest(kernels)
            for wrap in (DistributedDataParallel, fully_shard):
                reference = _net()
                if kernels == "fused":
                    reference = checkmate.compile(reference, budget="1 GB", kernels=kernels, time_limit=SECONDS)
                expected, _ = _left(wrap(reference))
                compiled = checkmate.compile(_net(), budget=budget, kernels=kernels, time_limit=SECONDS)
                left, _ = _left(wrap(compiled))
                assert_same_bits(left, expected)
                plan = _one_plan(compiled.plans)
                assert plan.schedule is not None
                assert plan.schedule.recomputed.sum() > 0

    def within() -> None:
        """Parameters are gathered, and gradients summed, by ops of the plan."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for kernels in OF_GROUPS:
            options: dict[str, Any] = {"kernels": kernels, "time_limit": SECONDS}
            reference = shard(_net(), mesh)
            if kernels == "fused":
                reference = checkmate.compile(reference, budget="1 GB", **options)
            expected, _ = _left(reference)
            kept = checkmate.compile(shard(_net(), mesh), budget="1 GB", **options)
            left, _ = _left(kept)
            assert_same_bits(left, expected)
            budget = everywhere(int(0.8 * _one_plan(kept.plans).peak))[0]
            compiled = checkmate.compile(shard(_net(), mesh), budget=budget, **options)
            left, peaks = _left(compiled)
            assert_same_bits(left, expected)
            plan = _one_plan(compiled.plans)
            assert {plan.problem.resident + peak for peak in peaks} == {plan.peak}

    def whole() -> None:
        """Gradients are summed over ranks within the step."""

        def left(make: Any) -> tuple[Any, Any]:
            model = DistributedDataParallel(_net())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            step = make(model, [optimizer])
            return local(vars(train_whole(step, model, [optimizer], batch(SIZE, WIDTH))) | {"peaks": None}), step

        expected, _ = left(plain_step)
        found, step = left(partial(planned_step, budget="1 GB", kernels="same-bits", time_limit=SECONDS))
        assert_same_bits(found, expected)
        _one_plan(step.plans)


SCENES = [scene for name, scene in vars(Scenes).items() if name[0] != "_"]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_two_ranks(scene: Any, tmp_path: Path) -> None:
    play([scene], 2, tmp_path)
