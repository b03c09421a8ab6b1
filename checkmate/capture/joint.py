"""A traced training step, forward and backward in one `torch.fx` graph, read as ops and values.

AOTAutograd hands over the *joint* graph: functional but for a last block of ``copy_`` into the inputs that the step
overwrites. `read_joint` finds the storages in it (by the identity of the fake tensors' storages: schemas do not always
tell what aliases what), tells views from ops, forward from backward, and which ops must run exactly once and why.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.utils import is_with_effects
from torch._functorch.partitioners import (
    _extract_fwd_bwd_outputs,
    _has_tag_is_backward,
    _is_primal,
    is_sym_node,
)

from checkmate.capture import cudnn
from checkmate.capture.nodes import (
    COPIES_OF_STORAGES,
    ancestors,
    getitems,
    is_collective,
    is_mutating,
    is_random,
    is_view,
    leaf_nodes,
    storage,
    target_name,
    tensors,
    written,
)
from checkmate.capture.numbers import DRAW_BYTES, check_sizes, number_placeholders, refuse_read
from checkmate.capture.outside import after_tangent, let_go_of_unread, read_at_return
from checkmate.capture.patches.strides import obeys_layout
from checkmate.capture.provenance import where
from checkmate.capture.random_draws import save_state
from checkmate.capture.rewrite import prepare
from checkmate.core.graph import Graph, Op, Phase, Role, Value
from checkmate.errors import Unsupported

NUMBERS = "handed_in_numbers"  # the op that stands for them
_OUTSIDE_ITS_RUNNING_STATISTICS = {  # in training mode: what later ops read does not depend on the running statistics
    torch.ops.aten._native_batch_norm_legit_functional.default,
    cudnn.batch_norm,
}


@dataclass(frozen=True, eq=False)
class Joint:
    """A captured step: the fx graph, and what its nodes mean as ops and values."""

    module: fx.GraphModule  # the joint graph
    graph: Graph
    nodes: tuple[fx.Node | None, ...]  # for each op its node; None: stands for something autograd does
    value_of: dict[fx.Node, tuple[int, ...]]  # for each node, the values that its tensors are, or are views of
    faces: tuple[tuple[fx.Node, ...], ...]  # for each value, the nodes that name its producer's output directly
    numbers: Mapping[fx.Node, str]  # placeholders of numbers, with what Dynamo calls them
    placeholders: tuple[fx.Node, ...]
    forward_outputs: tuple[Any, ...]  # nodes or constants
    backward_outputs: tuple[Any, ...]
    forward_descs: tuple[Any, ...]
    backward_descs: tuple[Any, ...]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters, buffers and inputs, which stay with the caller."""
        return sum(value.size_bytes for value in self.graph.values if value.producer is None)

    @property
    def number_bytes(self) -> int:
        """Bytes of the tensors in which Dynamo hands in numbers."""
        return sum(self.graph.values[v].size_bytes for op in self.graph.ops if op.name == NUMBERS for v in op.outputs)


def read_joint(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_inputs: Iterable[int] = (),
    input_names: Sequence[str] = (),
    block_bytes: int = 1,
    on_cpu: bool = True,
    numbers: Mapping[int, str] = MappingProxyType({}),
    draws: Collection[int] = (),
) -> Joint:
    """Read a joint graph of AOTAutograd.

    Args:
        module: the joint graph; dropout is rewritten in it so that its mask can be kept and the rest recomputed.
        num_fwd_outputs: how many of its outputs belong to the forward.
        static_inputs: positions of the inputs that are parameters and buffers.
        input_names: what to call the inputs, by position in what was traced.
        block_bytes: the allocator rounds every size up to a multiple of these.
        on_cpu: the step is planned for the CPU: masks of dropout may be drawn again, convolutions are split.
        numbers: what Dynamo calls the inputs that are numbers, by position; see `checkmate.capture.numbers`.
        draws: positions of the inputs that are draws of Python's generator.

    Raises:
        NotFree: if a shape depends on such a number.
        Unsupported: for sizes that depend on data, ops that read draws of Python's generator, ops whose outputs alias
            only in part, and backward ops that read what the forward has overwritten.
    """
    prepare(module.graph, on_cpu=on_cpu)
    let_go_of_unread(module)
    reader = _Reader(module, num_fwd_outputs, frozenset(static_inputs), input_names, block_bytes, numbers, draws)
    check_sizes(module.graph, numbers, reader.name)
    return reader.read()


