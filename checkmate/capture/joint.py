"""A traced training step, forward and backward in one `torch.fx` graph, read as ops and values.

AOTAutograd hands over the *joint* graph: functional but for a last block of ``copy_`` into the inputs that the step
overwrites. `read_joint` finds the storages in it (by the identity of the fake tensors' storages: schemas do not always
tell what aliases what), tells views from ops, forward from backward, and which ops must run exactly once and why.
On the main path, 4 of 16: see docs/idea.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.device import as_allocated
from checkmate.capture.nodes import (
    COPIES_OF_STORAGES,
    LINK,
    LOSSES,
    Held,
    PlannedOp,
    getitems,
    input_position,
    is_mutating,
    leaf_nodes,
    storage,
    storages,
    target_name,
    tensors,
    updated,
)
from checkmate.capture.number_inputs import DRAW_BYTES, check_sizes, hands_out_number
from checkmate.capture.op_order import TracedStep, let_overwrite, split_forward_backward
from checkmate.capture.patches.results.strides import obeys_layout
from checkmate.capture.provenance import where
from checkmate.core.graph import Graph, Op, Phase, Role, Value
from checkmate.errors import Unsupported
from checkmate.tags import Noted
from checkmate.torch_internals.capturing import InputMutationAOTOutput, _is_primal, is_with_effects

NUMBERS = "handed_in_numbers"  # the op that stands for them


@dataclass(frozen=True, eq=False)
class Joint:
    """A captured step: the fx graph, and the ops and values that its nodes stand for."""

    step: TracedStep  # as it was traced: its inputs and results
    graph: Graph
    nodes: tuple[fx.Node | None, ...]  # for each op its node; None: stands for something autograd does
    value_of: dict[fx.Node, tuple[int, ...]]  # for each node, the values that its tensors are, or are views of
    nodes_of_value: tuple[tuple[fx.Node, ...], ...]  # for each value, those that name its producer's output directly
    held: Mapping[int, Held]  # the values that updates hold

    @property
    def module(self) -> fx.GraphModule:
        """The joint graph."""
        return self.step.module

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters, buffers and inputs, which stay with the caller."""
        return sum(value.size_bytes for value in self.graph.values if value.producer is None)

    def in_order(self, order: Sequence[int]) -> Joint:
        """The step with its ops in another order, as in `checkmate.core.graph.Graph.in_order`."""
        return replace(self, graph=self.graph.in_order(order), nodes=tuple(self.nodes[k] for k in order))


def read_joint(step: TracedStep, *, block_bytes: int = 1, noted: Noted = ()) -> Joint:
    """Read a joint graph of AOTAutograd, as the rewrites of `checkmate.backends.passes` leave it, or made of that.

    Args:
        block_bytes: the allocator rounds every size up to a multiple of these.
        noted: what the step has tagged.

    Raises:
        NotFree: if a shape depends on one of the numbers that are inputs.
        Unsupported: for sizes that depend on data, ops that read draws of Python's generator, ops whose outputs alias
            only in part, and backward ops that read what the forward has overwritten.
    """
    # Delete constants that no node reads any more: their bytes would be in no plan.
    module = step.module
    read = {node.target for node in module.graph.find_nodes(op="get_attr")}
    for name, _ in [*module.named_buffers(recurse=False)]:
        if name not in read:
            delattr(module, name)

    check_sizes(module.graph, step.numbers, step.name)
    let_overwrite(step)
    forward, backward = split_forward_backward(step)

    # Dynamo makes tensors of Python's draws, which take part in other kernels, and other types. What a program asks of
    # them, ``if random.uniform(0, 1) < 0.1:``, has been evaluated before: see `checkmate.capture.guards`.
    for user in (user for draw in step.draws for user in draw.users):
        raise Unsupported(
            f"{where(user)}: a number of Python's random generator is computed with. "
            "Draw with torch, or draw outside and pass the number in as a tensor."
        )

    # Add inputs, ops and values in the order in which they come to be.
    contents = _Contents(step, block_bytes)
    contents.add_inputs()
    handed_in = contents.add_handed_in(NUMBERS, [n for n in (*step.numbers, *step.draws) if tensors(n.meta["val"])])
    for node in forward:
        contents.add_op(node, "forward")
    let_go = contents.read_at_return()
    if held := (*handed_in, *let_go):  # by the caller of the forward until it has returned, but not for the backward
        contents.add(Op("return", "autograd", held, (), "forward", "is done by autograd"))
    tangents = contents.add_handed_in("tangents", [n for n in step.placeholders if n in step.after_tangent], "tangent")
    for node in backward:
        contents.add_op(node, "backward")
    outputs = contents.results(tangents, let_go)
    # Name the ops that make what the step has tagged.
    for tensor, name in noted:
        v = contents.by_storage.get(storage(tensor))
        k = None if v is None else contents.values[v].producer
        if k is not None and name not in contents.ops[k].tags:
            contents.ops[k] = replace(contents.ops[k], tags=(*contents.ops[k].tags, name))
    return Joint(
        step=step,
        graph=Graph(tuple(contents.ops), tuple(contents.values), outputs),
        nodes=tuple(contents.nodes),
        value_of={n: contents.values_of(n) for n in step.nodes if n.op != "output"},
        nodes_of_value=tuple(map(tuple, contents.nodes_of_value)),
        held=contents.held,
    )


