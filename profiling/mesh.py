"""What collectives take on a process group, measured by all of its ranks at once, and kept like the costs of ops.

A collective that one rank runs alone waits for ever. So it is not measured where a step is, by each rank when it comes
to that, but by a call that all ranks of the group make together, `measure_collectives`: once for a machine. What it
finds is kept in the file of measured ops (`checkmate.profiling.cost_table`), under a key for each collective, group and
size, and is read from there by each rank alone. A group is known by its backend, its ranks and how many of them share a
host: the ranks of one mesh dimension cost what those of the same dimension elsewhere do.

A collective that a step has names its group; if that was not measured, it takes an estimate
(`checkmate.profiling.roofline`). How many ranks share a host is what ``torchrun`` tells them (``LOCAL_WORLD_SIZE``);
without it, all are on one.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from checkmate.capture.nodes import target_name, tensors
from checkmate.profiling.collectives import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, CollectiveTable, Point
from checkmate.profiling.cost_table import Costs, OpCost, conditions_on, load, store
from checkmate.torch_internals.steps import _resolve_process_group

SIZES = tuple(4**n for n in range(6, 14))  # bytes of the whole: 4 KiB to 64 MiB
REPEATS, LARGE, REPEATS_OF_LARGE = 15, 2**22, 5  # the same on all ranks, which would else wait for one another
_RANKS_AT = {ALL_GATHER: 1, REDUCE_SCATTER: 2}  # the argument that says of how many; an all-reduce names its group only
_JOINED = {"gather_parameter": ALL_GATHER}  # what a captured step calls one that may run again
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_KEY = re.compile(r"(?P<layout>.+): (?P<collective>\w+) of (?P<whole>\d+) bytes")


@dataclass(frozen=True)
class Layout:
    """What two process groups must share to cost the same.

    >>> print(Layout("gloo", 4, 2))
    collectives by gloo, 4 ranks, 2 on a host
    """

    backend: str
    ranks: int
    on_host: int  # the most that share one

    def __str__(self) -> str:
        return f"collectives by {self.backend}, {self.ranks} ranks, {self.on_host} on a host"


def layout_of(group: dist.ProcessGroup | None = None) -> Layout:
    """The layout of a process group, by default of all ranks, without a word to the others."""
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
    """What all-gathers, reduce-scatters and all-reduces of a group take, by bytes of the whole.

    All ranks of the group call this at once, with the same arguments. Each size takes as long as it takes the slowest
    rank: the median of some runs there. What was measured before under the same conditions is not measured again, if
    the group's first rank knows it. All ranks return the same, and keep what is new.

    Args:
        group: by default all ranks.
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
    here = torch.device(_usual_device(layout.backend) if device is None else device)
    wholes = sorted({-(-size // (4 * layout.ranks)) * 4 * layout.ranks for size in sizes})
    conditions = conditions_on(here)
    keys = {_key(layout, name, whole): (name, whole) for name in COLLECTIVES for whole in wholes}
    known = _of_first_rank(load(conditions) if cache else {}, group, here)
    new = {key: (name, whole) for key, (name, whole) in keys.items() if key not in known}
    found = {
        key: OpCost(_seconds(name, whole, layout.ranks, group, here), whole if name == ALL_GATHER else 0)
        for key, (name, whole) in new.items()
    }
    if cache and found:
        store(conditions, found)
    return table_of(layout, {**known, **found})


@dataclass(frozen=True)
class Collective:
    """One that a step has."""

    name: str  # of `COLLECTIVES`
    whole_bytes: int
    ranks: int | None  # where it says so itself


def collective_of(node: fx.Node) -> Collective | None:
    """What a node is, if it is a collective of which the costs are known."""
    name = _functional(node)
    if name not in COLLECTIVES:
        return None
    whole: Any = node if name == ALL_GATHER else node.args[0]
    size = sum(t.numel() * t.element_size() for t in tensors(whole.meta.get("val")))
    ranks: Any = node.args[_RANKS_AT[name]] if name in _RANKS_AT else None
    return Collective(name, size, ranks)


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return _functional(node) == "wait_tensor"


def layout_of_node(node: fx.Node) -> Layout | None:
    """The layout of the group that a collective names; None where no such group is there, as in a graph from afar."""
    group: Any = node.args[-1]
    if isinstance(group, str):
        try:
            group = _resolve_process_group(group)
        except RuntimeError:
            return None
    return layout_of(group)


def measured_collectives(nodes: Sequence[fx.Node | None], costs_of: Callable[[fx.Node], Costs]) -> dict[int, float]:
    """Seconds of those nodes, by position, that are collectives of groups which have been measured.

    Args:
        nodes: of a step.
        costs_of: what was measured under the conditions that a node runs under.
    """
    tables: dict[tuple[int, Layout], CollectiveTable] = {}
    found: dict[int, float] = {}
    for k, node in enumerate(nodes):
        collective = None if node is None else collective_of(node)
        if node is None or collective is None or (layout := layout_of_node(node)) is None:
            continue
        costs = costs_of(node)
        if (id(costs), layout) not in tables:
            tables[id(costs), layout] = table_of(layout, costs)
        seconds = tables[id(costs), layout].seconds(collective.name, collective.whole_bytes)
        if seconds is not None:
            found[k] = seconds
    return found


def _functional(node: fx.Node) -> str | None:
    """The name of a functional collective or of its wait, without its overload."""
    namespace, _, name = target_name(node).partition(".") if node.op == "call_function" else ("", "", "")
    name = name.partition(".")[0]
    return _JOINED.get(name, name) if namespace in _NAMESPACES else None


def table_of(layout: Layout, costs: Costs) -> CollectiveTable:
    """Those of measured ops that are collectives of such a group."""
    points: dict[str, list[Point]] = {}
    for key, cost in costs.items():
        match = _KEY.fullmatch(key)
        if match and match["layout"] == str(layout) and cost is not None:
            points.setdefault(match["collective"], []).append((int(match["whole"]), cost.seconds))
    return CollectiveTable(layout.ranks, {name: tuple(sorted(of)) for name, of in points.items()})


def _key(layout: Layout, collective: str, whole: int) -> str:
    return f"{layout}: {collective} of {whole} bytes"


def _usual_device(backend: str) -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or backend in ("gloo", "mpi") else accelerator.type


def _of_first_rank(costs: Costs, group: dist.ProcessGroup | None, device: torch.device) -> Costs:
    """The collectives that the first rank of the group knows: all ranks measure the same."""
    of_collectives = {key: cost for key, cost in costs.items() if _KEY.fullmatch(key)}
    told = [of_collectives]
    dist.broadcast_object_list(told, group=group, group_src=0, device=device)
    return told[0]


def _seconds(collective: str, whole: int, ranks: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Seconds of one collective, as its slowest rank has it."""
    run = _call(collective, whole, ranks, group, device)
    run()  # the first one connects the ranks
    times = [*_times(run, REPEATS if whole < LARGE else REPEATS_OF_LARGE, group, device)]
    slowest = torch.tensor([median(times)], dtype=torch.float64 if device.type == "cpu" else torch.float32)
    slowest = slowest.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)


def _times(
    run: Callable[[], object], repeats: int, group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[float]:
    """Seconds of each run, which all ranks begin together."""
    for _ in range(repeats):
        dist.barrier(group)
        _finish(device)
        began = time.perf_counter()
        run()
        _finish(device)
        yield time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _call(
    collective: str, whole: int, ranks: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], object]:
    """The collective on zeros, which is run by calling it, and done when it returns or when the device is."""
    all_of_it, part = (torch.zeros(whole // 4 // n, dtype=torch.float32, device=device) for n in (1, ranks))
    calls: dict[str, Callable[[], object]] = {
        ALL_GATHER: lambda: dist.all_gather_into_tensor(all_of_it, part, group),
        REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, all_of_it, group=group),
        ALL_REDUCE: lambda: dist.all_reduce(all_of_it, group=group),
    }
    return calls[collective]
