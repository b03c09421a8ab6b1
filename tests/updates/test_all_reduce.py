"""Whole steps on ranks that train together, over gloo on the CPU: the bits of plain loops, and no rank goes astray."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import checkmate
from checkmate.core.plan import Run
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.ranks import batch, everywhere, play
from tests.support.sampling import long, slow
from tests.support.whole_steps import assert_as_plain, classifier, loss_of, plain_step, planned_step, train_whole

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")]
SECONDS = 0.3  # to plan
_batch = partial(batch, width=32)
_planned = partial(planned_step, time_limit=SECONDS)


def _assert_same_everywhere(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Compare the model and the states of the optimizer on all ranks."""
    first, *others = everywhere(([p.detach() for p in model.parameters()], optimizer.state_dict()))
    for of_another in others:
        assert_same_bits(of_another, first)


def _like_ddp(model: nn.Module, loss_fn: Any, optimizer: optim.Optimizer, accumulate: int = 1, **options: Any) -> Any:
    """The plain loop around `DistributedDataParallel`, which sends gradients once for each update."""
    step, numbers = plain_step(loss_fn, [optimizer], accumulate=accumulate, **options), itertools.count(1)

    def run(*given: Tensor) -> Tensor:
        model.require_backward_grad_sync = next(numbers) % accumulate == 0  # what `no_sync` sets
        return step(*given)

    return run


def _evaluate(model: nn.Module, number: int) -> None:
    """A forward that no backward follows, after which DDP waits for gradients."""
    model.eval()(_batch()[0])
    model.train()


def _assert_as_plain(
    budget: int | None = None, *, wrapped: bool = True, clip_norm: float | None = None, **options: Any
) -> list[Any]:
    """Four updates and a half, ``wrapped`` in DDP and averaged with a group: bits of the loop around DDP, on each rank.

    Gives the plan of each.
    """
    plain = DistributedDataParallel(classifier())
    optimizer = optim.AdamW(plain.parameters(), lr=1e-2)
    steps = 4 * options.get("accumulate", 1) + 1
    loop = _like_ddp(plain, loss_of(plain), optimizer, clip_norm=clip_norm, **options)
    expected = train_whole(loop, plain.module, [optimizer], _batch(), steps=steps, metered=False)
    plans = []
    for wrap in (*[DistributedDataParallel] * wrapped, lambda model: model):
        model = classifier()
        inner, group = wrap(model), wrap is not DistributedDataParallel and dist.group.WORLD
        if group and dist.get_rank():
            with torch.no_grad():
                model[0][0].weight.zero_()  # those of the first rank are taken
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        about = {"clip_norm": clip_norm, "process_group": group, **options}
        step = _planned(loss_of(inner), optimizer, **about, **({} if budget is None else {"budget": budget}))
        metered, evaluate = "accumulate" not in options, partial(_evaluate, inner)
        found = train_whole(step, model, [optimizer], _batch(), steps=steps, between=evaluate, metered=metered)
        assert_same_bits(found.bits(), expected.bits())
        _assert_same_everywhere(model, optimizer)
        plan = step.plans[-1]
        assert {plan.problem.resident + peak for peak in found.peaks[1:]} <= {plan.peak}
        plans.append(plan)
    return plans


