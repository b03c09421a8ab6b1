"""Rewrites of the joint graph that keep every bit and give the planner more choices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from checkmate.capture import random_draws
from checkmate.capture.device import WAVERS
from checkmate.capture.nodes import call, done_with_gradients, has_effect, is_convolution, is_random, tensors
from checkmate.capture.patches.recurrent import LAYER, lstm_layer
from checkmate.capture.patches.results.strides import draw_copy, lay_out
from checkmate.capture.provenance import where
from checkmate.errors import Unsupported
from checkmate.torch_internals.running import OpOverload

aten = torch.ops.aten


def expose_workspaces(graph: fx.Graph) -> None:
    """Return the workspace of each LSTM layer for its backward, also where gradients are not enabled."""
    for node in graph.find_nodes(op="call_function", target=LAYER):
        node.target = lstm_layer


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase nodes that nobody reads, without draws and other effects."""

    def stays(n: fx.Node) -> bool:
        return bool(n.users or n.target in random_draws.DRAWS or n.is_impure() or done_with_gradients(n))

    graph.eliminate_dead_code(stays)


def note_wavering(graph: fx.Graph, repeats: Callable[[fx.Node], bool] | None) -> None:
    """Note of each convolution on an accelerator whether it may have other bits when it runs again."""
    if repeats is None:
        return
    for node in filter(is_convolution, graph.nodes):
        on_accelerator = any(result.device.type != "cpu" for result in tensors(node.meta["val"]))
        node.meta[WAVERS] = on_accelerator and not repeats(node)


def expose_dropout(graph: fx.Graph) -> None:
    """Split dropout on the CPU as eager PyTorch computes it, with the mask as a value.

        noise = bernoulli(1 - p) / (1 - p),   y = x * noise,   dx = dy * noise

    The mask is one byte an element; the noise and the product can be computed from it again. AOTAutograd
    traces ``native_dropout`` instead, whose scaling rounds differently from eager in half precision. On CUDA that op is
    what eager runs too, in one kernel with a random stream of its own: there it stays; see `save_device_states`.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        if train is False or x.meta["val"].device.type != "cpu" or not 0.0 < p < 1.0:
            continue
        outputs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        vals = {place: output.meta["val"] for place, output in outputs.items()}
        mask = _call(node, random_draws.draw_mask, (x, 1.0 - p), f"{node.name}_mask", vals.get(1))
        noise = _call(node, scale_mask, (mask, 1.0 - p, x.meta["val"].dtype), f"{node.name}_noise")
        product = _call(node, aten.mul.Tensor, (x, noise), f"{node.name}_product", vals.get(0))
        for backward in list(outputs[1].users) if 1 in outputs else []:
            if backward.target is aten.native_dropout_backward.default and backward.args[1] is outputs[1]:
                _replace(backward, aten.mul.Tensor, (backward.args[0], noise), f"{node.name}_grad")
        for place, replacement in enumerate((product, mask)):
            if place in outputs:
                outputs[place].replace_all_uses_with(replacement)
                graph.erase_node(outputs[place])
        graph.erase_node(node)


def save_states(graph: fx.Graph, names: Collection[str] | None = None) -> None:
    """Keep the generator's state before each large mask of the forward, so that it can be drawn again.

    ``names`` are those of the states to keep, whatever the size; None: of what is large.
    """
    for node in graph.find_nodes(op="call_function", target=random_draws.draw_mask):
        x, p = node.args
        shape = tuple(node.meta["val"].shape)
        if not node.users or "backward" in node.meta.get("partitioner_tag", ""):
            continue
        if not _is_worth_a_state(node, math.prod(shape), names):
            continue
        with node.meta["val"].fake_mode:
            like = torch.empty(random_draws.STATE_BYTES + 8 * len(shape), dtype=torch.uint8)
        saved = _call(node, random_draws.save_state, (x,), f"{node.name}_state", like)
        _replace(node, random_draws.draw_saved, (saved, shape, p), f"{node.name}_drawn")


def save_device_states(
    graph: fx.Graph, again: Callable[[fx.Node], bool] | None = None, names: Collection[str] | None = None
) -> None:
    """Keep seed and offset before each large draw of the forward on an accelerator, so that it can run again.

    Else its result has to wait: that of dropout, which its mask alone does not give with the same bits, of attention
    with dropout, noise. ``again``: a trial whether it has the same bits; ``names`` as for `save_states`.
    """
    for node in list(graph.nodes):
        # An op of PyTorch's whose large result is drawn by the generator of an accelerator, and is read.
        op, results = node.target, tensors(node.meta.get("val"))
        if not node.users or "backward" in node.meta.get("partitioner_tag", ""):
            continue
        if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable or not is_random(node):
            continue
        if not results or results[0].device.type == "cpu" or not _is_worth_a_state(node, results[0].nbytes, names):
            continue
        if again is not None and not again(node):
            continue
        val: Any = results[0]
        with val.fake_mode:
            like = torch.empty(random_draws.DEVICE_STATE_BYTES, dtype=torch.uint8)
        saved = _call(node, random_draws.save_device_state, (val.device,), f"{node.name}_state", like)
        node.target, node.kwargs = random_draws.Drawn(op), {**node.kwargs, "on": val.device, "saved": saved}


def _is_worth_a_state(node: fx.Node, nbytes: int, names: Collection[str] | None) -> bool:
    return nbytes >= random_draws.WORTH_BYTES if names is None else f"{node.name}_state" in names


def states_kept(graph: fx.Graph) -> frozenset[str]:
    """The names of the random states that a rewritten graph keeps."""
    states = random_draws.save_state, random_draws.save_device_state
    return frozenset(n.name for n in graph.nodes if n.target in states)


def draw_as_in_place(graph: fx.Graph) -> None:
    """Let ``bernoulli_`` on a noncontiguous tensor draw without reading it, in memory order.

    `F.dropout(inplace=True)` and `F.alpha_dropout` are made of it. `F.rrelu` of such a tensor is refused.
    """
    for node in graph.find_nodes(op="call_function", target=draw_copy):
        op, x, *p = node.args
        if op is aten.bernoulli_.float and not node.kwargs and aten.is_non_overlapping_and_dense(x.meta["val"]):
            _replace(node, random_draws.draw_numbers, (x, *(p or (0.5,))), f"{node.name}_drawn")
    for node in graph.find_nodes(op="call_function", target=aten.rrelu_with_noise_functional.default):
        if not node.args[0].meta["val"].is_contiguous():
            raise Unsupported(
                f"{where(node)}: F.rrelu on a tensor that is not contiguous draws other random numbers when traced. "
                "Call .contiguous() on it first."
            )


def scale_mask(mask: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers of a type, divided by p; from bytes, since bools convert six times slower."""
    return mask.view(torch.uint8).to(dtype).div_(p)


