"""Each exchange is one op, and some may run again: in a group of two ranks, one of which is imagined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkmate
from checkmate.core.graph import Op
from checkmate.errors import Unsupported

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
X = torch.ones(6, 8)
ONCE = "exchanges data with other ranks"


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _parameter(rows: int = 8) -> Any:
    return nn.Parameter(distribute_tensor(torch.ones(rows, 8), init_device_mesh("cpu", (2,)), [Shard(0)]))


def _whole(shard: Any) -> Tensor:
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])


def _exchanges(step: Any, *args: Tensor) -> list[Op]:
    problem = checkmate.trace(step, *args, profile="roofline:laptop")
    return [op for op in problem.graph.ops if op.target.startswith("_c10d_functional")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
def test_a_parameter_may_be_gathered_again_and_its_gradient_is_reduced_once(dtype: torch.dtype) -> None:
    weight = _parameter()
    gather, reduce = _exchanges(lambda x: (x.to(dtype) @ _whole(weight.to(dtype))).tanh().sum(), X)
    assert (gather.target, gather.pinned) == ("_c10d_functional.gather_parameter", None)
    assert (reduce.target, reduce.pinned) == ("_c10d_functional.reduce_scatter_tensor", ONCE)


def test_others_are_gathered_once() -> None:
    """An activation, shards of different sizes, and a sum of two parameters."""
    weight, other, uneven = _parameter(), _parameter(), _parameter(rows=9)
    for step in (
        lambda x: all_gather_tensor_autograd((x * weight.to_local()[0]).tanh(), 0, dist.group.WORLD).sum(),
        lambda x: (x @ _whole(uneven)[:8]).tanh().sum(),
        lambda x: (x @ _whole(weight + other)).tanh().sum(),
    ):
        found = _exchanges(step, X)
        assert "_c10d_functional.all_gather_into_tensor" in {op.target for op in found}
        assert {op.pinned for op in found} == {ONCE}


def test_an_exchange_and_the_wait_for_it_are_one_op_that_runs_once() -> None:
    def step(x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return (x - mean).tanh().sum()

    (op,) = _exchanges(step, X.clone().requires_grad_())
    assert op.pinned == ONCE


def test_a_parameter_that_is_updated_is_gathered_before() -> None:
    """From the old shard: its update overwrites it, and nothing gathers it again afterwards."""
    weight = _parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step = checkmate.training_step(lambda x: (x @ _whole(weight)).tanh().sum(), optimizer, budget="1 MB", time_limit=1)
    step(X)
    (plan,) = step.plans
    names = [plan.problem.graph.ops[k].target for k in plan.plan.runs]
    assert names.index("checkmate.update_parameter") > max(i for i, n in enumerate(names) if "gather" in n)


def test_weights_that_autocast_converts_are_refused() -> None:
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (2,)), [Replicate()]))

    def step(x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        with torch.autocast("cpu", torch.bfloat16):
            product = whole @ weight
        return product.to_local().float().sum()

    with pytest.raises(Unsupported, match=r"is a DTensor, and autocast.*\.to\(torch.bfloat16\)"):
        checkmate.trace(step, X, profile="roofline:laptop")
