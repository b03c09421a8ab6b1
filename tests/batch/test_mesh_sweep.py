"""Meshes of imagined ranks: plans of sharded steps, which are those of ranks that are there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkmate import sweep_meshes
from checkmate.units import exact_bytes
from examples.ranks import shard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
GATHER, SUM = "_c10d_functional.gather_parameter", "_c10d_functional.all_reduce"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return loss


def make_step(mesh: Any, size: int) -> tuple[Any, tuple[Tensor]]:
    net = Net()
    if mesh.ndim == 1:
        return shard(net, mesh), (torch.ones(size, 64),)
    split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh["tensor"], split), (torch.ones(size, 64),)


@pytest.mark.long
def test_each_mesh_and_size_has_a_plan_or_says_why_not() -> None:
    with ThreadPoolExecutor(2) as client:
        found = sweep_meshes(make_step, [(2,), (2, 2)], [16, 4096], "1 MB", time_limit=2, client=client)
    assert [(point.mesh, point.size) for point in found] == [*product(((2,), (2, 2)), (16, 4096))]
    targets = [{op.target for op in point.solution.problem.graph.ops} for point in found]
    assert all(GATHER in of for of in targets[:2])
    assert all(SUM in of and GATHER not in of for of in targets[2:])
    for point in found:
        if point.size == 16:
            assert point.peak <= 10**6
            assert point.throughput == 16 * point.mesh[0] / point.seconds
        else:
            assert (point.peak, point.throughput) == (None, 0.0)
            assert exact_bytes(point.solution.refusal.min_budget) in point.message
    assert found.fastest.throughput == max(point.throughput for point in found)
    assert all(words in str(found) for words in ("no plan", "2 x 2"))
    assert len(found.records()) == 4
    assert not dist.is_initialized()


def test_for_a_gpu_nothing_is_allocated_and_sums_are_waited_for() -> None:
    """What is split over ranks waits for each sum of the forward, and that is proven."""
    kinds = set()

    def on_meta(mesh: Any, size: int) -> tuple[Any, tuple[Tensor]]:
        net, batch = make_step(mesh, size)
        kinds.update({batch[0].device.type, *(p.device.type for p in net.parameters())})
        return net, batch

    found = sweep_meshes(on_meta, [(2,), (1, 2)], [2048], "1 GB", profile="roofline:h100", time_limit=2, jobs=1)
    assert kinds == {"meta"}
    assert found.points[1].gap < 1e-3
    solution = found.points[1].solution
    graph, seconds = solution.problem.graph, solution.problem.seconds
    first = next(seconds[k] for k, op in enumerate(graph.ops) if op.target == SUM)
    assert solution.waited >= first > 0


def test_what_makes_no_sense_is_refused_and_leaves_no_group() -> None:
    with pytest.raises(ValueError, match=r"A mesh is \(data,\) or \(data, tensor\)"):
        sweep_meshes(make_step, [(2, 2, 2)], [16], "1 MB")

    def fails(mesh: Any, size: int) -> Any:
        raise KeyError(size)

    with pytest.raises(KeyError):
        sweep_meshes(fails, [(2,)], [16], "1 MB")
    assert not dist.is_initialized()
    assert sweep_meshes(make_step, [], [16], "1 MB").fastest is None
