"""Processes that train together, over gloo on the CPU: the bits of plain PyTorch and one plan, or a refusal.

Models in DistributedDataParallel and FSDP, and models whose parameters are shards.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.backends import compilation
from checkmate.core.plan import Start
from checkmate.core.simulator import simulate
from checkmate.core.solution import Solution
from checkmate.dynamo import backend
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.memory import measure_peak
from checkmate.memory.available import Available, Limit
from examples.ranks import shard
from tests.support import recipes
from tests.support.bits import assert_same_bits
from tests.support.processes import ROOT
from tests.support.ranks import Net, batch, everywhere, local, play, torchrun
from tests.support.sampling import long
from tests.support.stepping import train
from tests.support.whole_steps import TrainedWhole, assert_as_plain, planned_step, train_whole

RANKS, WIDTH, SIZE = 2, 256, 512
BUDGET = 8_000_000
_net = partial(Net, WIDTH, blocks=6)  # enough for several buckets of gradients, of which the first takes 1 MiB
SECONDS = 0.3  # to plan

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")]


class Centered(nn.Module):
    """Subtracts the mean over all ranks: a collective within the step, and a buffer that follows it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        mean = h.detach().mean(0)
        dist.all_reduce(mean)
        self.mean.mul_(0.9).add_(mean * 0.1)
        return torch.tanh(h - mean / RANKS)


