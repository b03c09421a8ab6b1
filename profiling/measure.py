"""Seconds and bytes of each distinct op, run alone on the device and with the threads that it will run with.

Only one op's tensors exist at a time, so that a model whose plain step does not fit can be measured; an op that does
not fit even so is estimated, and measured once there is room. What was measured before, by this process or another, is
not measured again (`checkmate.profiling.cost_cache`). Collectives take more than one process: what all ranks have
measured together is taken (`checkmate.profiling.mesh`), or an estimate.

On the CPU bytes are counted by the allocator's events, and seconds are the median of repeated runs. A long op is timed
where its bytes are counted, on the same inputs. A short one is timed on its own, since the allocator's events take time
too, and more often, since its times spread more. On an accelerator bytes are its allocator's statistics, and seconds
come from events. What cuDNN takes for one call counts with the op. cuBLAS keeps its workspace from its first call on:
it is no op's, and counts with what is in use on the device before the step (`checkmate.capture.device.allocated_on`).

Within a step an op seldom finds its inputs in the nearest caches: other ops ran since they were made. So between
repeats a buffer is overwritten, of twice the second-level cache of the CPU or the last cache of an accelerator. Without
this pointwise ops took half the time that they take within a step, or less. On an accelerator it gives the host a head
start too: launching a small kernel takes the host longer than running it takes the device.
On the main path, 5 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.fx as fx

from checkmate.capture.device import as_allocated, in_autograds_thread, same_random_state
from checkmate.capture.higher_order.triton_kernels import Launch
from checkmate.capture.inplace.aliasing import candidates
from checkmate.capture.inplace.rules import positions_to_try
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import is_collective, is_convolution, target_name, tensors
from checkmate.capture.patches.is_compiling import not_compiling
from checkmate.capture.provenance import named
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Profile
from checkmate.devices import is_known, kind_of
from checkmate.errors import Unsupported
from checkmate.memory import aside, record_allocations
from checkmate.memory.available import within_memory
from checkmate.profiling import cost_cache
from checkmate.profiling.cost_cache import OpCost, OpKey, OpTable, conditions_on
from checkmate.profiling.mesh import measured_collectives
from checkmate.profiling.one_op import attempt, call_of, device_of_op, key_of, runs_alone
from checkmate.profiling.roofline import DEVICES, moved_bytes_of, roofline_seconds
from checkmate.profiling.trial import ways_of
from checkmate.statusline import showing
from checkmate.torch_internals.running import outside_tracing

log = logging.getLogger("checkmate.profiling")
K = TypeVar("K")
Nodes = Mapping[K, fx.Node]
Known = Mapping[K, OpCost | None]

ESTIMATED = "its cost is estimated"  # of an op for which there is no memory
MOST_REPEATS = 50

SECOND_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")  # on Linux; text such as "1024K"
USUAL_SECOND_LEVEL = 2**20  # bytes, where the system does not say
LEAST_REPEATS = 3
SECONDS_PER_OP = 0.03  # limit for timing one op beyond the least repeats
LONG = 2e-3  # seconds of an op of which a recording takes less than a hundredth
RECORDED_AT_ONCE = 32  # ops in one recording of the allocator: starting one costs as much as a few ops
STABLE = 0.02  # the median is known well enough when its standard error, by the quartiles, is below this share

REPEATS = 5  # on an accelerator, between two looks at the clock
DEVICE_SECONDS_PER_OP = 0.05  # of the accelerator's time, beyond the first repeats


@dataclass(frozen=True)
class Measure:
    """The cost source that runs every distinct op of a step here."""

    cache: bool = True  # take what was measured before under the same conditions, on disk too, and keep what is new


def measured(joint: Joint, *, cache: bool = True) -> Profile:
    """The profile of a step from measurements here.

    Ops are the same if target, shapes, strides, types and other arguments are. Neither the global random state nor any
    tensor of the model is touched. Ops that do not run on their own are estimated, and marked in the profile. An op may
    write over an argument where it was tried and left the same bits.

    Raises:
        Unsupported: if a tensor is on no CPU, CUDA device or other device whose allocator's counts PyTorch tells.
    """
    for node in joint.module.graph.nodes:
        for leaf in tensors(node.meta.get("val")):
            if not is_known(leaf.device):
                raise Unsupported(
                    f"{node.name} is on {leaf.device}: ops are measured on cpu and cuda only. "
                    'checkmate.trace(..., profile="roofline:h100") estimates the costs for a named device instead.'
                )
    keys = keys_of(joint)
    nodes = {key: node for key, node in zip(keys, joint.nodes, strict=True) if key and node}
    cached = cost_cache.recall(nodes) if cache else {}
    new = {key: node for key, node in nodes.items() if _is_new(key, node, cached)}
    costs: dict[OpKey, OpCost | None] = {key: None for key, node in new.items() if not runs_alone(node)}
    # Run the others outside of tracing, with a line that tells how many are measured.
    todo = {key: node for key, node in new.items() if key not in costs}
    done: dict[OpKey, OpCost | None] = {}
    if todo:
        began, devices = time.perf_counter(), {device_of_op(node) for node in todo.values()}
        line = showing(lambda: f"measuring {len(done)} of {len(todo)} ops", share=lambda: len(done) / len(todo))
        with line, outside_tracing(), not_compiling(), torch.no_grad(), same_random_state(*devices):
            for key, cost in measure_ops(todo, cached):
                done[key] = cost  # noqa: PERF403  # one by one: the line counts them
        log.info("Measured %d distinct ops in %.1f s.", len(todo), time.perf_counter() - began)
    costs |= done
    if cache:
        cost_cache.keep(costs)
    cached = {key: cost for key, cost in cached.items() if key not in new} | costs  # without what has no room now
    where = {node: key[0] for key, node in zip(keys, joint.nodes, strict=True) if key and node}
    all_in = lru_cache(cost_cache.load)
    collectives = measured_collectives(joint.nodes, lambda node: all_in(where[node])) if cache else {}
    # Say which ops have no measured cost, and why.
    lacking = {k: key for k, key in enumerate(keys) if key and cached.get(key) is None and k not in collectives}
    large = [k for k, key in lacking.items() if key not in cached]
    untried = [k for k, key in enumerate(keys) if key and not _is_tried(nodes[key], cached.get(key))]
    if failed := sorted({target_name(nodes[key]) for k, key in lacking.items() if k not in large}):
        log.warning("Could not run these ops on their own, so their cost is estimated: %s", ", ".join(failed))
    source = "measured on " + " and ".join(sorted(map(str, {at for at, _ in nodes})))
    profile = fill(joint, [None if key is None else cached.get(key) for key in keys], source, collectives)
    more = f", {len(large)} too large to run alone in the memory that was free" if large else ""
    more += f"; {len(untried)} too large to be tried over an input" if untried else ""
    return replace(profile, source=profile.source + more)


def forget(joint: Joint) -> None:
    """Forget the measured costs of a step's ops, so that the next capture measures them anew in any process."""
    cost_cache.drop({key for key in keys_of(joint) if key is not None})


