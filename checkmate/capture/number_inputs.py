"""Python numbers that change from call to call, as inputs of a captured step instead of Dynamo's constants.

Dynamo makes a number a part of what it captures. Told to, it makes it an input: a symbol of its own kind, which passes
through arithmetic and into ops as their scalar arguments. The ops that run are those of plain PyTorch, on the same
numbers. Where a program asks for more of such a number, whether it is zero, or a shape, the answer would be captured.
So a capture with numbers as inputs is compared with an earlier one without: with the numbers of that call put in, both
must be the same ops with the same arguments, to the bit.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from checkmate.capture.nodes import PlannedOp, input_position, leaf_nodes, needed_by, tensors, viewed
from checkmate.capture.patches.kernels import value_of
from checkmate.capture.patches.results.strides import strides_of
from checkmate.capture.provenance import where
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import (
    RandomValueSource,
    _has_tag_is_backward,
    _is_primal,
    auto_dynamic,
    builder,
    graph_compile,
    is_sym_node,
)

Number = int | float
CHOSEN = (
    "Where data chooses who computes, as with experts or adapters, let each of them compute all, and weight with zero "
    "what is not its own."
)
OUTSIDE = (
    "What stands behind the network, such as a miner of pairs or a matcher, may stay outside: compile the network "
    "alone, and call it on the outputs."
)
EXPERTS = (
    f'{CHOSEN} Models of transformers that have a choice: model.set_experts_implementation("grouped_mm"), '
    'or "batched_mm".'
)
_EXPERT = re.compile(r"expert|moe", re.IGNORECASE)
_ONE_OF = {torch.sym_max, torch.sym_min}
_READ_ONE = {"to", "type_as"}  # methods that ask any other argument for its type only
DRAW_BYTES = 8  # Dynamo describes a draw as float32 and hands it in as float64, or as int64
_ITEM = torch.ops.aten._local_scalar_dense.default


class NotFree(Exception):
    """Raised if a number cannot be an input, because the captured graph depends on it."""


@contextmanager
def as_inputs(sources: Collection[str]) -> Iterator[None]:
    """Make Dynamo capture numbers, by its names, as inputs that stay numbers: tensors would round them."""

    def frame_state(tx: Any, name: str, entry: Any, **options: Any) -> Any:
        return replace(entry, scalar=auto_dynamic) if name in sources else entry

    with ExitStack() as stack:
        if sources:
            stack.enter_context(patch.object(builder, "is_dynamic_source", lambda name, *_: name in sources))
            stack.enter_context(patch.object(builder, "process_automatic_dynamic", frame_state))
        # Leave numbers that are computed from these, or from sizes, numbers: 1 / sqrt(n), say.
        stack.enter_context(patch.object(graph_compile, "tensorify_python_scalars", lambda *args: None))
        yield


def numbers_and_draws(module: fx.GraphModule, numbers: Collection[str]) -> tuple[dict[int, str], list[int]]:
    """Positions and names of the inputs that are ``numbers``, and positions of draws from Python's generator."""
    sources: list[Any] = [getattr(n, "_dynamo_source", None) for n in module.graph.find_nodes(op="placeholder")]
    names = {i: source.name for i, source in enumerate(sources) if getattr(source, "name", None) in numbers}
    return names, [i for i, source in enumerate(sources) if type(source) is RandomValueSource]


def number_placeholders(graph: fx.Graph, numbers: Mapping[int, str]) -> dict[fx.Node, str]:
    """The placeholders of a joint graph that are numbers."""
    primals = [node for node in graph.find_nodes(op="placeholder") if numbers and _is_primal(node)]
    return {node: numbers[i] for node in primals if (i := input_position(node)) is not None and i in numbers}


