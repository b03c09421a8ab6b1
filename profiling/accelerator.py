"""What ops cost on a GPU, or another accelerator: its allocator's statistics for bytes, events for seconds.

Between repeats a buffer twice the size of the last cache is overwritten, so that inputs come from memory, as they
mostly do within a step. Launching a kernel takes the host longer than running a small one takes the device; the
overwriting gives the host a head start, so that what is timed is the device's work.

What cuDNN takes for one call counts with the op. cuBLAS keeps its workspace from its first call on: it is no op's, and
counts with what is in use on the device before the step (`checkmate.capture.device.allocated_on`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.device import as_allocated, in_autograds_thread
from checkmate.capture.nodes import tensors
from checkmate.capture.provenance import named
from checkmate.devices import kind_of
from checkmate.memory.room import within_memory
from checkmate.profiling.cost_table import OpCost
from checkmate.profiling.one_op import ESTIMATED, attempt, call_of, device_of_op
from checkmate.profiling.trial import ways_of

REPEATS = 5  # between two looks at the clock
MOST_REPEATS = 50
SECONDS_PER_OP = 0.05  # of the device's time, beyond the first repeats


def measure_ops(
    nodes: Sequence[fx.Node], known: Mapping[int, OpCost] = MappingProxyType({})
) -> Iterator[tuple[int, OpCost | None]]:
    """The cost of each op, with its position; None where it does not run on made-up inputs.

    Only one op's tensors exist at a time, beside the buffer; an op for which there is no memory is left out. An op
    whose cost is ``known``, by position, keeps its seconds if it takes as many bytes as then: a library that now
    chooses another kernel mostly works in others.
    """
    for i, node in enumerate(nodes):
        run = partial(attempt, node, partial(_measure, node, known.get(i)))
        for cost in within_memory(run, named(node), ESTIMATED):
            yield i, cost


def _measure(node: fx.Node, known: OpCost | None) -> OpCost:
    device = device_of_op(node)
    with torch.accelerator.device_index(device.index):
        run = call_of(node)
        torch.accelerator.synchronize(device)  # so that memory let go of while others used it is free from the run on
        run()  # the first run loads kernels and takes the libraries' workspaces
        in_autograds_thread(device, run)  # which may choose another kernel
        count = partial(allocated_bytes, run, device)
        allocated = max(count(), in_autograds_thread(device, count))
        as_known = known is not None and known.allocated_bytes == allocated
        seconds = known.seconds if known is not None and as_known else time_call(run, device)
        counts: dict[int, int] = {}
        ways = ways_of(node, run, partial(_counted, device, counts))
        return OpCost(seconds, allocated, {p: counts[p] if does else None for p, does in ways.items()})


def _counted(device: torch.device, counts: dict[int, int], position: int, call: Callable[[], Any]) -> Any:
    made: list[Any] = []
    counts[position] = allocated_bytes(lambda: made.append(call()), device)
    return made[0]


def allocated_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call takes from the caching allocator at its peak, each tensor rounded to blocks.

    What the allocator gives beyond that depends on what was freed before, and is no cost of the op: up to 1 MiB for a
    tensor. Where there is such, and more is taken than what the call returns, each tensor is taken to have been rounded
    by a whole block. The allocator counts on the host: the device need not have run what is counted.
    """
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_stats(device)
    made = run()
    found = torch.accelerator.memory_stats(device)
    given, asked, blocks = (
        found[f"{what}.all.peak"] - before[f"{what}.all.current"]
        for what in ("allocated_bytes", "requested_bytes", "allocation")
    )
    block = kind_of(device).block_bytes
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(made) if t.device == device
    }
    if asked == sum(storages.values()):
        return sum(as_allocated(size, block) for size in storages.values())
    return min(given, asked + blocks * block)


def time_call(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one execution on the device: the median."""
    flush = torch.empty(2 * kind_of(device).cache_bytes(device), dtype=torch.int8, device=device)
    seconds: list[float] = []
    while len(seconds) < REPEATS or (sum(seconds) < SECONDS_PER_OP and len(seconds) < MOST_REPEATS):
        events = [tuple(torch.Event(device, enable_timing=True) for _ in range(2)) for _ in range(REPEATS)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            run()
            end.record()
        torch.accelerator.synchronize(device)
        seconds += [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return median(seconds)