def export(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Write all measurements of this machine, under its present settings, to a file for ``profile=`` elsewhere.

    Raises:
        Unsupported: if nothing was measured here, or not with this number of threads and these settings.
        ValueError: if the name does not end in ``.json``.
        OSError: if the file cannot be written.

    >>> import tempfile, torch, checkmate
    >>> layer, batch = torch.nn.Linear(8, 4), torch.ones(2, 8)
    >>> problem = checkmate.trace(layer, batch)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(f"{folder}/ops.json")
    ...     elsewhere = checkmate.trace(layer, batch, profile=f"{folder}/ops.json")
    >>> list(elsewhere.seconds) == list(problem.seconds)
    True
    """
    if not os.fspath(path).endswith(".json"):
        raise ValueError(f"The name of a file of measured ops ends in .json, and {os.fspath(path)!r} does not.")
    conditions = conditions_on(torch.device(device))
    ops = cost_cache.all_known(conditions)
    if not ops:
        raise Unsupported(f"Nothing has been measured on {conditions} yet: trace a step on this machine first.")
    cost_cache.write(path, OpTable(conditions, ops))


def keys_of(joint: Joint) -> list[OpKey | None]:
    """The key of each op of a step under the present conditions; None for ops of autograd."""
    conditions = cache(conditions_on)
    return [None if node is None else (conditions(device_of_op(node)), key_of(node)) for node in joint.nodes]


def _is_new(key: OpKey, node: fx.Node, cached: Mapping[OpKey, OpCost | None]) -> bool:
    """Tell whether an op is to be measured: it was not yet, or not on all arguments that it may write over.

    A convolution on CUDA runs in each process: cuDNN chooses, and may try out, a kernel at its first run, with
    workspaces as large as memory is free, which is not to be within a step. So does a kernel of Triton's that is tuned.
    Its seconds stay those that are known, by which a plan is found on disk.
    """
    if key not in cached or cost_cache.ran_here(key):
        return key not in cached
    chooses = is_convolution(node) or (isinstance(node.target, Launch) and node.target.tunes)
    return (device_of_op(node).type != "cpu" and chooses) or not _is_tried(node, cached[key])


def _is_tried(node: fx.Node, cost: OpCost | None) -> bool:
    """Tell whether an op was tried in place on each argument that it may write over, or cannot run alone."""
    return cost is None or cost.over.keys() >= set(positions_to_try(node))


def fill(
    joint: Joint, costs: Sequence[OpCost | None], source: str, collectives: Mapping[int, float] | None = None
) -> Profile:
    """The profile of a step.

    An op without a cost takes the seconds of its roofline estimate, times the median ratio of measured to estimated
    seconds of the others, unless it is a collective; its workspace is all that it touches; it writes over nothing.

    Args:
        costs: of each op, by position; None: not known. What autograd does has none and costs nothing.
        source: where the costs come from; how many are estimated is added to it.
        collectives: seconds of those that all ranks have measured, by position.
    """
    graph, collectives = joint.graph, collectives or {}
    seconds, workspace = np.zeros(len(costs)), np.zeros(len(costs), dtype=np.int64)
    nodes = {k: node for k, node in enumerate(joint.nodes) if node is not None}
    estimated = tuple(k for k in nodes if costs[k] is None and k not in collectives)
    scale = 1.0
    if estimated and (pairs := [(cost, nodes[k]) for k, cost in enumerate(costs) if cost is not None and k in nodes]):
        scale = median(cost.seconds / estimate(node) for cost, node in pairs)

    def output_bytes(k: int, without: int | None = None) -> int:
        block = kind_of(device_of_op(nodes[k])).block_bytes
        return sum(as_allocated(graph.values[v].size_bytes, block) for v in graph.ops[k].outputs if v != without)

    for k, node in nodes.items():
        if (cost := costs[k]) is None:
            of_device = 1.0 if is_collective(node) else scale
            seconds[k] = collectives[k] if k in collectives else of_device * estimate(node)
            workspace[k] = sum(graph.values[v].size_bytes for v in graph.ops[k].inputs) + output_bytes(k)
        else:
            seconds[k], workspace[k] = collectives.get(k, cost.seconds), max(0, cost.allocated_bytes - output_bytes(k))
    # An op may write over an argument where that was tried and left the same bits.
    ways = []
    for k, makes, over, position, slower in candidates(joint):
        cost = costs[k]
        allocated = None if cost is None else cost.over.get(position)
        if allocated is not None:
            ways.append(InPlace(k, makes, over, max(0, allocated - output_bytes(k, without=makes)), slower))
    if estimated:
        source += f"; {len(estimated)} op{'s' if len(estimated) > 1 else ''} estimated"
    return Profile(seconds, workspace, joint.resident_bytes, source, estimated, tuple(ways))


def estimate(node: fx.Node) -> float:
    """The seconds of an op by the data sheet of a device like its own; of use in ratios only."""
    device = DEVICES[kind_of(device_of_op(node)).like]
    try:
        return roofline_seconds(node, device)
    except Unsupported:  # a product of a rare type: by its bytes alone
        return device.seconds(0, "float32", moved_bytes_of(node))


def measure_ops(nodes: Nodes[K], cached: Known[K] = MappingProxyType({})) -> Iterator[tuple[K, OpCost | None]]:
    """The cost of each op with its key, device by device; None if it does not run on made-up inputs.

    Only one op's tensors exist at a time, beside the buffer; an op for which there is no memory is left out. An op
    whose cost is ``cached`` keeps its seconds if it takes as many bytes as then: where a library now chooses another
    kernel, that mostly takes other bytes.
    """
    for device in sorted({device_of_op(node) for node in nodes.values()}, key=str):
        on_device = {key: node for key, node in nodes.items() if device_of_op(node) == device}
        if device.type == "cpu":
            yield from _measure_on_cpu(on_device, cached)
            continue
        for key, node in on_device.items():
            run = partial(attempt, node, partial(_measure_on_accelerator, node, cached.get(key)))
            for cost in within_memory(run, named(node), ESTIMATED):
                yield key, cost


def recorded_bytes(nodes: Nodes[K]) -> Iterator[tuple[K, OpCost | None]]:
    """The bytes of each op on the CPU, run once, and its ways; no seconds."""
    keys = [*nodes]
    for begin in range(0, len(keys), RECORDED_AT_ONCE):
        batch = keys[begin : begin + RECORDED_AT_ONCE]
        results = aside(partial(_recorded, [nodes[key] for key in batch], timed=False))
        yield from zip(batch, (next(iter(costs), None) for costs in results), strict=True)


def _known_seconds(cost: OpCost | None, allocated: int) -> float | None:
    return cost.seconds if cost is not None and cost.allocated_bytes == allocated else None


def _measure_on_cpu(nodes: Nodes[K], cached: Known[K]) -> Iterator[tuple[K, OpCost | None]]:
    keys = [*nodes]
    for begin in range(0, len(keys), RECORDED_AT_ONCE):
        batch = keys[begin : begin + RECORDED_AT_ONCE]
        for key, costs in zip(batch, aside(partial(_recorded, [nodes[key] for key in batch])), strict=True):
            for cost in costs:
                if cost is not None:
                    seconds = _known_seconds(cached.get(key), cost.allocated_bytes) or cost.seconds
                    cost = replace(cost, seconds=seconds or aside(partial(time_on_cpu, call_of(nodes[key]))))
                yield key, cost


def _recorded(nodes: Sequence[fx.Node], *, timed: bool = True) -> list[list[OpCost | None]]:
    """The peak bytes of each op, its ways, and its seconds if they are long, else 0.

    An op without memory has no cost; one that does not run has None. If not ``timed``, each runs once.
    """

    def span(*numbers: int) -> str:  # names the run of an op in the recording, or that over an argument
        return f"checkmate.op{'.'.join(map(str, numbers))}"

    def run_within(i: int) -> tuple[float, dict[int, bool]]:
        run, clock = call_of(nodes[i]), _clock()
        if timed:
            run()  # the first run may fill caches
        with torch.profiler.record_function(span(i)):
            began = clock()
            run()
            elapsed = clock() - began
        seconds = time_on_cpu(run, warm=True) if timed and elapsed > LONG else 0.0

        def within(position: int, call: Callable[[], Any]) -> Any:
            with torch.profiler.record_function(span(i, position)):
                return call()

        return seconds, ways_of(nodes[i], run, within)

    def count(*numbers: int) -> int:
        return int(recording.within(span(*numbers)).max())

    def cost(i: int, seconds: float, ways: dict[int, bool]) -> OpCost:
        return OpCost(seconds, count(i), {p: count(i, p) if does else None for p, does in ways.items()})

    # Record every op's second run, and its runs over arguments; read their bytes from the recording.
    with record_allocations() as recording:
        runs = [partial(attempt, node, partial(run_within, i)) for i, node in enumerate(nodes)]
        ran = [within_memory(run, named(node), ESTIMATED) for run, node in zip(runs, nodes, strict=True)]
    return [[None if outcome is None else cost(i, *outcome) for outcome in outcomes] for i, outcomes in enumerate(ran)]


def time_on_cpu(run: Callable[[], Any], *, warm: bool = False) -> float:
    """Median seconds of one execution, allocations included, once stable; ``warm``: it has just run.

    On one thread these are seconds of the processor, which other programs change less than those of the clock.
    """
    if not warm:
        run()
    clock = _clock()
    flush = torch.zeros(2 * _second_level_bytes(), dtype=torch.uint8)
    seconds: list[float] = []
    while not _is_enough(seconds):
        flush.add_(1)
        began = clock()
        run()
        seconds.append(clock() - began)
    return median(seconds)


def _clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


@cache
def _second_level_bytes() -> int:
    size = SECOND_LEVEL.read_text().strip() if SECOND_LEVEL.exists() else ""
    return int(size[:-1]) * 1024 if size.endswith("K") else USUAL_SECOND_LEVEL


def _is_enough(seconds: Sequence[float]) -> bool:
    if len(seconds) < LEAST_REPEATS:
        return False
    if len(seconds) >= MOST_REPEATS or sum(seconds) > SECONDS_PER_OP:
        return True
    low, middle, high = quantiles(seconds, n=4, method="inclusive")  # called after each repeat: NumPy's takes longer
    return (high - low) / len(seconds) ** 0.5 < STABLE * middle


def _measure_on_accelerator(node: fx.Node, cached: OpCost | None) -> OpCost:
    device = device_of_op(node)
    counts: dict[int, int] = {}
    with torch.accelerator.device_index(device.index):
        run = call_of(node)
        torch.accelerator.synchronize(device)  # memory freed while in use elsewhere is free from the run on
        run()  # the first run loads kernels and takes the libraries' workspaces
        in_autograds_thread(device, run)  # which may choose another kernel
        count = partial(allocated_bytes, run, device)
        allocated = max(count(), in_autograds_thread(device, count))
        seconds = _known_seconds(cached, allocated)
        seconds = time_on_accelerator(run, device) if seconds is None else seconds

        def counted(position: int, call: Callable[[], Any]) -> Any:
            results: list[Any] = []
            counts[position] = allocated_bytes(lambda: results.append(call()), device)
            return results[0]

        ways = ways_of(node, run, counted)
        return OpCost(seconds, allocated, {p: counts[p] if does else None for p, does in ways.items()})


def allocated_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak bytes that a call takes from an accelerator's caching allocator, each tensor rounded to blocks.

    What the allocator gives beyond that depends on what was freed before, and is no cost of the op: up to 1 MiB for a
    tensor. Where there is such, and more is taken than what the call returns, each tensor is taken to have been rounded
    by a whole block. The allocator counts on the host: the device need not have run what is counted.
    """
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_stats(device)
    results = run()
    after = torch.accelerator.memory_stats(device)
    allocated, requested, blocks = (
        after[f"{statistic}.all.peak"] - before[f"{statistic}.all.current"]
        for statistic in ("allocated_bytes", "requested_bytes", "allocation")
    )
    block = kind_of(device).block_bytes
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(results) if t.device == device
    }
    if requested == sum(storages.values()):
        return sum(as_allocated(size, block) for size in storages.values())
    return min(allocated, requested + blocks * block)


def time_on_accelerator(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one execution on an accelerator."""
    flush = torch.empty(2 * kind_of(device).cache_bytes(device), dtype=torch.int8, device=device)
    seconds: list[float] = []
    while len(seconds) < REPEATS or (sum(seconds) < DEVICE_SECONDS_PER_OP and len(seconds) < MOST_REPEATS):
        events = [tuple(torch.Event(device, enable_timing=True) for _ in range(2)) for _ in range(REPEATS)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            run()
            end.record()
        torch.accelerator.synchronize(device)
        seconds += [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return median(seconds)