def symbols_of_numbers(numbers: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """The nodes that hold these numbers: their placeholders, or what reads one from a placeholder that is a tensor."""
    read = ((node, name) for n, name in numbers.items() for node in (n, *n.users) if node is n or node.target is _ITEM)
    return {node: name for node, name in read if is_sym_node(node)}


def check_sizes(graph: fx.Graph, numbers: Collection[fx.Node], name: Callable[[fx.Node], str]) -> None:
    """Refuse sizes in a joint graph that are not fixed, and tensors whose bytes depend on data.

    Args:
        numbers: placeholders that may be any number.
        name: of a value, as the user knows it.

    Raises:
        NotFree: if a shape or a type depends on one of the numbers.
        Unsupported: if it depends on something else.
    """
    free: set[fx.Node] = {*numbers}
    # Symbols are computed from these numbers alone; sizes and strides are known.
    for node in graph.nodes:
        if node.op != "output" and is_sym_node(node):
            if node in free or (node.all_input_nodes and free.issuperset(node.all_input_nodes)):
                free.add(node)
                continue
            if node.op == "placeholder":
                raise Unsupported(
                    "A size of the inputs is marked as dynamic (torch._dynamo.mark_dynamic). A plan counts bytes, so "
                    "it is for fixed sizes: take the mark away, and each size gets a plan of its own."
                )
            if node.target is _ITEM:
                read: Any = viewed(node.args[0])
                source = name(read) if read.op == "placeholder" else f"what the step computes at {where(read)}"
                raise Unsupported(number_read(where(node), source))
            raise Unsupported(_size_of_data(node))
        for tensor in tensors(node.meta.get("val")):
            if tensor.layout != torch.strided:
                raise Unsupported(
                    f"{where(node)}: {node.name} is a sparse tensor, whose bytes depend on data. "
                    "Use dense ones: nn.Embedding(..., sparse=False)."
                )
            open_sizes = [size for size in (*tensor.shape, *tensor.stride()) if type(size) is not int]
            fitted = not numbers and type(tensor.untyped_storage().nbytes()) is not int  # to what it is computed with
            if fitted or any(map(free_unbacked_symbols, open_sizes)):
                raise Unsupported(_size_of_data(node))
            if numbers and open_sizes:
                raise NotFree(f"{where(node)}: the shape of {node.name} depends on a number")

    # Refuse `min(1, x)` of a float x, an integer in one call and a float in another, if it meets other than floats.
    either: set[fx.Node] = set()
    for node in graph.nodes if numbers else ():
        if is_sym_node(node):
            kinds = {type(value_of(a.meta["val"] if isinstance(a, fx.Node) else a)) for a in node.args}
            if either.intersection(node.all_input_nodes) or (node.target in _ONE_OF and len(kinds) > 1):
                either.add(node)
        elif node.op != "output" and either.intersection(node.all_input_nodes):
            beside = [t for a in node.all_input_nodes for t in tensors(a.meta.get("val"))]
            if not beside or not all(t.is_floating_point() for t in beside):
                raise NotFree(f"{where(node)}: the type of {node.name} depends on a number")


def refuse_nested(names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Refuse nested tensors among inputs: the bytes of a step depend on their parts."""
    for name, value in zip(names, inputs, strict=False):
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise Unsupported(
                f"{name} is a nested tensor, whose bytes depend on how long its parts are; a plan is for fixed sizes. "
                "Pass a padded batch and a mask, or the parts, and make the nested tensor in the step: "
                "torch.nested.as_nested_tensor([a, b], layout=torch.jagged). Each set of shapes gets its own plan."
            )


def refuse_sizes_of_data(module: fx.GraphModule) -> None:
    """Refuse a step that computes with tensors whose sizes depend on data, before it is traced.

    `check_sizes` would as well, but tracing with unknown sizes takes minutes where a loop makes many. A step without
    gradients is not planned, and stays; so does a size that was only asked for, as guards are taken out before.
    """
    described = {node: tensors(node.meta.get("example_value")) for node in module.graph.nodes}
    sized = [n for n, fakes in described.items() if any(free_unbacked_symbols(size) for t in fakes for size in t.shape)]
    output = module.graph.output_node()
    if not sized or not any(t.requires_grad for n in output.all_input_nodes for t in described[n]):
        return
    needed = needed_by(output, lambda n: leaf_nodes(n.args[:1]) if n.target in _READ_ONE else n.all_input_nodes)
    if any(node.target == "item" for node in needed):  # `check_sizes` says more of these
        return
    for node in sized:
        is_summed = all(user.target in ("sum", torch.sum) for user in node.users)  # `rewrite.sum_what_masks_select`
        if node in needed and not is_summed:
            raise Unsupported(_size_of_data(node))


def _size_of_data(node: fx.Node) -> str:
    """The message for a size that depends on the data of a tensor."""
    subject = f"the gradient of what is computed here, {node.name}," if _has_tag_is_backward(node) else node.name
    place = where(node)
    if node.name.startswith("bincount"):
        return (
            f"{place}: the size of bincount depends on data; sizes must be fixed. For k bins write "
            "F.one_hot(i, k).sum(0), or torch.zeros(k).scatter_add_(0, i, weights). If only the first call counts, to "
            "set a codebook up, say, call the model once before compiling."
        )
    return (
        f"{place}: the size of {subject} depends on data; sizes must be fixed. Mask what is left out (torch.where, an "
        "ignored index) in place of selecting the rest, by x[mask] or by x[mask] = y. "
        f"{EXPERTS if _EXPERT.search(place) else f'{CHOSEN} {OUTSIDE}'}"
    )


def written_out(
    graph: fx.Graph, numbers: Mapping[fx.Node, str], results: Sequence[Any], by_source: Mapping[str, Number]
) -> list[Any]:
    """Write out a joint graph with numbers put in, as data equal for equal computations; or raise `NotFree`.

    Args:
        numbers: placeholders that are numbers, with their sources; by_source: their values.
        results: of the forward, then the gradients of all other placeholders: nodes or constants.
    """
    value: dict[fx.Node, Any] = {}  # of numbers, and the place of all else
    lines: list[Any] = []
    left_out = {n for n in graph.nodes if is_sym_node(n) or hands_out_number(n)}  # they are in no other capture

    def put_in(arg: Any) -> Any:
        return fx.node.map_arg(arg, value.__getitem__)

    def bits(arg: Any) -> Any:
        return fx.node.map_aggregate(put_in(arg), _bits)

    # A line for each op and input: its target, its arguments with numbers put in, and what it makes.
    for node in graph.nodes:
        if node.op == "output" or hands_out_number(node) or type(node.meta.get("val")) is int:  # a size put in
            continue
        if node in numbers:
            value[node] = by_source[numbers[node]]
        elif is_sym_node(node):
            value[node] = put_in(node.args[0]) if node.target is _ITEM else node.target(*put_in(node.args))
        else:
            fakes = [(*t.shape, strides_of(t), t.dtype) for t in tensors(node.meta.get("val"))]
            target: Any = node.target if node.op == "call_function" else node.op
            if isinstance(target, PlannedOp):  # an update of ours: which one its arguments say
                target = str(target), target.overwrites, target.moved
            if node.op == "get_attr":
                held = getattr(graph.owning_module, str(node.target), None)
                if not isinstance(held, torch.Tensor):
                    raise NotFree(f"{node.target}, a part of the step, cannot be compared")
                target = _bits(repr(held.dtype)), held.detach().flatten().tolist()
            lines.append((target, bits(node.args), bits(dict(node.kwargs)), fakes))
            value[node] = _Position(len(lines))
    return [*lines, bits([result for result in results if result not in left_out and type(result) is not int])]


class _Position(int):
    """The position of an op or input in the graph."""


def hands_out_number(node: fx.Node) -> bool:
    """Tell whether a node passes a number to Dynamo in a tensor, to set a module's attribute after the step."""
    number: Any = node.args[0] if node.target is torch.ops.aten.scalar_tensor.default else None
    if not isinstance(number, fx.Node) or not is_sym_node(number):
        return False
    return node.kwargs.get("dtype") is torch.float64 and all(user.op == "output" for user in node.users)


def _bits(arg: Any) -> Any:
    return type(arg).__name__, struct.pack("d", arg) if isinstance(arg, float) else arg


def number_read(place: str, source: str) -> str:
    """The message for a number read from a tensor, ``source``, as a size, index or argument."""
    message = (
        f"{place}: a number is read from {source}, by int(), .item(), .tolist() or the like. A step is planned without "
        "the data of its tensors, so that no size, slice or argument can depend on it. Index with the tensor itself "
        "(x[i], x.index_copy_(0, i, y)), mask with it (torch.where), or read the number outside of the step and pass "
        "it in: each number gets a plan of its own."
    )
    return f"{message} {EXPERTS}" if _EXPERT.search(f"{place} {source}") else message
