"""Rewrites of the joint graph that keep every bit and give the planner more to choose from."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.fx as fx

aten = torch.ops.aten


def prepare(graph: fx.Graph) -> None:
    """Rewrite a joint graph in place: expose dropout's mask, forget unread statistics, drop dead code."""
    expose_dropout(graph)
    forget_running_statistics(graph)
    graph.eliminate_dead_code()
    graph.lint()


def expose_dropout(graph: fx.Graph) -> None:
    """Split dropout on the CPU into what eager PyTorch computes there, with the mask as a value of its own.

        noise = bernoulli(1 - p) / (1 - p),   y = x * noise,   dx = dy * noise

    The mask is drawn once, as one byte an element; the noise and the product can be computed from it again. AOTAutograd
    traces ``native_dropout`` instead, whose scaling rounds differently from eager in half precision.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        if train is False or x.meta["val"].device.type != "cpu" or not 0.0 < p < 1.0:
            continue
        outputs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        with graph.inserting_before(node):
            like = x.meta["val"]
            mask = _call(graph, node, draw_mask, (x, 1.0 - p), name=f"{node.name}_mask", stands_for=outputs.get(1))
            kept = _call(graph, node, aten._to_copy.default, (mask,), {"dtype": like.dtype})
            noise = _call(graph, node, aten.div.Scalar, (kept, 1.0 - p), name=f"{node.name}_noise")
            product = _call(
                graph, node, aten.mul.Tensor, (x, noise), name=f"{node.name}_product", stands_for=outputs.get(0)
            )
        if 0 in outputs:
            outputs[0].replace_all_uses_with(product)
        for backward in list(outputs[1].users) if 1 in outputs else []:
            if backward.target is aten.native_dropout_backward.default and backward.args[1] is outputs[1]:
                with graph.inserting_before(backward):
                    grad = _call(graph, backward, aten.mul.Tensor, (backward.args[0], noise), stands_for=backward)
                backward.replace_all_uses_with(grad)
                graph.erase_node(backward)
        if 1 in outputs:
            outputs[1].replace_all_uses_with(mask)
        for user in outputs.values():
            graph.erase_node(user)
        graph.erase_node(node)


def draw_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """A bool tensor in the shape and memory order of ``x``, each entry true with probability p.

    The draws are those that ``empty_like(x).bernoulli_(p)`` makes, in number and order; the functional ``bernoulli`` of
    PyTorch draws in logical order instead, and differs where ``x`` is channels-last.
    """
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(p)


def forget_running_statistics(graph: fx.Graph) -> None:
    """In training mode batch norm's backward is handed the new running statistics and reads none of them.

    Without them the statistics are free as soon as they are stored, and what batch norm computes again has no reader.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7]:
            node.update_arg(3, None)
            node.update_arg(4, None)


def _call(
    graph: fx.Graph,
    origin: fx.Node,
    target: Callable[..., torch.Tensor],
    args: tuple,
    kwargs: dict | None = None,
    name: str | None = None,
    stands_for: fx.Node | None = None,
) -> fx.Node:
    """A node with the provenance of another, and the fake result of the one it stands for: views of that share it."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    node.meta = {key: what for key, what in origin.meta.items() if key not in ("val", "tensor_meta")}
    if stands_for is not None:
        node.meta["val"] = stands_for.meta["val"]
        return node
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with _fake_mode(args), torch.no_grad():
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def _fake_mode(args: tuple) -> torch._subclasses.FakeTensorMode:
    return next(a.meta["val"].fake_mode for a in args if isinstance(a, fx.Node))
