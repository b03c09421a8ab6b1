"""A single op of a captured step: its cost key, whether it can run, and made-up inputs for it.

Inputs have the shapes, strides and types of the trace. Floats are between 0.1 and 0.9: valid as probabilities,
variances and standard deviations, and none so small that the processor slows down; some are drawn, and these repeated,
since to draw all would take longer than most ops. Indices are drawn from what they index, so that lookups touch memory
as real ones do; other integers are zero. Bools are true.
"""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.fx as fx

from checkmate.capture.cudnn import batch_norm
from checkmate.capture.device import main_device
from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.higher_order import table
from checkmate.capture.higher_order.bodies import body_of, text_of
from checkmate.capture.higher_order.fused_attention import Fused
from checkmate.capture.higher_order.triton_kernels import Launch
from checkmate.capture.loss.rounding_probes import flat, packet_of, repeat
from checkmate.capture.nodes import PlannedOp, is_collective, rehearsed, target_name, tensors
from checkmate.capture.number_inputs import value_of
from checkmate.capture.patches.recurrent import lstm_layer
from checkmate.capture.provenance import where
from checkmate.capture.random_draws import SAVES, Drawn, save_device_state
from checkmate.memory.available import ran_out_of_memory
from checkmate.torch_internals.capturing import is_with_effects
from checkmate.torch_internals.running import HigherOrderOperator, OpOverload, tree_map

log = logging.getLogger("checkmate.profiling")
aten = torch.ops.aten
cond = torch.ops.higher_order.cond
T = TypeVar("T")

_READ_WITH_CARE = {  # ops whose results have rules: a reader takes no made-up workspace, reserve or pivots
    *(lstm_layer, batch_norm),
    *(aten._linalg_solve_ex.default, aten.linalg_lu_factor_ex.default, aten.linalg_ldl_factor_ex.default),
}

_MASK = {"flex_attention": 4, "flex_attention_backward": 9}  # position of what says which blocks it looks at

DRAWN = 2**16  # floats of a tensor that are drawn, and not repeated

_ALONG = {  # op(x, dim, index, ...): the index picks along a dimension of x
    *(aten.gather, aten.index_select, aten.index_add, aten.index_copy, aten.index_fill),
    *(aten.scatter, aten.scatter_add, aten.scatter_reduce),
}
_BY_DIMENSION = {aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put}  # op(x, [index or None, ...])
_TARGETS = {  # position of the scores and of the targets: classes are dimension 1, or 0 where there is no other
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward, aten.multi_margin_loss), (0, 1)),
    **dict.fromkeys((aten.nll_loss_backward, aten.nll_loss2d_backward, aten.multi_margin_loss_backward), (1, 2)),
}
_POOLED = {  # position of x and of the indices, dimensions of a window's plane: indices are places in the plane
    aten.max_pool2d_with_indices_backward: (1, 7, 2),
    aten.max_pool3d_with_indices_backward: (1, 7, 3),
    aten.adaptive_max_pool2d_backward: (1, 2, 2),
    aten.max_unpool2d: (0, 1, 2),
}


def key_of(node: fx.Node) -> str:
    """The key of an op's costs: equal for ops that cost the same, in every process."""

    def describe(arg: Any) -> Any:
        if isinstance(arg, fx.Node) and (body := body_of(arg)) is not None:
            return f"graph {sha256(text_of(body, describe).encode()).hexdigest()[:16]}"
        value = arg.meta.get("val") if isinstance(arg, fx.Node) else arg
        is_several = isinstance(arg, fx.Node) and not isinstance(value, torch.Tensor)
        return tree_map(_describe, value) if is_several else _describe(value)

    name = target_name(node)
    if isinstance(node.target, (Launch, Kernel)):
        name += f" {node.target.key}{' open' * getattr(node.target, 'is_open', False)}"
    return f"{name} {fx.node.map_aggregate((node.args, node.kwargs), describe)!r}"


class _Text(str):
    """Text whose repr has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        lazy = " conj" * leaf.is_conj() + " neg" * leaf.is_neg()
        return _Text(f"{dtype}{[*leaf.shape]}{[*leaf.stride()]}{leaf.device.type}{lazy}")
    return _Text(leaf.type) if isinstance(leaf, torch.device) else value_of(leaf)


def runs_alone(node: fx.Node) -> bool:
    """Tell whether an op can be measured alone: no collective, no side effect, no graph that does more."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return table.runs_alone(node)
    if isinstance(target, (types.FunctionType, PlannedOp, Drawn, Launch, Fused, Kernel)):
        return True
    return isinstance(target, OpOverload) and not is_collective(node) and not is_with_effects(node)