class Scenes:
    """Scenes that the same ranks play one after the other; the last one ends the group."""

    def same_numbers() -> None:
        """With room, and where gradients are averaged in place; the budget holds the buckets of DDP."""
        wrapped, plan = _assert_as_plain()
        problem = plan.problem
        sent = {k for k, op in enumerate(problem.graph.ops) if "over all ranks" in (op.pinned or "")}
        assert len(sent) == 2 * 4 + 2
        buckets = sum(p.nbytes for p in classifier().parameters())
        assert wrapped.problem.resident == problem.resident + buckets
        least = checkmate.min_budget(problem, time_limit=SECONDS).peak
        (plan,) = _assert_as_plain(least + buckets, wrapped=False)
        assert sent.intersection(run.op for run in plan.plan.steps if isinstance(run, Run) and run.over is not None)

    def several_micro_batches() -> None:
        """Summed on each rank, and sent once."""
        _assert_as_plain(accumulate=2, clip_norm=0.1)

    def with_a_scaler_and_an_average() -> None:
        """A gradient that is not finite on one rank has all of them skip the update, and scale less."""

        def train(make: Callable[..., Any]) -> Any:
            model, scaler = classifier(), torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer, averaged = optim.SGD(model.parameters(), lr=0.1, momentum=0.9), AveragedModel(model)
            loss_fn = loss_of(DistributedDataParallel(model))
            step = make(loss_fn, optimizer, scaler=scaler, clip_norm=0.1, ema=(averaged, model))
            scales = []
            torch.manual_seed(dist.get_rank())
            for i in range(4):
                x, y = _batch()
                if i == 1 and dist.get_rank() == 1:
                    x[0, 0] = math.inf
                step(x, y)
                scales.append(scaler.get_scale())
            _assert_same_everywhere(model, optimizer)
            return scales, averaged.state_dict(), model.state_dict(), optimizer.state_dict()

        _, (scales, *_) = assert_as_plain(train, time_limit=SECONDS)
        assert scales == [1024.0, 512.0, 512.0, 512.0]

    def batches_of_other_sizes() -> None:
        """Each rank has a plan of its own then, and sends its gradients in the same order all the same."""

        def train(make: Callable[..., Any]) -> Any:
            model = classifier()
            step = make(loss_of(DistributedDataParallel(model)), optim.SGD(model.parameters(), lr=0.1))
            torch.manual_seed(3)
            for size in (64, 64 - 8 * dist.get_rank(), 40 + 8 * dist.get_rank()):
                step(*_batch(size))
            return model.state_dict()

        assert_as_plain(train, time_limit=SECONDS)

    def other_steps_are_refused() -> None:
        """A rank that uses other parameters has gradients of its own: all are told, and nothing is updated."""
        model = classifier()
        before = copy.deepcopy([*model.parameters()])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        last = model[-1]

        def loss_fn(x: Tensor, y: Tensor, *, deep: bool) -> Tensor:
            return F.cross_entropy(model(x) if deep else last(x), y)

        for accumulate in (1, 2):
            step = _planned(loss_fn, optimizer, process_group=dist.group.WORLD, accumulate=accumulate)
            if accumulate == 2:
                step(*_batch(), deep=dist.get_rank() == 0)
            with pytest.raises(Unsupported, match="No parameter was updated"):
                step(*_batch(), deep=accumulate == 1 and dist.get_rank() == 0)
        assert_same_bits([*model.parameters()], before)

    def verified() -> None:
        """The first step is compared with a plain one whose gradients are averaged one by one."""
        for wrap in (DistributedDataParallel, lambda model: model):
            model = classifier()
            inner, group = wrap(model), wrap is not DistributedDataParallel and dist.group.WORLD
            optimizer = optim.AdamW(model.parameters())
            step = _planned(loss_of(inner), optimizer, verify=True, clip_norm=0.1, process_group=group)
            step(*_batch())

    def refused() -> None:
        model, inner, hooked = classifier(), *(DistributedDataParallel(classifier()) for _ in range(2))
        hooked.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        own, other = type("Own", (DistributedDataParallel,), {})(classifier()), nn.Linear(32, 10 + dist.get_rank())
        world = {"process_group": dist.group.WORLD}
        refused: list[tuple[Any, str, nn.Module, dict[str, Any]]] = [
            (
                TypeError,
                "init_process_group",
                model,
                {"process_group": None},
            ),  # as `group.WORLD` is before there is one
            (ValueError, "has a process group", inner, world),
            (Unsupported, r"communication hook.*reserve=", hooked, {}),
            (Unsupported, "A Own may do more", own, {}),
            (ValueError, "different shapes", other, world),
        ]
        for error, words, made, about in refused:
            with pytest.raises(error, match=words):
                _planned(loss_of(made), optim.SGD(made.parameters(), lr=0.1), **about)
        with inner.no_sync(), pytest.raises(Unsupported, match="accumulate=n"):
            _planned(loss_of(inner), optim.SGD(inner.parameters(), lr=0.1))(*_batch())

        def mean_of_all(x: Tensor, y: Tensor) -> Tensor:
            return all_gather_tensor_autograd(model(x), 0, dist.group.WORLD).square().mean()

        with pytest.raises(Unsupported, match="the backward exchanges data"):
            _planned(mean_of_all, optim.SGD(model.parameters(), lr=0.1), **world)(*_batch())

    def as_gradients_are_averaged_one_by_one() -> None:
        """The last micro-batch leaves out a part, whose sums are averaged all the same."""

        def plainly(parts: nn.ModuleList, loss_fn: Any, optimizer: optim.Optimizer) -> None:
            for i in range(7):
                for buffer in parts.buffers() if i % 2 == 0 else ():
                    dist.broadcast(buffer, 0)
                loss_fn(*_batch(), both=i % 2 == 0).backward()
                if i % 2 or i == 6:
                    for p in parts.parameters():
                        p.grad = p.grad * (1.0 / dist.get_world_size())
                        dist.all_reduce(p.grad)
                    nn.utils.clip_grad_norm_(parts.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()

        def planned(parts: nn.ModuleList, loss_fn: Any, optimizer: optim.Optimizer) -> None:
            step = _planned(loss_fn, optimizer, process_group=dist.group.WORLD, accumulate=2, clip_norm=0.1)
            for i in range(7):
                step(*_batch(), both=i % 2 == 0)
            step.update()

        left = []
        for train in (plainly, planned):
            torch.manual_seed(0)
            parts = nn.ModuleList([classifier(), nn.Linear(32, 10)])
            optimizer = optim.AdamW(parts.parameters(), lr=1e-2)

            def loss_fn(x: Tensor, y: Tensor, *, both: bool, parts: nn.ModuleList = parts) -> Tensor:
                return F.cross_entropy(parts[0](x) + parts[1](x) if both else parts[0](x), y)

            torch.manual_seed(dist.get_rank())
            train(parts, loss_fn, optimizer)
            left.append(copy.deepcopy((parts.state_dict(), optimizer.state_dict())))
        assert_same_bits(left[1], left[0])
        _assert_same_everywhere(parts, optimizer)

    def several_micro_batches_without_a_norm() -> None:
        _assert_as_plain(accumulate=2)

    def a_rank_that_dies() -> None:
        """The error of the exchange reaches the others."""
        model = classifier()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = _planned(loss_of(model), optimizer, process_group=dist.group.WORLD)
        step(*_batch())
        if dist.get_rank():
            os._exit(0)
        with pytest.raises(RuntimeError, match=r"(?i)connection|gloo"):
            step(*_batch())
        os._exit(0)


OF_THREE = [Scenes.as_gradients_are_averaged_one_by_one]
MORE = [Scenes.several_micro_batches_without_a_norm, Scenes.batches_of_other_sizes]
SCENES = [scene for name, scene in vars(Scenes).items() if name[0] != "_" and scene not in (*OF_THREE, *MORE)]


@pytest.mark.parametrize(("ranks", "scenes"), [slow(2, SCENES), long(3, OF_THREE), long(2, MORE)])
def test_ranks(ranks: int, scenes: Sequence[Callable[[], None]], tmp_path: Path) -> None:
    play(scenes, ranks, tmp_path)
