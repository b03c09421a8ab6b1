"""Find the mesh of ranks and the batch that train fastest within one rank's bytes, on simulated ranks.

No rank runs. For each mesh PyTorch's backend "fake" stands for a process group, of which this process is the first
rank: a step is captured with its collectives as it would be there, and planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from checkmate.backends.planner import Bytes
from checkmate.core.answer import Listed, Table
from checkmate.core.solution import Solution, format_gap
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.source import Choice, source_of
from checkmate.solvers.frontier import solve_all
from checkmate.solvers.solve import refused
from checkmate.torch_internals.steps import FakeStore
from checkmate.tracing import trace
from checkmate.units import format_bytes, format_seconds, parse_budget

DIMENSIONS = ("data", "tensor")  # of meshes, in this order


@dataclass(frozen=True)
class MeshPoint:
    """The plan of a mesh and a batch, in numbers."""

    mesh: tuple[int, ...]  # ranks in each dimension, the first of which have other samples
    size: int  # samples of a batch of one of these
    throughput: float  # samples a second, of all ranks; 0 without a plan
    seconds: float  # of the step, infinite without a plan
    overhead: float  # as `Solution.overhead`
    peak: int | None  # bytes of a rank
    gap: float  # (cost - bound) / cost
    message: str  # why there is no plan, and the smallest budget that works
    solution: Solution = field(repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class MeshSweep(Listed[MeshPoint]):
    """A point for each mesh and size, in the order asked for. Prints as a table."""

    budget: int  # bytes of a rank
    points: tuple[MeshPoint, ...]

    listed: ClassVar = "points"  # for `records`

    @property
    def fastest(self) -> MeshPoint | None:
        """The point with the most samples per second; None if nothing fits."""
        best = max(self.points, key=lambda point: point.throughput, default=None)
        return best if best is not None and best.solution.plan is not None else None

    def _tables(self) -> Iterator[Table]:
        rows: list[tuple[str, ...]] = []
        for point in self.points:
            where = " x ".join(map(str, point.mesh)), str(point.size)
            if point.peak is None:
                rows.append((*where, "no plan", "", "", "", ""))
                continue
            rate, step = f"{point.throughput:.4g}", format_seconds(point.seconds)
            rows.append((*where, rate, step, f"{point.overhead:+.2%}", format_gap(point.gap), format_bytes(point.peak)))
        heads = ("mesh", "batch", "samples/s", "step", "recomputed", "gap", "peak")
        yield Table(heads, rows, {*heads[1:]})


def sweep_meshes(
    make_step: Callable[[Any, int], tuple[Any, tuple[Any, ...]]],
    meshes: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    budget: Bytes,
    *,
    profile: Choice = "measure",
    cache: bool = True,
    overlap: bool = True,
    time_limit: float = 60.0,
    jobs: int | None = None,
    client: Any = None,
) -> MeshSweep:
    """Plan a sharded step on meshes of simulated ranks, for several batch sizes.

    Args:
        make_step: gives the step of a `DeviceMesh` and a size: a module or function whose parameters are sharded over
            the mesh, and the batch of one rank, a tuple. Where costs are estimated for a GPU, the tensors that it makes
            are on the meta device, and take no memory.
        meshes: shapes, such as (8,) or (4, 2), of dimensions "data", whose ranks have samples of their own, and
            "tensor".
        sizes: of batches, of one rank of the first dimension.
        budget: bytes of one rank, or text such as "8 GB".
        profile, cache: where costs come from, as for `checkmate.trace`. Links are estimated, unless a group like the
            imagined one has been measured (`checkmate.profiling.mesh`).
        overlap: collectives go on beside other ops, as for `checkmate.compile`.
        time_limit: seconds for each plan.
        jobs, client: where plans are looked for, as for `checkmate.frontier`.

    Raises:
        RuntimeError: within a process group, which would be in the way.
        Unsupported: if a step cannot be captured.
        BudgetError, ValueError: for arguments that make no sense.

    >>> import torch
    >>> def make_step(mesh, size):
    ...     model = torch.nn.Linear(64, 64)
    ...     return (lambda x: model(x).square().mean()), (torch.ones(size, 64),)
    >>> found = sweep_meshes(make_step, [(2,), (4,)], [32], "1 MB", time_limit=5, jobs=1)
    >>> found.fastest.mesh, [point.size for point in found]
    ((4,), [32, 32])
    """
    if dist.is_initialized():
        raise RuntimeError("Meshes are compared outside of a process group: end it first, destroy_process_group().")
    # Trace each mesh and size as rank 0 of a fake process group.
    total, asked = parse_budget(budget), [(tuple(mesh), size) for mesh in meshes for size in sizes]
    source = source_of(profile)
    on_gpu = isinstance(source, Device) and source.capability is not None
    calls = []
    for mesh, size in asked:
        if not 1 <= len(mesh) <= len(DIMENSIONS) or not all(type(n) is int and n >= 1 for n in mesh):
            raise ValueError(f"A mesh is (data,) or (data, tensor), numbers of ranks, not {mesh!r}.")
        dist.init_process_group("fake", rank=0, world_size=prod(mesh), store=FakeStore())
        try:
            ranks = init_device_mesh("cuda" if on_gpu else "cpu", mesh, mesh_dim_names=DIMENSIONS[: len(mesh)])
            with torch.device("meta") if on_gpu else nullcontext():
                step, batch = make_step(ranks, size)
            problem = trace(step, *batch, profile=profile, cache=cache, overlap=overlap)
        finally:
            dist.destroy_process_group()
        calls.append((problem, "auto", total, {"time_limit": time_limit}))
    # Solve all problems, and rank them by samples a second.
    points = []
    for (mesh, size), found in zip(asked, solve_all(calls, jobs=jobs, client=client), strict=True):
        one = found if found.plan is not None else refused(found, time_limit=1.0)
        throughput = size * mesh[0] / one.cost if one.cost > 0 else float("inf")
        message = "" if one.plan is not None else one.message
        points.append(MeshPoint(mesh, size, throughput, one.cost, one.overhead, one.peak, one.gap, message, one))
    return MeshSweep(total, tuple(points))
