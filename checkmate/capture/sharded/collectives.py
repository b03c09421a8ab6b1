"""Collectives within a step, each as one op of a plan.

A functional collective of PyTorch's is two ops: one launches it, `wait_tensor` ends it and gives its result, which has
been there from the launch on. Both become one op here, which ends when no thread of a backend holds a tensor of it.
Where links carry collectives, a plan may start the op, and wait for it later. What it allocates is known to the byte.
On the CPU, of b bytes on each of n ranks:

    all_gather         2 n b      what is gathered, which gloo has in a tensor of its own first
    reduce_scatter     b + b/n    a copy that becomes the sum, and this rank's part of it
    all_reduce         b          a copy that becomes the sum

On the CPU gloo reduces and scatters by making the sum of all in a copy, whose bytes it frees in a thread, some time
later. Here the copy is made by the op, with the same sum, and is free when it ends.

**Gathering again.** What is gathered of parameters is a copy of what all ranks hold, and has the same bits whenever it
is gathered; so this may be done again, as often as a plan likes, if all ranks do it. What is gathered of anything else,
and what adds, runs once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from checkmate.capture.nodes import LINK, PlannedOp, call, has_effect
from checkmate.torch_internals import running
from checkmate.torch_internals.running import OpOverload, _resolve_process_group

PATIENCE = 1.0  # seconds that a thread of the backend may take to let go of what it has sent
_NAMESPACE = "_c10d_functional"


def times_held(tensor: torch.Tensor) -> int:
    """Count the holders of a tensor's memory on the CPU; 0 elsewhere, where the device waits."""
    if tensor.device.type != "cpu" or not running.NAMES.has("_storage_Use_Count"):
        return 0
    count: int = running._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def reduce_in_place(tensor: torch.Tensor, reduction: Any, group: Any) -> None:
    """Reduce a tensor over all ranks, in place."""
    end(_reducing(tensor, reduction, group, lambda: tensor))


