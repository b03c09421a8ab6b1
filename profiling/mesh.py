"""The seconds of collectives on a mesh of ranks: by latency and rate, or from a table measured by all ranks.

    seconds = latency + traffic / rate
    traffic = bytes (n - 1) / n          of n ranks; twice that of an all-reduce, a reduce-scatter and an all-gather

The bytes are those of the whole: what an all-gather makes, what a reduce-scatter or an all-reduce reads. The traffic is
what each rank sends and receives in a ring, and the least that any algorithm moves (Patarasuk & Yuan, JPDC 2009).

A collective that one rank runs alone waits for ever. So it is not measured where a step is, by each rank when it comes
to that, but by a call that all ranks of the group make together, `measure_collectives`: once for a machine. What it
finds is kept in the file of measured ops (`checkmate.profiling.cost_cache`), under a key for each collective, group and
size, and is read from there by each rank alone. A group is known by its backend, its ranks and how many of them share a
host: the ranks of one mesh dimension cost what those of the same dimension elsewhere do. How many share a host is what
``torchrun`` tells them (``LOCAL_WORLD_SIZE``); without it, all are on one. A collective of a step names its group; if
that was not measured, it takes an estimate (`checkmate.profiling.roofline`).
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from checkmate.capture.nodes import target_name, tensors
from checkmate.profiling.cost_cache import Costs, OpCost, conditions_on, load, store
from checkmate.profiling.data_sheets import Device
from checkmate.torch_internals.running import _resolve_process_group

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)  # by PyTorch's names of the functional ones

# What all-reduces of 8 ranks reach of an H100's data sheet in Vidur's table (Agrawal et al., MLSys 2024);
# `tests/profiling/test_collectives.py` holds it against another table.
LATENCY, EFFICIENCY = 28e-6, 0.8

SIZES = tuple(4**n for n in range(6, 14))  # bytes of the whole: 4 KiB to 64 MiB
REPEATS, LARGE, REPEATS_OF_LARGE = 15, 2**22, 5  # equal on all ranks, which wait for one another
_RANKS_AT = {ALL_GATHER: 1, REDUCE_SCATTER: 2}  # the argument that says of how many; an all-reduce names its group only
_JOINED = {"gather_parameter": ALL_GATHER}  # names in a captured step of collectives that may run again
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_KEY = re.compile(r"(?P<layout>.+): (?P<collective>\w+) of (?P<whole>\d+) bytes")

Point = tuple[float, float]  # bytes of the whole, and seconds


def traffic(collective: str, whole_bytes: float, ranks: int | None) -> float:
    """Bytes that each rank sends, and as many that it receives; ranks unknown: of infinitely many.

    >>> traffic(ALL_GATHER, 800, 4), traffic(ALL_REDUCE, 800, 4), traffic(REDUCE_SCATTER, 800, None)
    (600.0, 1200.0, 800.0)
    """
    share = 1.0 if ranks is None else (ranks - 1) / ranks
    return (2 if collective == ALL_REDUCE else 1) * whole_bytes * share


@dataclass(frozen=True)
class Link:
    """The link between ranks.

    >>> Link(latency=1e-5, rate=1e9).seconds(ALL_GATHER, 4_000_000, ranks=4)
    0.00301
    """

    latency: float  # seconds that each collective takes at least
    rate: float  # bytes per second that a rank sends, while it receives as many

    def seconds(self, collective: str, whole_bytes: float, ranks: int | None) -> float:
        """Seconds of one collective."""
        return self.latency + traffic(collective, whole_bytes, ranks) / self.rate


def link_of(device: Device) -> Link:
    """The link between devices of one kind, from their data sheet.

    >>> from checkmate.profiling.data_sheets import DEVICES
    >>> round(link_of(DEVICES["h100"]).rate / 1e9)
    360
    """
    return Link(LATENCY, EFFICIENCY * device.link)


def interpolated(points: Sequence[Point], whole_bytes: float) -> float:
    """Interpolate measured seconds linearly, from two or more ascending points; beyond them, the last line goes on.

    What is smaller than all that was measured takes as long as the smallest.

    >>> points = [(1000, 1.0), (2000, 1.5), (4000, 2.5)]
    >>> [interpolated(points, whole) for whole in (10, 3000, 6000)]
    [1.0, 2.0, 3.5]
    """
    if whole_bytes <= points[0][0]:
        return points[0][1]
    i = min(bisect_right(points, whole_bytes, key=lambda point: point[0]), len(points) - 1)
    (low, short), (high, long) = points[i - 1], points[i]
    return short + (long - short) * (whole_bytes - low) / (high - low)


@dataclass(frozen=True)
class CollectiveTable:
    """Measured seconds of the collectives of one process group.

    >>> table = CollectiveTable(2, {ALL_GATHER: ((1000, 1.0), (2000, 1.5))})
    >>> table.seconds(ALL_GATHER, 1500), table.seconds(ALL_REDUCE, 1500)
    (1.25, None)
    """

    ranks: int
    points: Mapping[str, tuple[Point, ...]]  # by collective, each ascending

    def seconds(self, collective: str, whole_bytes: float) -> float | None:
        """Seconds of one collective, interpolated; None if none of its kind was measured."""
        points = self.points.get(collective, ())
        return interpolated(points, whole_bytes) if len(points) > 1 else None


@dataclass(frozen=True)
class Layout:
    """The properties by which two process groups have equal costs.

    >>> print(Layout("gloo", 4, 2))
    collectives by gloo, 4 ranks, 2 on a host
    """

    backend: str
    ranks: int
    on_host: int  # the most that share one

    def __str__(self) -> str:
        return f"collectives by {self.backend}, {self.ranks} ranks, {self.on_host} on a host"

    def key(self, collective: str, whole_bytes: int) -> str:
        """The key of a collective of such a group among the measured ops."""
        return f"{self}: {collective} of {whole_bytes} bytes"

    def table(self, costs: Costs) -> CollectiveTable:
        """The collectives of such a group among the measured ops."""
        points: dict[str, list[Point]] = {}
        for key, cost in costs.items():
            match = _KEY.fullmatch(key)
            if match and match["layout"] == str(self) and cost is not None:
                points.setdefault(match["collective"], []).append((int(match["whole"]), cost.seconds))
        return CollectiveTable(self.ranks, {name: tuple(sorted(pairs)) for name, pairs in points.items()})


def layout_of(group: dist.ProcessGroup | None = None) -> Layout:
    """The layout of a process group, by default of all ranks; nothing is communicated."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size()
    on_host = max(Counter(rank // of_host for rank in ranks).values())
    return Layout(dist.get_backend(group), len(ranks), on_host)


def measure_collectives(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    sizes: Sequence[int] = SIZES,
    cache: bool = True,
) -> CollectiveTable:
    """Measure all-gathers, reduce-scatters and all-reduces of a group, by bytes of the whole tensor.

    All ranks of the group call this at once, with the same arguments. Each size takes as long as it takes the slowest
    rank: the median of some runs there. What was measured before under the same conditions is not measured again, if
    the group's first rank knows it. All ranks return the same, and keep what is new.

    Args:
        device: where the tensors are; by default the current accelerator for NCCL and its like, else the CPU.
        sizes: bytes of the whole, as the ranks together hand them in or get them; rounded up to as much for each rank.
        cache: take what was measured before, and keep what is measured now.

    Raises:
        ValueError: if a size is not positive.

    >>> import tempfile, torch.distributed as dist
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    ...     table = measure_collectives(sizes=[1024, 4096], cache=False)
    ...     dist.destroy_process_group()
    >>> table.ranks, [whole for whole, _ in table.points["all_reduce"]]
    (1, [1024, 4096])
    """
    if min(sizes, default=1) <= 0:
        raise ValueError(f"A collective is of a positive number of bytes, not of {min(sizes)}.")
    layout = layout_of(group)
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        device = "cpu" if accelerator is None or layout.backend in ("gloo", "mpi") else accelerator.type
    device = torch.device(device)
    conditions = conditions_on(device)
    # The group's first rank tells what it knows, so that all ranks measure the same.
    costs = load(conditions) if cache else {}
    message = [{key: cost for key, cost in costs.items() if _KEY.fullmatch(key)}]
    dist.broadcast_object_list(message, group=group, group_src=0, device=device)
    (known_costs,) = message
    wholes = sorted({-(-size // (4 * layout.ranks)) * 4 * layout.ranks for size in sizes})
    new_costs: dict[str, OpCost | None] = {}
    for name in COLLECTIVES:
        for whole in wholes:
            if (key := layout.key(name, whole)) not in known_costs:
                seconds = _seconds(name, whole, layout.ranks, group, device)
                new_costs[key] = OpCost(seconds, whole if name == ALL_GATHER else 0)
    if cache and new_costs:
        store(conditions, new_costs)
    return layout.table({**known_costs, **new_costs})


def _seconds(collective: str, whole: int, ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Seconds of one collective on zeros, begun by all ranks together, on the slowest rank."""
    all_of_it, part = (torch.zeros(whole // 4 // n, dtype=torch.float32, device=device) for n in (1, ranks))
    run: Callable[[], object] = {
        ALL_GATHER: lambda: dist.all_gather_into_tensor(all_of_it, part, group),
        REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, all_of_it, group=group),
        ALL_REDUCE: lambda: dist.all_reduce(all_of_it, group=group),
    }[collective]
    on_cpu = device.type == "cpu"

    def finish() -> None:
        if not on_cpu:
            torch.accelerator.synchronize(device)

    # Time it several times, begun together.
    run()  # the first one connects the ranks
    times = []
    for _ in range(REPEATS if whole < LARGE else REPEATS_OF_LARGE):
        dist.barrier(group)
        finish()
        began = time.perf_counter()
        run()
        finish()
        times.append(time.perf_counter() - began)
    # All ranks agree on the slowest rank's median.
    slowest = torch.tensor([median(times)], dtype=torch.float64 if on_cpu else torch.float32, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)


@dataclass(frozen=True)
class Collective:
    """A collective of a step."""

    name: str  # of `COLLECTIVES`
    whole_bytes: int
    ranks: int | None  # where it says so itself


def collective_of(node: fx.Node) -> Collective | None:
    """The collective of a node; None if it is none with known costs."""
    name = _functional(node)
    if name not in COLLECTIVES:
        return None
    whole: Any = node if name == ALL_GATHER else node.args[0]
    size = sum(t.numel() * t.element_size() for t in tensors(whole.meta.get("val")))
    ranks: Any = node.args[_RANKS_AT[name]] if name in _RANKS_AT else None
    return Collective(name, size, ranks)


def is_wait(node: fx.Node) -> bool:
    """Tell whether a node waits for a collective."""
    return _functional(node) == "wait_tensor"


def _functional(node: fx.Node) -> str | None:
    """The name of a functional collective or its wait, without the overload."""
    namespace, _, name = target_name(node).partition(".") if node.op == "call_function" else ("", "", "")
    name = name.partition(".")[0]
    return _JOINED.get(name, name) if namespace in _NAMESPACES else None


def layout_of_node(node: fx.Node) -> Layout | None:
    """The layout of the group that a collective names; None if no such group is here, as in an imported graph."""
    group: Any = node.args[-1]
    if isinstance(group, str):
        try:
            group = _resolve_process_group(group)
        except RuntimeError:
            return None
    return layout_of(group)


def measured_collectives(nodes: Sequence[fx.Node | None], costs_of: Callable[[fx.Node], Costs]) -> dict[int, float]:
    """Measured seconds of collectives among the nodes, by position.

    ``costs_of``: what was measured under the conditions that a node runs under.
    """
    tables: dict[tuple[int, Layout], CollectiveTable] = {}
    measured: dict[int, float] = {}
    for k, node in enumerate(nodes):
        collective = None if node is None else collective_of(node)
        if node is None or collective is None or (layout := layout_of_node(node)) is None:
            continue
        costs = costs_of(node)
        if (id(costs), layout) not in tables:
            tables[id(costs), layout] = layout.table(costs)
        seconds = tables[id(costs), layout].seconds(collective.name, collective.whole_bytes)
        if seconds is not None:
            measured[k] = seconds
    return measured