class _Contents:
    """The ops and values of a step, added in the order in which they are made."""

    def __init__(self, step: TracedStep, block_bytes: int) -> None:
        self.step = step
        self.block_bytes = block_bytes
        self.ops: list[Op] = []
        self.nodes: list[fx.Node | None] = []  # per op
        self.values: list[Value] = []
        self.nodes_of_value: list[list[fx.Node]] = []  # per value
        self.by_storage: dict[int, int] = {}  # its value
        self.held: dict[int, Held] = {}  # by value

    def values_of(self, node: fx.Node) -> tuple[int, ...]:
        """The values that a node's tensors are, or are views of."""
        return tuple(self.by_storage[key] for key in dict.fromkeys(storages(node)) if key in self.by_storage)

    def add_inputs(self) -> None:
        """Add parameters, buffers and inputs, once for each storage."""
        step, position = self.step, 0
        trained = {i for i, gradient in enumerate(step.backward_outputs) if isinstance(gradient, fx.Node)}
        for n in step.nodes:
            if n in step.numbers or n in step.draws:
                position += 1
            elif n.op == "placeholder" and n not in step.after_tangent:
                role: Role = "input"
                if position in step.static_inputs:
                    is_parameter = position in trained or input_position(n) in step.parameters
                    role = "parameter" if is_parameter or n.meta["val"].requires_grad else "buffer"
                position += _is_primal(n)
                self._add_values(n, None, role)
            elif n.op == "get_attr":
                self._add_values(n, None, "buffer")

    def _add_values(self, node: fx.Node, producer: int | None, role: Role) -> tuple[int, ...]:
        """Add a value for each storage that the node makes, named by the node or its getitems."""
        new_values: list[int] = []
        is_one = isinstance(node.meta.get("val"), torch.Tensor)
        for i, tensor in enumerate(tensors(node.meta.get("val"))):
            if storage(tensor) in self.by_storage:
                continue
            # Some fake tensors do not have the bytes of what is allocated.
            size = tensor.untyped_storage().nbytes()
            if node in self.step.draws:
                size = DRAW_BYTES
            elif node.target in COPIES_OF_STORAGES:
                (part, *_) = leaf_nodes(node.args)
                (v,) = self.values_of(part)
                if tensor.stride() == part.meta["val"].stride():
                    size = self.values[v].size_bytes
            elif node.target in LOSSES:
                terms = torch.broadcast_shapes(*(n.meta["val"].shape for n in leaf_nodes(node.args[:2])))
                size = terms.numel() * tensor.element_size()
            name = self.step.name(node) if is_one else f"{node.name}[{i}]"
            new_values.append(self._add_value(Value(name, as_allocated(size, self.block_bytes), producer, role)))
            self.by_storage[storage(tensor)] = new_values[-1]
        # Note the nodes that name each.
        for face in [node] if is_one else getitems(node):
            for v in self.values_of(face):
                if producer is None or v in new_values:
                    self.nodes_of_value[v].append(face)
        return tuple(new_values)

    def _add_value(self, value: Value) -> int:
        self.values.append(value)
        self.nodes_of_value.append([])
        return len(self.values) - 1

    def add(self, op: Op, node: fx.Node | None = None) -> None:
        self.ops.append(op)
        self.nodes.append(node)

    def add_op(self, node: fx.Node, phase: Phase) -> None:
        """Add a node's op, and the values that it makes."""
        read = dict.fromkeys(v for a in node.all_input_nodes for v in self.values_of(a))
        writes = is_mutating(node) or bool(updated(node))
        target = node.target if isinstance(node.target, PlannedOp) else None
        over = [v for p in updated(node) for v in self.values_of(p)]
        outputs: tuple[int, ...] = ()
        held = () if target is None else target.held()
        if target is not None and target.stores:
            over += self._add_values(node, None, "state")
            self.held[over[-1]] = held[0]
        elif not writes:
            outputs = self._add_values(node, len(self.ops), "intermediate")
        aliased = [v for v in self.values_of(node) if v not in outputs and v not in over]
        if aliased and not writes:
            raise Unsupported(
                f"{where(node)}: an output of {target_name(node)} shares memory with {self.values[aliased[0]].name}, "
                "another output does not. Clone the one that is a view."
            )
        if phase == "backward" and is_with_effects(node):
            raise Unsupported(
                f"{where(node)}: {node.args[1]} is a side effect within the backward, which is not planned. "
                "Call this op outside of the step, under torch.no_grad() if it needs no gradient."
            )
        pinned = self.step.pinned(node)
        for tensor in () if target is None or target.stores else held:
            size = as_allocated(tensor.nbytes, self.block_bytes)
            over.append(self._add_value(Value(f"{node.name}.{tensor.name}", size, None, "state")))
            self.held[over[-1]] = tensor
        starts = target is not None and target.begin is not None
        link = node.meta.get(LINK, "") if starts else ""  # not of what took its place
        options: Any = {"where": where(node), "overwrites": tuple(over), "link": link}
        read.update(dict.fromkeys(over))
        self.add(Op(node.name, target_name(node), tuple(read), outputs, phase, pinned, **options), node)

    def add_handed_in(self, name: str, nodes: Sequence[fx.Node], role: Role = "intermediate") -> tuple[int, ...]:
        """Add values made by others: numbers, by Dynamo, and gradients, by autograd, which holds them to the end."""
        values = tuple(v for n in nodes for v in self._add_values(n, len(self.ops), role))
        if values:
            self.add(Op(name, "autograd", (), values, "forward", "is handed in by autograd"))
        return values

    def read_at_return(self) -> tuple[int, ...]:
        """Values that the forward makes and its caller reads and frees at once.

        AOTAutograd copies some results into inputs that it cannot overwrite within the graph, such as a parameter whose
        ``.data`` is clamped. Dynamo reads numbers from others.
        """
        pairs = zip(self.step.forward_outputs, self.step.forward_descs, strict=True)
        results = [(n, desc) for n, desc in pairs if isinstance(n, fx.Node)]
        let_go = [n for n, desc in results if isinstance(desc, InputMutationAOTOutput) or hands_out_number(n)]
        shown = dict.fromkeys(v for n in let_go for v in self.values_of(n))
        outputs = {v for n, _ in results if n not in let_go for v in self.values_of(n)}
        return tuple(v for v in shown if v not in outputs and self.values[v].producer is not None)

    def results(self, tangents: Iterable[int], let_go: Collection[int]) -> tuple[int, ...]:
        """Values held to the end of the step: outputs, tangents, and gradients as autograd stores them.

        A gradient whose layout autograd does not accept for the parameter (`AccumulateGrad`) is copied; the copy is an
        op here, and the gradient is free after it.
        """
        # Pair gradients with their inputs, and add the copies.
        primals = [n for n in self.step.placeholders if _is_primal(n) and not any(map(is_with_effects, n.users))]
        pairs = [(g, p) for p, g in zip(primals, self.step.backward_outputs, strict=False) if isinstance(g, fx.Node)]
        stored = [v for g, p in pairs if obeys_layout(g.meta["val"], p.meta["val"]) for v in self.values_of(g)]
        for grad, primal in pairs:
            like = primal.meta["val"]
            if not obeys_layout(grad.meta["val"], like):
                size = as_allocated(like.numel() * like.element_size(), self.block_bytes)
                v = self._add_value(Value(f"{grad.name}.grad", size, len(self.ops)))
                name, read = f"{grad.name}_accumulate", self.values_of(grad)
                self.add(Op(name, "autograd", read, (v,), "backward", "is done by autograd"))
                stored.append(v)
        outputs = (v for n in leaf_nodes(self.step.forward_outputs) for v in self.values_of(n))
        held = dict.fromkeys((*(v for v in outputs if v not in let_go), *tangents, *stored))
        return tuple(v for v in held if self.values[v].producer is not None)
