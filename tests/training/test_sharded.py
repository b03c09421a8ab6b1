"""Models whose parameters are shards, over gloo: the bits of the plain model, the bytes of one plan on each rank."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import checkmate
from checkmate.core.plan import Start
from checkmate.errors import InfeasibleBudget, Unsupported
from examples.ranks import shard
from tests.support import recipes
from tests.support.bits import assert_same_bits
from tests.support.processes import ROOT
from tests.support.ranks import Net, batch, everywhere, local, play, torchrun
from tests.support.sampling import long
from tests.support.stepping import train
from tests.support.whole_steps import TrainedWhole, assert_as_plain, planned_step, train_whole

SECONDS = 0.3  # to plan
PINNED = "exchanges data with other ranks"
GATHERED, REDUCED, SUMMED = (
    f"_c10d_functional.{name}" for name in ("gather_parameter", "reduce_scatter_tensor", "all_reduce")
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")]


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.last = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(x + self.down(F.gelu(self.up(x)))), y)


@functools.cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _of_first(find: Callable[[], Any]) -> Any:
    """Have the first rank look for something, and tell all."""
    found = [None if dist.get_rank() else find()]
    dist.broadcast_object_list(found)
    return found[0]


_adamw = functools.partial(optim.AdamW, lr=0.01)
_sgd = functools.partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def _smallest(make: Callable[[], nn.Module], data: tuple[Tensor, ...]) -> int:
    """The smallest budget that works, as a refusal names it: to all ranks the same."""
    with pytest.raises(InfeasibleBudget, match="Smallest budget that works") as caught:
        checkmate.compile(make(), budget=1000, time_limit=SECONDS)(*data)
    assert caught.value.min_budget is not None
    return caught.value.min_budget


def _assert_as_plain(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], budget: int, *, overlap: bool = False
) -> checkmate.Solution:
    """Compare bits with the plain model, and the peak with the predicted one; give the plan."""
    compiled, plain = checkmate.compile(make(), budget=budget, time_limit=SECONDS, overlap=overlap), make()
    found, expected = (train(model, model, data) for model in (compiled, plain))
    assert_same_bits(*(local({**vars(trained), "peaks": None}) for trained in (found, expected)))
    (plan,) = compiled.plans
    took = {plan.problem.resident + peak for peak in found.peaks}
    assert max(took) <= plan.peak if overlap else took == {plan.peak}
    return plan


def _pins(plan: checkmate.Solution) -> dict[str, set[str | None]]:
    exchanges = [op for op in plan.problem.graph.ops if "c10d" in op.target]
    return {
        target: {op.pinned for op in exchanges if op.target == target} for target in {op.target for op in exchanges}
    }


def _gathers(plan: checkmate.Solution) -> list[int]:
    """Count how often each parameter is gathered."""
    ops = plan.problem.graph.ops
    return [plan.plan.runs.count(k) for k, op in enumerate(ops) if op.target == GATHERED]


def _assert_whole_as_plain(new: Callable[[Any], optim.Optimizer] = _adamw, **planning: Any) -> checkmate.Solution:
    """Compare bits of whole steps with plain ones, and the peak with the planned one; give the plan."""

    def train(make: Callable[..., Any]) -> TrainedWhole:
        model = shard(Net(), _mesh())
        optimizer = new(model.parameters())
        found = train_whole(make(model, optimizer), model, [optimizer], batch())
        found.state = local(found.state)
        return found

    step, found = assert_as_plain(train, time_limit=SECONDS, **planning)
    (plan,) = step.plans
    took = plan.problem.resident + found.peaks[-1]
    assert took <= plan.peak if "overlap" in planning else took == plan.peak
    return plan


def _tied() -> Any:
    net = Net()
    net.blocks[1].weight = net.blocks[0].weight
    return shard(net, _mesh())


class Scenes:
    """Scenes that the same ranks play one after the other; the last one ends the group."""

    def gathered_again() -> None:
        def make() -> nn.Module:
            return shard(Net(), _mesh())

        budget = _smallest(make, batch())
        plan = _assert_as_plain(make, batch(), budget)
        assert _pins(plan) == {GATHERED: {None}, REDUCED: {PINNED}}
        assert max(_gathers(plan)) > 1
        assert plan.peak < plan.problem.keep_all_peak
        assert len(set(everywhere((plan.schedule.R.tobytes(), plan.peak)))) == 1
        mine = budget if dist.get_rank() else 10**9  # one rank gathers again, another does not: nothing waits
        with pytest.raises(Unsupported, match=r"The ranks follow different plans.*gather_parameter"):
            checkmate.compile(make(), budget=mine, time_limit=SECONDS)(*batch())

    def shards_of_different_sizes() -> None:
        """Plans differ from rank to rank, so that none gathers again."""
        plan = _assert_as_plain(lambda: shard(Net(classes=9), _mesh()), batch(), 10**9)
        assert set().union(*_pins(plan).values()) == {PINNED}

    def whole_steps() -> None:
        problem = _assert_whole_as_plain().problem
        smallest = _of_first(lambda: checkmate.min_budget(problem, time_limit=SECONDS).peak)
        assert max(_gathers(_assert_whole_as_plain(budget=smallest))) > 1
        model = shard(Net(), _mesh())
        for given in ({"clip_norm": 1.0}, {"accumulate": 2}, {"scaler": torch.amp.GradScaler("cpu")}):
            (name,) = given
            with pytest.raises(Unsupported, match=rf"{name}= looks at whole gradients.*outside of the plan"):
                planned_step(model, _adamw(model.parameters()), **given)
        with pytest.raises(Unsupported, match="Adafactor reads rows, columns or norms of a whole parameter"):
            planned_step(model, optim.Adafactor(model.parameters()))

    def beside() -> None:
        """Gathers and sums beside ops: the same bits, in the planned bytes or fewer; two layers share a weight."""

        def starts(plan: checkmate.Solution) -> int:
            return sum(isinstance(step, Start) for step in plan.plan.steps)

        assert len([*_tied().parameters()]) == len([*Net().parameters()]) - 1
        plan = _assert_as_plain(_tied, batch(), 10**9, overlap=True)
        assert {op.target for op in plan.problem.graph.ops if op.link} == {GATHERED, REDUCED}
        assert starts(plan) > 0
        assert len(set(everywhere(str(plan.plan)))) == 1
        assert starts(_assert_whole_as_plain(overlap=True)) > 0

    def tensor_parallel() -> None:
        def make() -> nn.Module:
            return parallelize_module(Parallel(), _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})

        data = torch.ones(64, 64, requires_grad=True), torch.arange(64) % 8  # the same on all ranks
        plan = _assert_as_plain(make, data, _smallest(make, data))
        summed = [k for k, op in enumerate(plan.problem.graph.ops) if op.target == SUMMED]
        assert [plan.problem.graph.ops[k].phase for k in summed] == ["forward", "backward"]
        assert [plan.plan.runs.count(k) for k in summed] == [1, 1]
        assert plan.schedule.recomputed.sum() > 0

    def refused() -> None:
        net = Net()
        for block in net.blocks:
            fully_shard(block, mesh=_mesh())
        with pytest.raises(Unsupported, match=r'blocks.0 is a part.*"Sharded parameters in one plan" of docs'):
            checkmate.compile(net, budget="1 GB")(*batch())
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), _mesh(), [Shard(0)]))
        with pytest.raises(Unsupported, match=r"gives a DTensor.*to_local"):
            checkmate.compile(lambda: weight * 2.0, budget="1 GB")()

    def whole_steps_of_sgd() -> None:
        _assert_whole_as_plain(_sgd)

    def the_recipe() -> None:
        recipes.compare("Sharded parameters in one plan")


MORE = [Scenes.whole_steps_of_sgd, Scenes.the_recipe]
SCENES = [scene for name, scene in vars(Scenes).items() if name[0] != "_" and scene not in MORE]


@pytest.mark.long
def test_the_example(tmp_path: Path) -> None:
    said = torchrun(str(ROOT / "examples/ranks.py"), folder=tmp_path)
    assert "verified: the same bits as plain PyTorch" in said
    assert re.search(r"of 18 parameters [1-9]\d* are gathered again", said)


@pytest.mark.parametrize(("ranks", "scenes"), [(2, SCENES), long(4, [*SCENES, *MORE])])
def test_ranks(ranks: int, scenes: Sequence[Callable[[], None]], tmp_path: Path) -> None:
    play(scenes, ranks, tmp_path)