class _Reader:
    """The passes over a joint graph, in order; each fills what the next needs."""

    def __init__(
        self,
        module: fx.GraphModule,
        num_fwd_outputs: int,
        static_inputs: frozenset[int],
        input_names: Sequence[str],
        block_bytes: int,
        numbers: Mapping[int, str],
        draws: Collection[int],
    ) -> None:
        self.module = module
        self.numbers = number_placeholders(module.graph, numbers)
        self.draws = number_placeholders(module.graph, dict.fromkeys(draws, "a draw"))
        self.block_bytes = block_bytes
        self.nodes = list(module.graph.nodes)
        outputs = _extract_fwd_bwd_outputs(module, num_fwd_outputs=num_fwd_outputs)
        self.fwd_outputs, self.bwd_outputs, self.fwd_descs, self.bwd_descs = (tuple(part) for part in outputs)
        self.placeholders = [n for n in self.nodes if n.op == "placeholder"]
        self.static_inputs = static_inputs
        self.input_names = input_names
        self.value_by_storage: dict[int, int] = {}
        self.values: list[Value] = []
        self.faces: list[list[fx.Node]] = []
        self.ops: list[Op] = []
        self.op_nodes: list[fx.Node | None] = []

    def read(self) -> Joint:
        self.is_view = {n for n in self.nodes if is_view(n)}
        self.after_tangent = after_tangent(self.nodes)
        self.overwritten = self._overwritten()
        self._add_external_values()
        forward, backward = self._phases()
        refuse_read(self.draws)
        numbers = self._add_handed_in(NUMBERS, [n for n in (*self.numbers, *self.draws) if tensors(n.meta["val"])])
        for node in forward:
            self._add_op(node, "forward")
        self.let_go = self._made_only_by(read_at_return(self.fwd_outputs, self.fwd_descs))
        self._add_return((*numbers, *self.let_go))
        self.tangents = self._add_handed_in("tangents", [n for n in self.placeholders if n in self.after_tangent])
        for node in backward:
            self._add_op(node, "backward")
        results = self._results()
        return Joint(
            module=self.module,
            graph=Graph(tuple(self.ops), tuple(self.values), results),
            nodes=tuple(self.op_nodes),
            value_of={n: self._values_of(n) for n in self.nodes if n.op != "output"},
            faces=tuple(map(tuple, self.faces)),
            numbers=self.numbers,
            placeholders=tuple(self.placeholders),
            forward_outputs=self.fwd_outputs,
            backward_outputs=self.bwd_outputs,
            forward_descs=self.fwd_descs,
            backward_descs=self.bwd_descs,
        )

    def _overwritten(self) -> dict[int, str]:
        """Storages of inputs that the step overwrites, with their names."""
        names: dict[int, str] = {}
        for n in self.nodes:
            for target in written(n):
                for tensor in tensors(target.meta.get("val")):
                    names[storage(tensor)] = self.name(target)
        return names

    def _reads_overwritten(self, node: fx.Node) -> str | None:
        """The name of the overwritten input that this op reads and depends on."""
        if is_mutating(node):
            return None
        if node.target in _OUTSIDE_ITS_RUNNING_STATISTICS and node.args[5]:
            for statistics in leaf_nodes(node.args[3:5]):  # another call may overwrite them before the backward
                statistics.meta["saved_tensor_with_no_vc_check"] = True
            return None
        for a in node.all_input_nodes:
            for tensor in tensors(a.meta.get("val")):
                if storage(tensor) in self.overwritten:
                    return self.overwritten[storage(tensor)]
        return None

    def _phases(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The op nodes of the forward and of the backward, each in the order of first execution.

        What neither depends on a tangent nor is needed for the forward's results runs next to its first user in the
        backward: in the order of the joint graph it would force everything it reads to be there at once.
        """

        def is_op(n: fx.Node) -> bool:
            is_value = n not in self.is_view and n.target is not operator.getitem and not is_sym_node(n)
            return n.op == "call_function" and is_value

        def must_run_in_forward(n: fx.Node) -> bool:
            if not is_op(n) or n in self.after_tangent:
                return False
            return bool(self._pinned(n)) and not _has_tag_is_backward(n)

        forward = ancestors([*leaf_nodes(self.fwd_outputs), *filter(must_run_in_forward, self.nodes)])
        if clash := next((n for n in self.nodes if n in forward and n in self.after_tangent), None):
            raise Unsupported(f"{where(clash)}: {clash.name} of the forward depends on a gradient.")

        backward: dict[fx.Node, None] = {}

        def demand(root: fx.Node) -> None:
            stack = [root]
            while stack:
                n = stack[-1]
                missing = [a for a in n.all_input_nodes if a not in forward and a not in backward]
                if missing and n not in backward:
                    stack += reversed(missing)
                else:
                    backward.setdefault(stack.pop())

        needed = ancestors([*leaf_nodes(self.bwd_outputs), *(n for n in self.nodes if self._has_effect_in_backward(n))])
        for n in self.nodes:
            if n in needed and n in self.after_tangent:
                demand(n)
        for n in leaf_nodes(self.bwd_outputs):
            demand(n)
        in_forward = [n for n in self.nodes if n in forward and is_op(n)]
        in_backward = [n for n in backward if n not in forward and is_op(n)]
        for n in in_backward:
            if name := self._reads_overwritten(n):
                raise Unsupported(
                    f"{where(n)}: the backward reads {name}, which the forward overwrites in place. "
                    "Plain PyTorch refuses this too; write to a copy of it instead."
                )
        return in_forward, in_backward

    def _has_effect_in_backward(self, n: fx.Node) -> bool:
        return n.op == "call_function" and n in self.after_tangent and (is_mutating(n) or is_with_effects(n))

    def _add_external_values(self) -> None:
        """Parameters, buffers and inputs, once for each storage."""
        position = 0
        for n in self.nodes:
            if n in self.numbers or n in self.draws:
                position += 1
            elif n.op == "placeholder" and n not in self.after_tangent:
                role: Role = "input"
                if position in self.static_inputs:
                    role = "parameter" if n.meta["val"].requires_grad or self._has_gradient(position) else "buffer"
                position += _is_primal(n)
                self._add_values(n, None, role)
            elif n.op == "get_attr":
                self._add_values(n, None, "buffer")

    def _has_gradient(self, position: int) -> bool:
        return position < len(self.bwd_outputs) and isinstance(self.bwd_outputs[position], fx.Node)

    def _add_values(self, node: fx.Node, producer: int | None, role: Role) -> tuple[int, ...]:
        """A value for each storage that the node makes; its faces are the node itself or its getitems."""
        made: list[int] = []
        for i, tensor in enumerate(tensors(node.meta.get("val"))):
            key = storage(tensor)
            if key not in self.value_by_storage:
                v = self.value_by_storage[key] = len(self.values)
                name = self.name(node) if isinstance(node.meta["val"], torch.Tensor) else f"{node.name}[{i}]"
                self.values.append(Value(name, self._as_allocated(self._storage_bytes(node, tensor)), producer, role))
                self.faces.append([])
                made.append(v)
        faces = [node] if isinstance(node.meta.get("val"), torch.Tensor) else getitems(node)
        for face in faces:
            for v in self._values_of(face):
                if producer is None or v in made:
                    self.faces[v].append(face)
        return tuple(made)

    def _storage_bytes(self, node: fx.Node, tensor: torch.Tensor) -> int:
        if node in self.draws:
            return DRAW_BYTES
        if node.target in COPIES_OF_STORAGES:
            (part, *_) = leaf_nodes(node.args)
            (v,) = self._values_of(part)
            if tensor.stride() == part.meta["val"].stride():
                return self.values[v].size_bytes
        return tensor.untyped_storage().nbytes()

    def _as_allocated(self, size_bytes: int) -> int:
        return -(-size_bytes // self.block_bytes) * self.block_bytes

    def name(self, node: fx.Node) -> str:
        """What to call a node's value: an input as the user knows it, else as in the graph."""
        position = (
            getattr(node.meta.get("desc"), "idx", None) if node.op == "placeholder" and _is_primal(node) else None
        )
        return node.name if position is None or position >= len(self.input_names) else self.input_names[position]

    def _values_of(self, node: fx.Node) -> tuple[int, ...]:
        keys = dict.fromkeys(storage(t) for t in tensors(node.meta.get("val")))
        return tuple(self.value_by_storage[key] for key in keys if key in self.value_by_storage)

    def _add_op(self, node: fx.Node, phase: Phase) -> None:
        k = len(self.ops)
        read = dict.fromkeys(v for a in node.all_input_nodes for v in self._values_of(a))
        made = () if is_mutating(node) else self._add_values(node, k, "intermediate")
        aliased = [v for v in self._values_of(node) if v not in made]
        if aliased and not is_mutating(node):
            raise Unsupported(
                f"{where(node)}: an output of {node.target} shares memory with {self.values[aliased[0]].name}, "
                "another output does not. Clone the one that is a view."
            )
        if phase == "backward" and is_with_effects(node):
            raise Unsupported(
                f"{where(node)}: {node.args[1]} is a side effect within the backward, which is not planned. "
                "Call this op outside of the step, under torch.no_grad() if it needs no gradient."
            )
        pinned = self._pinned(node)
        self.ops.append(Op(node.name, target_name(node), tuple(read), made, phase, pinned, where(node)))
        self.op_nodes.append(node)

    def _pinned(self, node: fx.Node) -> str | None:
        """Why an op must run exactly once, in words."""
        if is_mutating(node):
            return "overwrites " + ", ".join(map(self.name, written(node)))
        if is_with_effects(node):
            return "has a side effect"
        if node.target is save_state:
            return "saves the random state before a draw"
        if is_random(node):
            return "draws random numbers"
        if is_collective(node):
            return "exchanges data with other ranks"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return "runs a subgraph"
        if name := self._reads_overwritten(node):
            return f"reads {name}, which the step overwrites"
        return None

    def _add_handed_in(self, name: str, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """What is made outside of the captured code, within the step: numbers before the forward, by Dynamo.

        And gradients between forward and backward, by autograd, which holds them to the end.
        """
        k = len(self.ops)
        made = [v for n in nodes for v in self._add_values(n, k, "tangent" if name == "tangents" else "intermediate")]
        if made:
            self.ops.append(Op(name, "autograd", (), tuple(made), "forward", "is handed in by autograd"))
            self.op_nodes.append(None)
        return tuple(made)

    def _made_only_by(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """Values that these results of the forward show and no others do, and that the step makes."""
        shown = dict.fromkeys(v for n in nodes for v in self._values_of(n))
        others = {v for n in leaf_nodes(self.fwd_outputs) if n not in nodes for v in self._values_of(n)}
        return tuple(v for v in shown if v not in others and self.values[v].producer is not None)

    def _add_return(self, held: Sequence[int]) -> None:
        """The caller of the forward holds some values until it has returned, but not for the backward."""
        if held:
            self.ops.append(Op("return", "autograd", tuple(held), (), "forward", "is done by autograd"))
            self.op_nodes.append(None)

    def _results(self) -> tuple[int, ...]:
        """Values that are held to the end of the step: outputs, tangents, and gradients as autograd stores them.

        A gradient whose layout autograd does not accept for the parameter (`AccumulateGrad`) is copied; the copy is an
        op here, and the gradient is free after it.
        """
        results = dict.fromkeys(v for n in leaf_nodes(self.fwd_outputs) for v in self._values_of(n))
        results = {v: None for v in results if v not in self.let_go}
        results.update(dict.fromkeys(self.tangents))
        primals = [n for n in self.placeholders if _is_primal(n) and not any(map(is_with_effects, n.users))]
        copied: list[tuple[fx.Node, torch.Tensor]] = []
        for primal, grad in zip(primals, self.bwd_outputs, strict=False):
            if not isinstance(grad, fx.Node):
                continue
            if obeys_layout(grad.meta["val"], primal.meta["val"]):
                results.update(dict.fromkeys(self._values_of(grad)))
            else:
                copied.append((grad, primal.meta["val"]))
        for grad, like in copied:
            k, v = len(self.ops), len(self.values)
            size = self._as_allocated(like.numel() * like.element_size())
            self.values.append(Value(f"{grad.name}.grad", size, k))
            self.faces.append([])
            copy = f"{grad.name}_accumulate"
            self.ops.append(Op(copy, "autograd", self._values_of(grad), (v,), "backward", "is done by autograd"))
            self.op_nodes.append(None)
            results[v] = None
        return tuple(v for v in results if self.values[v].producer is not None)