class Synchronized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(Centered(), Centered(), nn.GELU(), Centered(), nn.Linear(WIDTH, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.parts(x), y)


def _train(model: nn.Module, step: Callable[..., Tensor] | None = None) -> Any:
    """Train four steps, so that buckets are rebuilt: all that they leave, in the order of the parameters."""
    found = train(model, step or model, batch(SIZE, WIDTH), steps=4, seed=5 + dist.get_rank())
    grads = [[*of_step.values()] for of_step in found.grads]
    assert all(grad is not None for of_step in grads for grad in of_step)
    return local([found.losses, grads, [*found.state.values()], found.random_state])


def _accumulate(model: nn.Module) -> Any:
    """Train by two batches to each step."""

    def step(*batch: Tensor) -> Tensor:
        with model.no_sync():
            model(*batch).backward()
        return model(*batch)

    return _train(model, step)


def _compiled(model: nn.Module, budget: int | str = BUDGET) -> Any:
    return checkmate.compile(model, budget=budget, time_limit=SECONDS)


def _one_plan(plans: list[Solution]) -> None:
    """Each rank follows the same one, made by one of them, and something runs again in it."""
    (plan,) = plans
    assert plan.schedule is not None
    assert plan.schedule.recomputed.sum() > 0
    assert len(set(everywhere((plan.schedule.R.tobytes(), plan.cost, plan.bound, plan.peak)))) == 1
    assert len([origin for origin in everywhere(plan.origin) if origin.startswith("rank ")]) == 1


class Scenes:
    """Scenes that the same ranks play one after the other."""

    def ddp() -> None:
        given = batch(SIZE, WIDTH)
        for options in ({"find_unused_parameters": True}, {"gradient_as_bucket_view": True, "static_graph": True}):
            compiled = _compiled(_net())
            expected = _train(DistributedDataParallel(_net(), **options))
            model = DistributedDataParallel(compiled, bucket_cap_mb=1, **options)
            assert_same_bits(_train(model), expected)
            _one_plan(compiled.plans)
        (plan,) = compiled.plans
        assert plan.peak < plan.problem.keep_all_peak
        flat = sum(b.nbytes for b in model.buffers() if b.is_floating_point())  # gloo's threads let go of them unseen
        for broadcast, held in ((False, 0), (True, flat)):
            model.broadcast_buffers = broadcast
            model.zero_grad()
            use = measure_peak(lambda: model(*given).backward())
            assert use.final in (0, held)
            assert plan.problem.resident + use.peak <= plan.peak + use.final
        accumulated = _accumulate(DistributedDataParallel(_net()))
        verified = checkmate.compile(_net(), budget=BUDGET, time_limit=SECONDS, verify=True)
        assert_same_bits(_accumulate(DistributedDataParallel(verified)), accumulated)

    def ddp_around_the_backend_of_torch_compile() -> None:
        def compiled(split: bool) -> nn.Module:
            torch._dynamo.reset()
            torch._dynamo.config.optimize_ddp = split
            options = {"budget": BUDGET, "time_limit": SECONDS}
            model = torch.compile(_net(), backend=backend, options=options, dynamic=False)
            return DistributedDataParallel(model, bucket_cap_mb=1)

        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="optimize_ddp = False"):
            _train(compiled(split=True))
        assert_same_bits(_train(compiled(split=False)), _train(DistributedDataParallel(_net())))

    def refused() -> None:
        wrapped = DistributedDataParallel(_net())
        with pytest.raises(Unsupported, match=r"DistributedDataParallel\(checkmate.compile\(model"):
            _compiled(wrapped)
        hidden = [wrapped]
        for step in (lambda x, y: 2 * wrapped(x, y), lambda x, y: 2 * hidden[0](x, y)):
            with pytest.raises(Unsupported, match=r"DistributedDataParallel\(checkmate.compile\(model"):
                checkmate.compile(step, budget=BUDGET)(*batch(SIZE, WIDTH))
        sharded = fully_shard(_net())
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        with pytest.raises(Unsupported, match=r"checkmate.compile\(model.*outside of the plan.*reserve="):
            checkmate.training_step(sharded, optimizer, budget=BUDGET)
        zero = ZeroRedundancyOptimizer(_net().parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(Unsupported, match=r"ZeroRedundancyOptimizer.*reserve="):
            checkmate.training_step(_net(), zero, budget=BUDGET)
        with pytest.raises(InfeasibleBudget, match="Smallest budget that works") as caught:
            DistributedDataParallel(_compiled(_net(), "3 MB"))(*batch(SIZE, WIDTH))
        assert len(set(everywhere((str(caught.value), caught.value.min_budget, caught.value.op)))) == 1

    def ranks_that_train_different_steps() -> None:
        """None waits for another: a smaller batch on one, another model on each, a step that one takes alone."""
        x, y = batch(SIZE, WIDTH)
        model = DistributedDataParallel(compiled := _compiled(_net()))
        model(x[: SIZE - dist.get_rank()], y[: SIZE - dist.get_rank()]).backward()
        assert not compiled.plans[0].origin.startswith("rank")
        stage = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(1 + dist.get_rank())])
        _compiled(stage)(x).sum().backward()
        if dist.get_rank() == 1:
            _compiled(nn.Linear(WIDTH, 3))(x).sum().backward()
        dist.barrier()

    def lengths_of_their_own_on_each_rank() -> None:
        """Two captures on each; a length that the other rank has planned before, or has no more, keeps none waiting."""
        rank = dist.get_rank()
        sizes = [lengths[rank] for lengths in ((64, 40), (30, 64), (50, 33), (33, 50), (64, 64), (20, 44), (44, 70))]
        batches = [batch(16 * size, WIDTH) for size in sizes]

        def left_by(wrapped: nn.Module) -> Any:
            torch.manual_seed(rank)
            optimizer, left = torch.optim.SGD(wrapped.parameters(), lr=0.1), []
            for x, y in batches:
                loss = wrapped(x, y)
                loss.backward()
                left.append((loss.detach(), [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]))
                optimizer.step()
                optimizer.zero_grad()
            return local([left, [*wrapped.state_dict().values()]])

        problem = checkmate.trace(_net(), *batch(16 * 70, WIDTH))
        budget = (checkmate.min_budget(problem, time_limit=SECONDS).peak + problem.keep_all_peak) // 2
        captured = []
        compiled = _compiled(_net(), max(everywhere(budget)))
        with pytest.MonkeyPatch.context() as patch:
            compile_graph = compilation.Backend.compile
            patch.setattr(compilation.Backend, "compile", lambda *given: captured.append(1) or compile_graph(*given))
            model = DistributedDataParallel(compiled)
            assert_same_bits(left_by(model), left_by(DistributedDataParallel(_net())))
        assert [len(captured), len(compiled.plans)] == [2, len(set(sizes))]
        assert any(plan.schedule.recomputed.sum() for plan in compiled.plans)

    def collectives_within_the_step() -> None:
        problem = checkmate.trace(Synchronized(), *batch(SIZE, WIDTH))
        compiled = _compiled(Synchronized(), checkmate.min_budget(problem, time_limit=SECONDS).peak + 100_000)
        model = DistributedDataParallel(compiled)
        assert_same_bits(_train(model), _train(DistributedDataParallel(Synchronized())))
        _one_plan(compiled.plans)
        (plan,) = compiled.plans
        talking = [k for k, op in enumerate(plan.problem.graph.ops) if "c10d" in op.target]
        assert len(talking) == 3  # each a launch and its wait
        assert all(plan.plan.runs.count(k) == 1 for k in talking)
        assert {plan.problem.graph.ops[k].pinned for k in talking} == {"exchanges data with other ranks"}

    def sharded() -> None:
        expected = _train(fully_shard(_net()))
        model = fully_shard(compiled := _compiled(_net()))
        assert_same_bits(_train(model), expected)
        _one_plan(compiled.plans)
        model.zero_grad()
        (plan,) = compiled.plans
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        x, y = batch(SIZE, WIDTH)
        use = measure_peak(lambda: model(x, y).backward())
        there = parameters // RANKS + x.nbytes + y.nbytes  # at entry: what is gathered comes within the call
        assert there + use.peak <= plan.peak + 2 * parameters  # what docs/ecosystem.md says to reserve

    def sharded_in_blocks() -> None:
        """A plan for each of two blocks, each with the bits; a step whose parts are sharded on their own is refused."""

        def blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
            model = _net()
            for i, block in enumerate(model.blocks):
                model.blocks[i] = fully_shard(wrap(block) if i < 2 else block)
            return fully_shard(model)

        assert_same_bits(_train(blocks(_compiled)), _train(blocks(lambda block: block)))
        model = _compiled(_net())
        for block in model.blocks:
            fully_shard(block)
        with pytest.raises(Unsupported, match=r"blocks.0 is a part of the step.*as one unit"):
            fully_shard(model)(*batch(SIZE, WIDTH))
        with pytest.raises(Unsupported, match=r"fully_shard\(checkmate.compile\(model"):
            _compiled(fully_shard(_net()))

    def a_second_memory() -> None:
        """Each rank has its own, and all follow the plan of one, with the rates that this one has measured."""
        room = {"host_budget": "100 MB", "host": "file:/dev/shm"}
        problems = [checkmate.trace(_net(), *batch(SIZE, WIDTH), **there) for there in (room, {})]
        least = [checkmate.min_budget(problem, time_limit=2 * SECONDS).peak for problem in problems]
        (budget,) = set(everywhere(sum(least) // 2)[:1])  # that holds with it only
        model = checkmate.compile(_net(), budget=budget, time_limit=2 * SECONDS, **room)
        assert_same_bits(_train(DistributedDataParallel(model)), _train(DistributedDataParallel(_net())))
        (plan,) = model.plans
        assert plan.plan is not None
        assert plan.plan.sent
        assert len(set(everywhere((str(plan.plan), plan.cost, str(plan.problem.host))))) == 1
        assert model.memory().second_memories[0].peak == simulate(plan.plan, plan.problem).host_peak

    def what_there_is() -> None:
        """Ranks that exchange data within a step take the least that one of them finds; no other rank is waited for."""
        looked, rank = [], dist.get_rank()

        def available(device: torch.device, held: int, **about: Any) -> Available:
            looked.append(about["sharing"])
            return Available(Limit("this machine", 10**9, 10**8 + rank * 10**7), held, 0)

        inside, around = (checkmate.compile(made, time_limit=SECONDS) for made in (Synchronized(), _net()))
        wrapped = DistributedDataParallel(_net())
        whole = checkmate.training_step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), time_limit=SECONDS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compilation, "available", available)
            inside(*batch(SIZE, WIDTH)).backward()
            whole(*batch(SIZE, WIDTH))
            DistributedDataParallel(around)(*batch(SIZE, WIDTH)).backward()
        assert looked == [RANKS] * 3
        budgets = [everywhere(step.plans[0].budget) for step in (inside, whole, around)]
        assert [len(set(each)) for each in budgets] == [1, 1, 2]
        assert max(budgets[0] + budgets[1]) < 10**8 + 10**7