def call_of(node: fx.Node) -> partial[Any]:
    """The op with made-up inputs, ready to run. Draws from the global random state."""
    bounds = _index_bounds(node)

    def make(arg: Any) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        if (body := body_of(arg)) is not None:
            return _running_both(body)
        if arg.target in SAVES:  # a generator takes no made-up state
            return call_of(arg)()
        source: Any = arg.args[0] if arg.target is operator.getitem else None
        if source is not None and source.target in _READ_WITH_CARE:
            return call_of(source)()[arg.args[1]]
        return tree_map(lambda leaf: make_up(leaf, bounds.get(arg)), arg.meta["val"])

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), make)
    if str(node.target) in _MASK:
        # Fill the mask with all blocks: one that leaves out some takes less time.
        mask: Any = args[_MASK[str(node.target)]]
        for numbers, indices in (mask[2:4], mask[6:8]):  # of keys for each block of queries, and the other way round
            if isinstance(numbers, torch.Tensor):
                numbers.fill_(indices.shape[-1])
                indices.copy_(torch.arange(indices.shape[-1], device=indices.device))
    target = _both_ways if node.target is cond else rehearsed(node.target)
    return partial(target, *args, **kwargs)


def _running_both(body: Any) -> Any:
    """A graph of a higher-order op that runs both branches of each ``cond`` in it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    module = fx.GraphModule(body, graph)
    for node in graph.nodes:
        if node.target is cond:
            node.target = _both_ways
        elif (inner := body_of(node)) is not None:
            setattr(module, str(node.target), _running_both(inner))
    module.recompile()
    return module


def _both_ways(chosen: Any, *operands: Any) -> Any:
    """Run both branches of a ``cond``, as either may run in a step: its bytes are the larger one's."""
    if isinstance(chosen, torch.Tensor):
        cond(torch.zeros_like(chosen), *operands)
    return cond(chosen, *operands)


def make_up(leaf: Any, bound: int | None = None) -> Any:
    """A real tensor like a fake one; ``bound``: its integers are indices below this."""
    if not isinstance(leaf, torch.Tensor):
        return value_of(leaf)
    real = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    memory = flat(real)
    if leaf.dtype.is_complex or leaf.dtype.is_floating_point:
        floats = torch.view_as_real(memory).view(-1) if leaf.dtype.is_complex else memory
        repeat(floats, floats[:DRAWN].uniform_(0.1, 0.9))
    elif leaf.dtype is torch.bool:
        memory.fill_(True)
    elif bound:
        memory.random_(0, bound)
    else:
        memory.zero_()
    # A lazy conjugate or negative is written out by the kernel that reads it, in memory of its own.
    real = real.conj() if leaf.is_conj() else real
    return torch.ops.aten._neg_view(real) if leaf.is_neg() else real


def _index_bounds(node: fx.Node) -> dict[fx.Node, int]:
    """For each argument of indices, the number of things that they index."""
    # By kind of op: which argument holds indices, and into how many entries.
    args: tuple[Any, ...] = node.args
    packet = packet_of(node.target)
    bounds: dict[Any, int] = {}
    if packet is aten.embedding:
        bounds[args[1]] = _size(args[0], 0)
    elif packet is aten.embedding_dense_backward:
        bounds[args[1]] = args[2]
    elif packet in _ALONG:
        bounds[args[2]] = _size(args[0], args[1])
    elif packet in _BY_DIMENSION:
        for dim, index in enumerate(args[1]):
            if isinstance(index, fx.Node):
                bounds[index] = min(_size(args[0], dim), bounds.get(index, _size(args[0], dim)))
    elif packet in _TARGETS:
        scores, targets = (args[i] for i in _TARGETS[packet])
        bounds[targets] = _size(scores, min(1, scores.meta["val"].dim() - 1))
    elif packet in _POOLED:
        x, indices, dims = _POOLED[packet]
        bounds[args[indices]] = args[x].meta["val"].shape[-dims:].numel()
    return {index: bound for index, bound in bounds.items() if isinstance(index, fx.Node)}


def _size(node: Any, dim: int) -> int:
    val = node.meta["val"]
    return int(val.shape[dim]) if val.dim() else 1


def device_of_op(node: fx.Node) -> torch.device:
    """The device that an op runs on: its tensors', an accelerator before the CPU; else its generator's."""
    if node.target is save_device_state:
        return torch.device(node.args[0])  # type: ignore[arg-type]
    return main_device(t for n in (node, *node.all_input_nodes) for t in tensors(n.meta.get("val")))


def attempt(node: fx.Node, run: Callable[[], T]) -> T | None:
    """Run a function of an op and give its result; None if the op does not run on made-up inputs.

    Raises:
        RuntimeError: if memory runs out, which says nothing about the op; if the device fails, for all of this process.
    """
    try:
        return run()
    except torch.AcceleratorError as error:
        if ran_out_of_memory(error):
            raise
        raise RuntimeError(
            f"{node.target} ({where(node)}), measured on made-up numbers, has stopped the device, which this process "
            f'cannot use any more: {str(error).strip().splitlines()[0]} Start it anew with profile="roofline:NAME", '
            "which runs nothing, and please report this op."
        ) from error
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        if ran_out_of_memory(error):
            raise
        log.debug("%s does not run on its own: %s", node.name, error)
        return None
