"""Models whose parameters are shards, over gloo: the bits of the plain model, the bytes of one plan on each rank."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import checkmate
from benchmarks.common.own_seconds import count_own_seconds
from checkmate.core.plan import Start
from checkmate.memory import measure_peak
from examples.ranks import shard
from tests.support import recipes
from tests.support.bits import assert_same_bits
from tests.support.processes import own_cache, start_ranks
from tests.support.sampling import long
from tests.support.whole_steps import plain_step

ROOT = Path(__file__).parents[2]
WIDTH, BATCH = 64, 48
PINNED = "exchanges data with other ranks"
GATHERED, REDUCED, SUMMED = (
    f"_c10d_functional.{name}" for name in ("gather_parameter", "reduce_scatter_tensor", "all_reduce")
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")]


class Net(nn.Module):
    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x), y)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.last = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(x + self.down(F.gelu(self.up(x)))), y)


def _batch() -> tuple[Tensor, Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(8, (BATCH,), generator=generator)


def _local(tree: Any) -> Any:
    """Shards with their placements, in place of what holds them."""
    return torch.utils._pytree.tree_map_only(DTensor, lambda t: (t.to_local().clone(), str(t.placements)), tree)


def _everywhere(thing: object) -> list[Any]:
    """What each rank has for it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def _of_first(find: Callable[[], Any]) -> Any:
    """What the first rank finds, which alone looks for it."""
    found = [None if dist.get_rank() else find()]
    dist.broadcast_object_list(found)
    return found[0]


def _adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01)


def _sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def _train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[list[Any], list[int]]:
    """Losses, gradients, parameters and states of three steps, and the bytes of each after the first."""
    optimizer = _adamw(model.parameters())
    left, peaks = [], []

    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss

    for i in range(3):
        use = measure_peak(step) if i else None
        loss = step() if use is None else use.result
        peaks += [] if use is None else [use.peak]
        left += [loss.detach(), [p.grad for p in model.parameters()]]
        optimizer.step()
        left = _local(left)
        optimizer.zero_grad()
        del loss, use
    return [left, _local([model.state_dict(), optimizer.state_dict()])], peaks


def _smallest(make: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> int:
    """The smallest budget that works, as a refusal names it: to all ranks the same."""
    with pytest.raises(checkmate.InfeasibleBudget, match="Smallest budget that works") as caught:
        checkmate.compile(make(), budget=1000, time_limit=1)(*batch)
    assert caught.value.min_budget is not None
    return caught.value.min_budget


def _assert_as_plain(make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], budget: int) -> checkmate.Solution:
    """The bits of the plain model, and the predicted peak to the byte; gives the plan."""
    compiled = checkmate.compile(make(), budget=budget, time_limit=1)
    found, peaks = _train(compiled, batch)
    expected, _ = _train(make(), batch)
    assert_same_bits(found, expected)
    (plan,) = compiled.plans
    assert {plan.problem.resident + peak for peak in peaks} == {plan.peak}
    return plan


def _pins(plan: checkmate.Solution) -> dict[str, set[str | None]]:
    exchanges = [op for op in plan.problem.graph.ops if "c10d" in op.target]
    return {
        target: {op.pinned for op in exchanges if op.target == target} for target in {op.target for op in exchanges}
    }


def _gathers(plan: checkmate.Solution) -> list[int]:
    """How often each parameter is gathered."""
    ops = plan.problem.graph.ops
    return [plan.plan.runs.count(k) for k, op in enumerate(ops) if op.target == GATHERED]


def _gathered_again(mesh: Any) -> None:
    def make() -> nn.Module:
        return shard(Net(), mesh)

    budget = _smallest(make, _batch())
    plan = _assert_as_plain(make, _batch(), budget)
    assert _pins(plan) == {GATHERED: {None}, REDUCED: {PINNED}}
    assert max(_gathers(plan)) > 1
    assert plan.peak < plan.problem.keep_all_peak
    assert len(set(_everywhere((plan.schedule.R.tobytes(), plan.peak)))) == 1
    mine = budget if dist.get_rank() else 10**9  # one rank gathers again, another does not: nothing waits
    with pytest.raises(checkmate.Unsupported, match=r"The ranks follow different plans.*gather_parameter"):
        checkmate.compile(make(), budget=mine, time_limit=1)(*_batch())


def _shards_of_different_sizes(mesh: Any) -> None:
    """Plans differ from rank to rank, so that none gathers again."""
    plan = _assert_as_plain(lambda: shard(Net(classes=9), mesh), _batch(), 10**9)
    assert set().union(*_pins(plan).values()) == {PINNED}


