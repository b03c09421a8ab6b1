"""Two processes that train together, over gloo on the CPU: the bits of plain PyTorch and one plan, or a refusal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import checkmate
from benchmarks.common.own_seconds import count_own_seconds
from checkmate.backends import compilation
from checkmate.core.simulator import simulate
from checkmate.core.solution import Solution
from checkmate.dynamo import backend
from checkmate.memory import measure_peak
from checkmate.memory.available import Available, Limit
from tests.support.bits import assert_same_bits
from tests.support.processes import own_cache, start_ranks

RANKS, WIDTH, BATCH = 2, 256, 1024
BUDGET = 12_000_000
SECONDS = 0.3  # to plan

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")]


class Net(nn.Module):
    """Large enough for several buckets of gradients, of which the first takes 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.norm, self.drop, self.head = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss, so that it is within the plan."""
        for block in self.blocks:
            x = x + self.drop(F.gelu(block(x)))
        return F.cross_entropy(self.head(self.norm(x)), y)


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


def _batch() -> tuple[Tensor, Tensor]:
    """Another one on each rank."""
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))


def _local(tensor: Tensor) -> Tensor:
    full = tensor.detach()
    return (full.to_local() if hasattr(full, "to_local") else full).clone()


def _train(model: nn.Module, *, accumulate: bool = False) -> list[Tensor]:
    """Losses, gradients, and in the end the state and the random state; four steps, so that buckets are rebuilt."""
    torch.manual_seed(5 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    left = []
    for _ in range(4):
        if accumulate:
            with model.no_sync():
                model(*_batch()).backward()
        loss = model(*_batch())
        loss.backward()
        left += [loss.detach().clone(), *(_local(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *map(_local, model.state_dict().values()), torch.get_rng_state()]


def _assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(expected) > 20
    assert_same_bits(found, expected)


def _compiled(model: nn.Module, budget: int | str = BUDGET) -> Any:
    return checkmate.compile(model, budget=budget, time_limit=SECONDS)


def _everywhere(thing: object) -> list[Any]:
    """What each rank has for it."""
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, thing)
    return found


def _one_plan(plans: list[Solution]) -> None:
    """Each rank follows the same one, made by one of them, and something runs again in it."""
    (plan,) = plans
    assert plan.schedule is not None
    assert plan.schedule.recomputed.sum() > 0
    assert len(set(_everywhere((plan.schedule.R.tobytes(), plan.cost, plan.bound, plan.peak)))) == 1
    assert len([origin for origin in _everywhere(plan.origin) if origin.startswith("rank ")]) == 1


def _ddp() -> None:
    batch = _batch()
    for options in ({"find_unused_parameters": True}, {"gradient_as_bucket_view": True, "static_graph": True}):
        compiled = _compiled(Net())
        expected = _train(DistributedDataParallel(Net(), **options))
        model = DistributedDataParallel(compiled, bucket_cap_mb=1, **options)
        _assert_same(_train(model), expected)
        _one_plan(compiled.plans)
    (plan,) = compiled.plans
    assert plan.peak < plan.problem.keep_all_peak
    flat = sum(b.nbytes for b in model.buffers() if b.is_floating_point())  # gloo's threads let go of them unseen
    for broadcast, held in ((False, 0), (True, flat)):
        model.broadcast_buffers = broadcast
        model.zero_grad()
        use = measure_peak(lambda: model(*batch).backward())
        assert use.final in (0, held)
        assert plan.problem.resident + use.peak <= plan.peak + use.final
    accumulated = _train(DistributedDataParallel(Net()), accumulate=True)
    verified = checkmate.compile(Net(), budget=BUDGET, time_limit=SECONDS, verify=True)
    _assert_same(_train(DistributedDataParallel(verified), accumulate=True), accumulated)


def _ddp_around_the_backend_of_torch_compile() -> None:
    def compiled(split: bool) -> nn.Module:
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = split
        options = {"budget": BUDGET, "time_limit": SECONDS}
        model = torch.compile(Net(), backend=backend, options=options, dynamic=False)
        return DistributedDataParallel(model, bucket_cap_mb=1)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="optimize_ddp = False"):
        _train(compiled(split=True))
    _assert_same(_train(compiled(split=False)), _train(DistributedDataParallel(Net())))


def _refused() -> None:
    wrapped = DistributedDataParallel(Net())
    with pytest.raises(checkmate.Unsupported, match=r"DistributedDataParallel\(checkmate.compile\(model"):
        _compiled(wrapped)
    hidden = [wrapped]
    for step in (lambda x, y: 2 * wrapped(x, y), lambda x, y: 2 * hidden[0](x, y)):
        with pytest.raises(checkmate.Unsupported, match=r"DistributedDataParallel\(checkmate.compile\(model"):
            checkmate.compile(step, budget=BUDGET)(*_batch())
    sharded = fully_shard(Net())
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with pytest.raises(checkmate.Unsupported, match=r"checkmate.compile\(model.*outside of the plan.*reserve="):
        checkmate.training_step(sharded, optimizer, budget=BUDGET)
    zero = ZeroRedundancyOptimizer(Net().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(checkmate.Unsupported, match=r"ZeroRedundancyOptimizer.*reserve="):
        checkmate.training_step(Net(), zero, budget=BUDGET)
    with pytest.raises(checkmate.InfeasibleBudget, match="Smallest budget that works") as caught:
        DistributedDataParallel(_compiled(Net(), "3 MB"))(*_batch())
    assert len(set(_everywhere((str(caught.value), caught.value.min_budget, caught.value.op)))) == 1


def _ranks_that_train_different_steps() -> None:
    """None waits for another: a smaller batch on one, another model on each, a step that one of them takes alone."""
    x, y = _batch()
    model = DistributedDataParallel(compiled := _compiled(Net()))
    model(x[: BATCH - dist.get_rank()], y[: BATCH - dist.get_rank()]).backward()
    assert not compiled.plans[0].origin.startswith("rank")
    stage = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(1 + dist.get_rank())])
    _compiled(stage)(x).sum().backward()
    if dist.get_rank() == 1:
        _compiled(nn.Linear(WIDTH, 3))(x).sum().backward()
    dist.barrier()


def _collectives_within_the_step() -> None:
    problem = checkmate.trace(Synchronized(), *_batch())
    compiled = _compiled(Synchronized(), checkmate.min_budget(problem, time_limit=SECONDS).peak + 100_000)
    model = DistributedDataParallel(compiled)
    _assert_same(_train(model), _train(DistributedDataParallel(Synchronized())))
    _one_plan(compiled.plans)
    (plan,) = compiled.plans
    talking = [k for k, op in enumerate(plan.problem.graph.ops) if "c10d" in op.target]
    assert len(talking) == 3  # each a launch and its wait
    assert all(plan.plan.runs.count(k) == 1 for k in talking)
    assert {plan.problem.graph.ops[k].pinned for k in talking} == {"exchanges data with other ranks"}


def _sharded() -> None:
    expected = _train(fully_shard(Net()))
    model = fully_shard(compiled := _compiled(Net()))
    _assert_same(_train(model), expected)
    _one_plan(compiled.plans)
    model.zero_grad()
    (plan,) = compiled.plans
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    x, y = _batch()
    use = measure_peak(lambda: model(x, y).backward())
    there = parameters // RANKS + x.nbytes + y.nbytes  # at entry: what is gathered comes within the call
    assert there + use.peak <= plan.peak + 2 * parameters  # what docs/ecosystem.md says to reserve


def _sharded_in_blocks() -> None:
    """A plan for each of two blocks, and each in the bits; a step whose parts are sharded on their own is refused."""

    def blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        model = Net()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = fully_shard(wrap(block) if i < 2 else block)
        return fully_shard(model)

    _assert_same(_train(blocks(_compiled)), _train(blocks(lambda block: block)))
    model = _compiled(Net())
    for block in model.blocks:
        fully_shard(block)
    with pytest.raises(checkmate.Unsupported, match=r"blocks.0 is a part of the step.*as one unit"):
        fully_shard(model)(*_batch())
    with pytest.raises(checkmate.Unsupported, match=r"fully_shard\(checkmate.compile\(model"):
        _compiled(fully_shard(Net()))


def _a_second_memory() -> None:
    """Each rank has its own, and all follow the plan of one, with the rates that this one has measured."""
    room = {"host_budget": "100 MB", "host": "file:/dev/shm"}
    problems = [checkmate.trace(Net(), *_batch(), **there) for there in (room, {})]
    least = [checkmate.min_budget(problem, time_limit=2 * SECONDS).peak for problem in problems]
    (budget,) = set(_everywhere(sum(least) // 2)[:1])  # that holds with it only
    model = checkmate.compile(Net(), budget=budget, time_limit=2 * SECONDS, **room)
    _assert_same(_train(DistributedDataParallel(model)), _train(DistributedDataParallel(Net())))
    (plan,) = model.plans
    assert plan.plan is not None
    assert plan.plan.sent
    assert len(set(_everywhere((str(plan.plan), plan.cost, str(plan.problem.host))))) == 1
    assert model.memory().second_memories[0].peak == simulate(plan.plan, plan.problem).host_peak


def _what_there_is() -> None:
    """Ranks that exchange data within a step take the least that one of them finds; no other rank is waited for."""
    looked, rank = [], dist.get_rank()

    def available(device: torch.device, held: int, **about: Any) -> Available:
        looked.append(about["sharing"])
        return Available(Limit("this machine", 10**9, 10**8 + rank * 10**7), held, 0)

    inside, around = (checkmate.compile(made, time_limit=SECONDS) for made in (Synchronized(), Net()))
    wrapped = DistributedDataParallel(Net())
    whole = checkmate.training_step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), time_limit=SECONDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "available", available)
        inside(*_batch()).backward()
        whole(*_batch())
        DistributedDataParallel(around)(*_batch()).backward()
    assert looked == [RANKS] * 3
    budgets = [_everywhere(step.plans[0].budget) for step in (inside, whole, around)]
    assert [len(set(each)) for each in budgets] == [1, 1, 2]
    assert max(budgets[0] + budgets[1]) < 10**8 + 10**7


SCENES = (
    _ddp,
    _ddp_around_the_backend_of_torch_compile,
    _refused,
    _ranks_that_train_different_steps,
    _collectives_within_the_step,
    _sharded,
    _sharded_in_blocks,
    _a_second_memory,
    _what_there_is,
)


def _run(rank: int, meeting: str, folder: str) -> None:
    """All scenes in one process: starting two takes longer than they do."""
    os.environ["CHECKMATE_CACHE_DIR"] = own_cache(f"{folder}/{rank}")  # each measures for itself
    logging.getLogger("checkmate").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    count_own_seconds()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    for scene in SCENES:
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = True
        try:
            scene()
        except Exception as error:
            raise AssertionError(scene.__name__) from error
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    start_ranks(_run, RANKS, str(tmp_path / "meeting"), str(tmp_path))