def forget_running_statistics(graph: fx.Graph) -> None:
    """Remove the running statistics from training batch norms' backwards, which do not read them.

    Without them the statistics are free as soon as they are stored, and what batch norm computes again has no reader.
    Only on the CPU: the kernel on CUDA reads their type, and chooses by it how to read the weight.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[7] and node.args[0].meta["val"].device.type == "cpu":
            node.update_arg(3, None)
            node.update_arg(4, None)


def split_convolutions(graph: fx.Graph, in_two: Callable[[fx.Node], bool] | None = None) -> None:
    """Split a convolution's backward into its weight's gradient and its input's, each with its old bits.

    PyTorch calls a kernel for each in any case. They lay out anew what they read: the input x and the incoming gradient
    y for the weight's, y and the weight w for the input's. As one op, and with the input's gradient first, that takes
    3x + 2y + w bytes at most; with the weight's first 2x + 2y + 2w, which is less where the weight is the smaller.
    """
    op = aten.convolution_backward.default
    for node in graph.find_nodes(op="call_function", target=op):
        *args, (needs_input, *needs_others) = node.args
        val = node.meta["val"]
        if not needs_input or not any(needs_others) or not (in_two is None or in_two(node)):
            continue
        parts = {  # suffix: mask, results, bytes of the largest
            "weight": ([False, *needs_others], (None, *val[1:]), args[2].meta["val"].nbytes),
            "input": ([True, False, False], (val[0], None, None), val[0].nbytes),
        }
        halves = {}
        for name, (mask, results, _) in sorted(parts.items(), key=lambda part: part[1][2]):
            halves[name] = _call(node, op, (*args, mask), f"{node.name}_{name}", results)
        for getitem in list(node.users):
            getitem.update_arg(0, halves["weight" if getitem.args[1] else "input"])
        graph.erase_node(node)


def skip_idle_views(graph: fx.Graph) -> None:
    """Read through views that change nothing: ``detach``, ``alias``, a transpose of a transpose.

    The modules run without autograd, so that a detached tensor is the tensor; each view less is a call less. What the
    step returns stays as it is.
    """
    for node in graph.nodes:
        if node.target in (aten.detach.default, aten.alias.default):
            source = node.args[0]
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            source = node.args[0].args[0]
        else:
            continue
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def lay_out_at_once(graph: fx.Graph) -> None:
    """Fill a new tensor as eager PyTorch does, where tracing makes a functional copy.

    Autograd lays out so the gradient of a tensor of which a view was written in place.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        empty, source = node.args[:2]
        val = node.meta["val"]
        if empty.target is aten.new_empty_strided.default and source.meta["val"].device == val.device:
            args = source, tuple(val.shape), tuple(val.stride()), val.dtype
            _replace(node, lay_out, args, f"{node.name}_laid_out")