def _whole_steps(mesh: Any) -> None:
    budget = 10**9
    for name, new in (("AdamW", _adamw), ("AdamW", _adamw), ("SGD", _sgd)):
        plain, model = shard(Net(), mesh), shard(Net(), mesh)
        optimizers = [new(one.parameters()) for one in (plain, model)]
        step = checkmate.training_step(model, optimizers[1], budget=budget, time_limit=1, wait="best")
        loop, batch = plain_step(plain, optimizers[:1]), _batch()
        for i in range(3):
            use = measure_peak(lambda step=step, batch=batch: step(*batch)) if i else None
            assert_same_bits(step(*batch) if use is None else use.result, loop(*batch))
        left = [_local([m.state_dict(), o.state_dict()]) for m, o in zip((plain, model), optimizers, strict=True)]
        assert_same_bits(left[1], left[0])
        (plan,) = step.plans
        assert plan.problem.resident + use.peak == plan.peak
        if budget < 10**9:
            assert max(_gathers(plan)) > 1
        first_adamw = name == "AdamW" and budget == 10**9
        budget = (
            _of_first(lambda plan=plan: checkmate.min_budget(plan.problem, time_limit=1).peak) if first_adamw else 10**9
        )
    for name, given in (("clip_norm", 1.0), ("accumulate", 2), ("scaler", torch.amp.GradScaler("cpu"))):
        with pytest.raises(checkmate.Unsupported, match=rf"{name}= looks at whole gradients.*outside of the plan"):
            checkmate.training_step(model, optimizers[1], budget=budget, **{name: given})
    with pytest.raises(checkmate.Unsupported, match="Adafactor reads rows, columns or norms of a whole parameter"):
        checkmate.training_step(model, optim.Adafactor(model.parameters()), budget=budget)


def _tied(mesh: Any) -> Any:
    net = Net()
    net.blocks[1].weight = net.blocks[0].weight
    return shard(net, mesh)


def _beside(mesh: Any) -> None:
    """Gathers and sums go on beside ops: the same bits, in the planned bytes or fewer; two layers share a weight."""

    def starts(plan: checkmate.Solution) -> int:
        return sum(isinstance(step, Start) for step in plan.plan.steps)

    about: dict[str, Any] = {"budget": 10**9, "time_limit": 1, "overlap": True}
    compiled, plain = (_tied(mesh) for _ in range(2))
    assert len([*plain.parameters()]) == len([*Net().parameters()]) - 1
    compiled = checkmate.compile(compiled, **about)
    found, peaks = _train(compiled, _batch())
    expected, _ = _train(plain, _batch())
    assert_same_bits(found, expected)
    (plan,) = compiled.plans
    assert plan.problem.resident + max(peaks) <= plan.peak
    assert {op.target for op in plan.problem.graph.ops if op.link} == {GATHERED, REDUCED}
    assert starts(plan) > 0
    assert len(set(_everywhere(str(plan.plan)))) == 1
    plain, model = shard(Net(), mesh), shard(Net(), mesh)
    optimizers = [_adamw(one.parameters()) for one in (plain, model)]
    step = checkmate.training_step(model, optimizers[1], **about)
    loop, batch = plain_step(plain, optimizers[:1]), _batch()
    for _ in range(2):
        assert_same_bits(step(*batch), loop(*batch))
    left = [_local([m.state_dict(), o.state_dict()]) for m, o in zip((plain, model), optimizers, strict=True)]
    assert_same_bits(left[1], left[0])
    assert starts(step.plans[0]) > 0


def _tensor_parallel(mesh: Any) -> None:
    def make() -> nn.Module:
        return parallelize_module(Parallel(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    batch = torch.ones(BATCH, WIDTH, requires_grad=True), torch.arange(BATCH) % 8  # the same on all ranks
    plan = _assert_as_plain(make, batch, _smallest(make, batch))
    summed = [k for k, op in enumerate(plan.problem.graph.ops) if op.target == SUMMED]
    assert [plan.problem.graph.ops[k].phase for k in summed] == ["forward", "backward"]
    assert [plan.plan.runs.count(k) for k in summed] == [1, 1]
    assert plan.schedule.recomputed.sum() > 0


def _refused(mesh: Any) -> None:
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    with pytest.raises(checkmate.Unsupported, match=r'blocks.0 is a part.*"Sharded parameters in one plan" of docs'):
        checkmate.compile(net, budget="1 GB")(*_batch())
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    with pytest.raises(checkmate.Unsupported, match=r"gives a DTensor.*to_local"):
        checkmate.compile(lambda: weight * 2.0, budget="1 GB")()


def _the_recipe(mesh: Any) -> None:
    recipes.compare("Sharded parameters in one plan")


SCENES = (
    _gathered_again,
    _shards_of_different_sizes,
    _whole_steps,
    _beside,
    _tensor_parallel,
    _refused,
    _the_recipe,  # which ends the group
)


def _run(rank: int, ranks: int, folder: str, names: tuple[str, ...] = ()) -> None:
    """Scenes in one process: starting several takes longer than they do."""
    os.environ["CHECKMATE_CACHE_DIR"] = own_cache(f"{folder}/{rank}")  # each measures for itself
    logging.getLogger("checkmate").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    count_own_seconds()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for scene in SCENES:
        if names and scene.__name__ not in names:
            continue
        torch._dynamo.reset()
        try:
            scene(mesh)
        except Exception as error:
            raise AssertionError(scene.__name__) from error
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.long
def test_the_example(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples/ranks.py")]
    run = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "verified: the same bits as plain PyTorch" in run.stdout
    assert re.search(r"of 18 parameters [1-9]\d* are gathered again", run.stdout)


@pytest.mark.parametrize("ranks", [2, long(4)])
def test_ranks(ranks: int, tmp_path: Path) -> None:
    start_ranks(_run, ranks, ranks, str(tmp_path))