def as_number(words: object) -> int:
    """Hash words to a number, equal on each rank."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:7], "big")


def same_on_all(number: int, device: torch.device, group: Any) -> bool:
    """Tell whether all ranks of a group give the same number. All of them must call this."""
    both = torch.tensor([number, -number], device=device)
    reduce_in_place(both, dist.ReduceOp.MAX, group)
    largest, smallest = both.tolist()
    return bool(largest == -smallest)


@dataclass(eq=False)
class Pending:
    """A collective that has been launched."""

    work: Any  # the backend's handle
    held: tuple[tuple[torch.Tensor, int], ...]  # tensors of it, and by how many each was held before
    result: Callable[[], torch.Tensor]


def end(pending: Pending) -> torch.Tensor:
    """Wait for a collective and give its result; called by generated code too."""
    pending.work.wait()
    pending.work = None  # it holds the tensors, too
    # On the CPU a thread of the backend may hold a tensor a moment longer, and free it: no plan would know when.
    for tensor, held in pending.held:
        deadline = time.monotonic() + PATIENCE
        while times_held(tensor) > held and time.monotonic() < deadline:
            time.sleep(0)
    return pending.result()


def _gather(x: torch.Tensor, size: int, group: Any) -> Pending:
    shard = x.contiguous()
    whole = torch.empty((size * shard.shape[0], *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    held = times_held(shard), times_held(whole)
    # a thread of the backend then holds tensors of its own, which are seen
    work = dist.all_gather_into_tensor(whole.detach(), shard.detach(), _resolve_process_group(group), async_op=True)
    return Pending(work, ((shard, held[0]), (whole, held[1])), lambda: whole)


def _rehearse_gather(x: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    gathered = torch.cat([x.contiguous()] * size)
    return gathered.clone() if x.device.type == "cpu" else gathered


def _reduce(x: torch.Tensor, reduction: str, group: Any) -> Pending:
    ranks, total = _resolve_process_group(group), _copy(x)
    return _reducing(total, _reduction(reduction, total), ranks, lambda: _averaged(total, reduction, ranks.size()))


def _reducing(total: torch.Tensor, reduction: Any, ranks: Any, result: Callable[[], torch.Tensor]) -> Pending:
    """A launched reduction over ranks, in place; ``result`` makes its result."""
    held = times_held(total)
    return Pending(dist.all_reduce(total.detach(), reduction, ranks, async_op=True), ((total, held),), result)


def _scatter(x: torch.Tensor, reduction: str, size: int, group: Any) -> Pending:
    ranks = _resolve_process_group(group)
    if x.device.type != "cpu":
        whole, part = x.contiguous(), torch.empty((x.shape[0] // size, *x.shape[1:]), dtype=x.dtype, device=x.device)
        work = dist.reduce_scatter_tensor(part, whole, _reduction(reduction, x), ranks, async_op=True)
        return Pending(work, ((whole, 0),), lambda: part)
    total = _copy(x)
    return _reducing(total, _reduction(reduction, total), ranks, partial(_part, total, ranks.rank(), reduction, size))


def _part(total: torch.Tensor, rank: int, reduction: str, size: int) -> torch.Tensor:
    return _averaged(total.chunk(size)[rank].clone(), reduction, size)


def _rehearse_scatter(x: torch.Tensor, reduction: str, size: int, group: Any) -> torch.Tensor:
    if x.device.type != "cpu":
        return x.contiguous().chunk(size)[0].clone()
    return _part(_copy(x), 0, reduction, size)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _reduction(reduction: str, x: torch.Tensor) -> Any:
    """The reduction to ask of a backend; with gloo a mean is a sum, divided afterwards."""
    return getattr(dist.ReduceOp, "SUM" if reduction == "avg" and x.device.type == "cpu" else reduction.upper())


def _averaged(total: torch.Tensor, reduction: str, size: int) -> torch.Tensor:
    return total.div_(size) if reduction == "avg" and total.device.type == "cpu" else total


def _joined(name: str, begin: Callable[..., Pending], rehearse: Callable[..., torch.Tensor]) -> PlannedOp:
    """The op that launches a collective and waits for it; ``rehearse``: a silent one of the same cost."""

    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return end(begin(x, *args))

    return PlannedOp(name, run, lambda: rehearse, begin=begin, namespace=_NAMESPACE)


EXCHANGES = {
    "all_gather_into_tensor": _joined("all_gather_into_tensor", _gather, _rehearse_gather),
    "reduce_scatter_tensor": _joined("reduce_scatter_tensor", _scatter, _rehearse_scatter),
    "all_reduce": _joined("all_reduce", _reduce, lambda x, reduction, group: _averaged(_copy(x), reduction, 2)),
}
GATHER_AGAIN = replace(EXCHANGES["all_gather_into_tensor"], name="gather_parameter")  # the op that may run again


def join_waits(graph: fx.Graph, parameters: Collection[fx.Node], *, again: bool, overlap: bool = False) -> None:
    """Make one op of each collective and its wait, in a joint graph, in place.

    Args:
        parameters: placeholders of these.
        again: what is gathered of parameters may be gathered again.
        overlap: their nodes say which link carries them, that of their ranks.
    """
    wait = getattr(torch.ops, _NAMESPACE).wait_tensor.default
    for node in graph.find_nodes(op="call_function", target=wait):
        launch: Any = node.args[0]
        name = launch.target._opname if isinstance(launch.target, OpOverload) else ""
        if name not in EXCHANGES or launch.target.namespace != _NAMESPACE or len(launch.users) != 1:
            continue
        # A parameter may be gathered again, and what is computed from one alone, by ops without effects.
        source = launch.args[0]
        while source.op == "call_function" and len(source.all_input_nodes) == 1 and not has_effect(source):
            (source,) = source.all_input_nodes
        may_again = again and name == "all_gather_into_tensor" and source in parameters
        with graph.inserting_before(node):
            op = GATHER_AGAIN if may_again else EXCHANGES[name]
            joined = call(node, op, launch.args, None, node.meta["val"], launch.kwargs)
        if overlap:
            joined.meta[LINK] = f"ranks {launch.args[-1]}"
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        graph.erase_node(launch)