MORE = [Scenes.a_second_memory, Scenes.lengths_of_their_own_on_each_rank]
SCENES = [scene for name, scene in vars(Scenes).items() if name[0] != "_" and scene not in MORE]


@pytest.mark.parametrize("scenes", [SCENES, long(MORE)])
def test_two_ranks(scenes: Sequence[Callable[[], None]], tmp_path: Path) -> None:
    play(scenes, RANKS, tmp_path)


class _OfThree:
    """Three ranks: gloo adds an element in an order that depends on where it stands in a bucket."""

    def buckets_are_filled_in_order() -> None:
        def make() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(64, 65), nn.LayerNorm(65), nn.GELU(), nn.Linear(65, 63), nn.Linear(63, 3))

        def left_by(wrapped: nn.Module) -> Any:
            optimizer, x = torch.optim.SGD(wrapped.parameters(), lr=0.1), batch(32)[0]
            grads = []
            for _ in range(4):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                grads += [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
                optimizer.step()
            return local(grads)

        def hooked(model: nn.Module) -> nn.Module:
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(None, allreduce_hook)
            return wrapped

        wraps = [DistributedDataParallel, partial(DistributedDataParallel, static_graph=True), hooked, fully_shard]
        for wrap in wraps:
            expected = left_by(wrap(make()))
            assert_same_bits(left_by(wrap(_compiled(make(), "1 GB"))), expected)


def test_three_ranks(tmp_path: Path) -> None:
    play([_OfThree.buckets_are_filled_in_order], 3, tmp_path)


# ---------------------------------------------------------------- parameters that are shards, in one plan

PINNED = "exchanges data with other ranks"
GATHERED, REDUCED, SUMMED = (
    f"_c10d_functional.{name}" for name in ("gather_parameter", "reduce_scatter_tensor", "all_reduce")
)


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


class OfShards:
    """OfShards that the same ranks play one after the other; the last one ends the group."""

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


MORE_OF_SHARDS = [OfShards.whole_steps_of_sgd, OfShards.the_recipe]
OF_SHARDS = [scene for name, scene in vars(OfShards).items() if name[0] != "_" and scene not in MORE_OF_SHARDS]


@pytest.mark.long
def test_the_example_of_ranks(tmp_path: Path) -> None:
    said = torchrun(str(ROOT / "examples/ranks.py"), folder=tmp_path)
    assert "verified: the same bits as plain PyTorch" in said
    assert re.search(r"of 18 parameters [1-9]\d* are gathered again", said)


@pytest.mark.parametrize(("ranks", "scenes"), [(2, OF_SHARDS), long(4, [*OF_SHARDS, *MORE_OF_SHARDS])])
def test_ranks_of_shards(ranks: int, scenes: Sequence[Callable[[], None]], tmp_path: Path) -> None:
    play(scenes, ranks, tmp_path)
