"""What ops cost on the CPU: the allocator's events for bytes, the median of repeated runs for seconds.

A long op runs twice so that its bytes are counted, and then, on the same inputs, a few times for its seconds. A short
one is timed on its own, since the allocator's events take time too, and more often, since its times spread more. What
can write over an argument is tried while bytes are counted (`checkmate.profiling.trial`).

Within a step an op seldom finds its inputs in the processor's nearest caches: other ops ran since they were made. So
between repeats a buffer of twice the second-level cache is overwritten. Without this pointwise ops took half the time
that they take within a step, or less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.provenance import named
from checkmate.memory import aside, record_allocations
from checkmate.memory.room import within_memory
from checkmate.profiling.cost_table import OpCost
from checkmate.profiling.one_op import ESTIMATED, attempt, call_of
from checkmate.profiling.trial import ways_of

SECOND_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")  # on Linux; text such as "1024K"
USUAL_SECOND_LEVEL = 2**20  # bytes, where the system does not say
LEAST_REPEATS, MOST_REPEATS = 3, 50
SECONDS_PER_OP = 0.03  # what timing one op may take beyond the least repeats
LONG = 2e-3  # seconds of an op of which a recording takes less than a hundredth
RECORDED_AT_ONCE = 32  # ops in one recording of the allocator: starting one costs as much as a few ops
STABLE = 0.02  # the median is known well enough when its standard error, by the quartiles, is below this share


def measure_ops(
    nodes: Sequence[fx.Node], known: Mapping[int, OpCost] = MappingProxyType({})
) -> Iterator[tuple[int, OpCost | None]]:
    """The cost of each op, with its position; None where it does not run on made-up inputs.

    Only one op's tensors exist at a time, beside the buffer; an op for which there is no memory is left out. An op
    whose cost is ``known``, by position, keeps its seconds if it takes as many bytes as then.
    """
    for begin in range(0, len(nodes), RECORDED_AT_ONCE):
        some = nodes[begin : begin + RECORDED_AT_ONCE]
        for i, cost in aside(partial(_recorded, some)).items():
            before = known.get(begin + i)
            if cost is not None and before is not None and before.allocated_bytes == cost.allocated_bytes:
                cost = replace(cost, seconds=before.seconds)
            if cost is not None and not cost.seconds:
                cost = replace(cost, seconds=aside(partial(time_call, call_of(some[i]))))
            yield begin + i, cost


def _recorded(nodes: Sequence[fx.Node]) -> dict[int, OpCost | None]:
    """Bytes of each op at its own peak, its ways, and its seconds if it is long; None where it does not run."""
    with record_allocations() as recording:
        runs = [partial(attempt, node, partial(_run_within, node, i)) for i, node in enumerate(nodes)]
        ran = [within_memory(run, named(node), ESTIMATED) for run, node in zip(runs, nodes, strict=True)]

    def count(*span: int) -> int:
        return int(recording.within(_span(*span)).max())

    def cost(i: int, seconds: float, ways: dict[int, bool]) -> OpCost:
        return OpCost(seconds, count(i), {p: count(i, p) if does else None for p, does in ways.items()})

    return {i: None if found is None else cost(i, *found) for i, some in enumerate(ran) for found in some}


def _span(*numbers: int) -> str:
    """What a recording calls the run of an op, or that over its argument at a position."""
    return f"checkmate.op{'.'.join(map(str, numbers))}"


def _run_within(node: fx.Node, i: int) -> tuple[float, dict[int, bool]]:
    """Seconds of op ``i`` if it is long, else 0, and whether it can write over its arguments, by position."""
    run, now = call_of(node), _clock()
    run()  # the first run may fill caches
    with torch.profiler.record_function(_span(i)):
        began = now()
        run()
        taken = now() - began
    seconds = _median_of(run) if taken > LONG else 0.0

    def within(position: int, call: Callable[[], Any]) -> Any:
        with torch.profiler.record_function(_span(i, position)):
            return call()

    return seconds, ways_of(node, run, within)


def time_call(run: Callable[[], Any]) -> float:
    """Seconds of one execution, what it allocates and frees included: the median, once that is stable.

    On one thread these are seconds of the processor, which other programs change less than those of the clock.
    """
    run()
    return _median_of(run)


def _median_of(run: Callable[[], Any]) -> float:
    now = _clock()
    flush = torch.zeros(2 * _second_level_bytes(), dtype=torch.uint8)
    seconds: list[float] = []
    while not _is_enough(seconds):
        flush.add_(1)
        began = now()
        run()
        seconds.append(now() - began)
    return median(seconds)


def _clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


@cache
def _second_level_bytes() -> int:
    """Bytes of a core's second-level cache."""
    size = SECOND_LEVEL.read_text().strip() if SECOND_LEVEL.exists() else ""
    return int(size[:-1]) * 1024 if size.endswith("K") else USUAL_SECOND_LEVEL


def _is_enough(seconds: Sequence[float]) -> bool:
    if len(seconds) < LEAST_REPEATS:
        return False
    if len(seconds) >= MOST_REPEATS or sum(seconds) > SECONDS_PER_OP:
        return True
    low, middle, high = quantiles(seconds, n=4, method="inclusive")  # called after each repeat: NumPy's takes longer
    return (high - low) / len(seconds) ** 0.5 < STABLE * middle
