"""Properties of an op for groups: membership, arguments, results."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.higher_order.triton_kernels import Launch
from checkmate.capture.inplace.rules import written_of
from checkmate.capture.nodes import LINK, has_effect, is_view, tensors, viewed
from checkmate.capture.rewrite import scale_mask
from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten

_REDUCTIONS = {
    getattr(getattr(aten, op), overload)
    for op, overload in (
        *(("sum", "dim_IntList"), ("sum", "default"), ("mean", "dim"), ("mean", "default"), ("amax", "default")),
        *(("var_mean", "correction"), ("native_layer_norm", "default"), ("native_layer_norm_backward", "default")),
        *(("_softmax", "default"), ("_softmax_backward_data", "default"), ("native_group_norm", "default")),
        *(("native_group_norm_backward", "default"), ("_native_batch_norm_legit_functional", "default")),
        *(("native_batch_norm_backward", "default"), ("_fused_rms_norm", "default")),
        ("_fused_rms_norm_backward", "default"),
    )
    if hasattr(aten, op)
}
_MOVES = {  # make an element of one at another place in their argument
    *(aten.cat.default, aten.stack.default, aten.repeat.default, aten.roll.default, aten.flip.default),
    *(aten.slice_backward.default, aten.select_backward.default, aten.constant_pad_nd.default),
}
_POINTWISE = {  # beside all that PyTorch tags so
    *(aten._to_copy.default, aten.clone.default, aten.full_like.default, aten.zeros_like.default, scale_mask),
    aten.ones_like.default,
    *(getattr(aten, f"{name}_backward").default for name in ("gelu", "silu", "tanh", "sigmoid", "threshold")),
    *(aten.hardtanh_backward.default, aten.gelu.default, aten.silu.default),
}
_CONSTANTS = {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}
_OF_LOSSES = {  # left alone with the casts beside them: a loss may run in parts
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    *(aten.nll_loss_forward.default, aten.nll_loss_backward.default),
}


def is_reduction(node: fx.Node) -> bool:
    """Tell whether it is a reduction that a kernel may take in."""
    return node.target in _REDUCTIONS


def is_elementwise(node: fx.Node) -> bool:
    """Tell whether a member makes each element of the same element of its arguments."""
    return node.target not in _REDUCTIONS | _MOVES


def is_member(node: fx.Node, *, reductions: bool) -> bool:
    """Tell whether a group may take an op in: pointwise ops, casts, copies, and reductions if these are wanted.

    An op stays alone if it has an effect or draws, reads numbers that are inputs, is of a loss, or is written over its
    input block by block, which brings it through where a whole kernel would not fit.
    """
    target = node.target
    if node.op != "call_function" or isinstance(target, Launch) or LINK in node.meta or target in _OF_LOSSES:
        return False
    of_aten = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    pointwise = target in _POINTWISE | _MOVES or (of_aten and torch.Tag.pointwise in target.tags)  # type: ignore[union-attr]
    if not (pointwise or (reductions and is_reduction(node))) or (target is not scale_mask and has_effect(node)):
        return False
    near = [node, *node.all_input_nodes]
    if not all(tensors(n.meta.get("val")) for n in near):
        return False
    all_tensors = tensors([n.meta["val"] for n in near])
    if len({t.device for t in all_tensors}) > 1 or any(
        t.dtype.is_complex or t.layout != torch.strided for t in all_tensors
    ):
        return False
    written = written_of(target)
    if written is not None and written.block is not None and all_tensors[0].device.type == "cpu":
        return False
    return (
        target is not aten._to_copy.default or not {n.target for n in (*readers(node), *map(maker, near))} & _OF_LOSSES
    )


def is_constant(node: fx.Node) -> bool:
    """Tell whether it makes a tensor of one number, which each kernel makes for itself."""
    return node.target in _CONSTANTS and not node.all_input_nodes


def is_part(node: fx.Node) -> bool:
    """Tell whether it is a view, or names one of several results."""
    return node.op == "call_function" and (node.target is operator.getitem or is_view(node))


def maker(node: fx.Node) -> fx.Node:
    """The op, or input, whose memory it shows."""
    node = viewed(node)
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the ops that read it, also through views and by the names of its results; and the graph's output."""
    stack, seen = [*node.users], set[fx.Node]()
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if is_part(user):
            stack += user.users
        else:
            yield user


def results(node: fx.Node) -> list[fx.Node]:
    """The nodes that name its tensors."""
    if isinstance(node.meta["val"], Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def read_from(members: Iterable[fx.Node]) -> list[fx.Node]:
    """The results of members that others read."""
    inside = set(members)
    return [result for member in members for result in results(member) if not {*readers(result)} <= inside]


def in_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes of a graph in its order."""
    return sorted(nodes)


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's tensors."""
    return sum(t.numel() * t.element_size() for t in tensors(node.meta.get("val")))