def sum_what_masks_select(graph: fx.Graph) -> None:
    """Select by a mask and sum the selection in one op, whose result has a fixed size.

    The gradient of ``token`` in ``x[mask] = token`` is such a sum.
    """
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        x, indices = node.args
        masks = [index for index in indices if index is not None]
        if len(masks) != 1 or masks[0].meta["val"].dtype != torch.bool or len(node.users) != 1:
            continue
        (total,) = node.users
        is_sum = total.target in (aten.sum.default, aten.sum.dim_IntList) and not total.kwargs
        if not is_sum or free_unbacked_symbols(total.meta["val"]):
            continue
        _replace(total, sum_of_selected, (x, masks[0], len(indices) - 1, *total.args[1:]), f"{total.name}_selected")
        graph.erase_node(node)


def sum_of_selected(x: torch.Tensor, mask: torch.Tensor, before: int, *dims: Any) -> torch.Tensor:
    """The sum over ``dims`` of the elements selected by a mask behind the first ``before`` dimensions.

    It takes the bytes of a mask that selects all, whatever this one does, so that they can be planned.
    """
    places = max(mask.numel() * mask.dim() * 8, x.nbytes // max(mask.numel(), 1))  # of what is selected; or the sum
    torch.empty(places + x.nbytes, dtype=torch.uint8, device=x.device)
    return aten.sum(aten.index(x, [*[None] * before, mask]), *dims)


def gather_copies(graph: fx.Graph) -> None:
    """Write all buffers in one call: the final ``copy_`` ops of the joint graph become one ``_foreach_copy_``.

    A network with fifty batch norms has 150 of them, each an op to plan and a call to make.
    """
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    plain = [n for n in copies if not n.users and n.args[0].op == "placeholder"]
    alike = [n for n in plain if n.args[0].meta["val"].dtype == n.args[1].meta["val"].dtype]
    for in_backward in (False, True):
        group = [n for n in alike if ("backward" in n.meta.get("partitioner_tag", "")) == in_backward]
        if len(group) < 2:
            continue
        copy, args = aten._foreach_copy_.default, ([n.args[0] for n in group], [n.args[1] for n in group])
        with graph.inserting_after(group[-1]):
            together = graph.create_node("call_function", copy, args, name=f"{group[0].name}_all")
        together.meta = {**group[-1].meta, "val": None}
        for n in group:
            graph.erase_node(n)


def _call(origin: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], name: str, val: Any = None) -> fx.Node:
    """Insert a node before another, with its provenance; ``val``: its fake result, if known."""
    with origin.graph.inserting_before(origin):
        return call(origin, target, args, name, val)


def _replace(node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
    """Replace a node by a call with its fake result, whose storage views share."""
    node.replace_all_uses_with(_call(node, target, args, name, node.meta["val"]))
    node.graph.erase_node(node)


def without_dead_code(module: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of this graph, without unread ops, and with the tensors of another module."""
    graph.eliminate_dead_code(has_effect)
    graph.lint()
    return Unwritten(module, graph)


class Unwritten(fx.GraphModule):
    """A module whose code is generated where somebody runs or reads it: of most graphs on the way nobody does."""

    def recompile(self) -> Any:
        """Generate no code yet."""

    def forward(self, *args: Any) -> Any:
        """Generate the code, which takes the place of this, and run it."""
        super().recompile()
        return self(*args)

    @property
    def code(self) -> str:
        """The generated code."""
        super().recompile()
        return super().code
