"""A traced training step, forward and backward in one `torch.fx` graph, read as ops and values.

AOTAutograd hands over the *joint* graph: functional but for a last block of ``copy_`` into the inputs that the step
overwrites. `read_joint` finds the storages in it (by the identity of the fake tensors' storages: schemas do not always
tell what aliases what), tells views from ops, forward from backward, and which ops must run exactly once and why.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._functorch._aot_autograd.utils import is_with_effects
from torch._functorch.partitioners import (
    _extract_fwd_bwd_outputs,
    _has_tag_is_backward,
    _is_backward_state,
    _is_bwd_seed_offset,
    _is_primal,
    _is_tangent,
    _must_be_in_backward,
    is_sym_node,
)

from checkmate.errors import Unsupported
from checkmate.graph import Graph, Op, Phase, Role, Value
from checkmate.provenance import where
from checkmate.rewrite import draw_mask, prepare

_OUTSIDE_ITS_RUNNING_STATISTICS = {  # in training mode: what later ops read does not depend on the running statistics
    torch.ops.aten._native_batch_norm_legit_functional.default,
}


@dataclass(frozen=True, eq=False)
class Joint:
    """A captured step: the fx graph, and what its nodes mean as ops and values."""

    module: fx.GraphModule  # the joint graph
    graph: Graph
    nodes: tuple[fx.Node | None, ...]  # for each op its node; None: stands for something autograd does
    value_of: dict[fx.Node, tuple[int, ...]]  # for each node, the values that its tensors are, or are views of
    faces: tuple[tuple[fx.Node, ...], ...]  # for each value, the nodes that name its producer's output directly
    placeholders: tuple[fx.Node, ...]
    forward_outputs: tuple[Any, ...]  # nodes or constants
    backward_outputs: tuple[Any, ...]
    forward_descs: tuple[Any, ...]
    backward_descs: tuple[Any, ...]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters, buffers and inputs, which stay with the caller."""
        return sum(value.size_bytes for value in self.graph.values if value.producer is None)


def read_joint(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_inputs: Iterable[int] = (),
    input_names: Sequence[str] = (),
) -> Joint:
    """Read a joint graph of AOTAutograd.

    Args:
        module: the joint graph; dropout is rewritten in it so that its mask can be kept and the rest recomputed.
        num_fwd_outputs: how many of its outputs belong to the forward.
        static_inputs: positions of the inputs that are parameters and buffers.
        input_names: what to call the inputs, by position in what was traced.

    Raises:
        Unsupported: for sizes that depend on data, ops whose outputs alias only in part, and backward ops that read
            what the forward has overwritten.
    """
    prepare(module.graph)
    return _Reader(module, num_fwd_outputs, frozenset(static_inputs), input_names).read()


class _Reader:
    """The passes over a joint graph, in order; each fills what the next needs."""

    def __init__(
        self, module: fx.GraphModule, num_fwd_outputs: int, static_inputs: frozenset[int], input_names: Sequence[str]
    ) -> None:
        self.module = module
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
        for node in self.nodes:
            if node.op != "output" and is_sym_node(node):
                raise Unsupported(f"{where(node)}: {node.name} is a size that depends on data; sizes must be fixed.")
        self.is_view = {n for n in self.nodes if _is_view(n)}
        self.after_tangent = self._after_tangent()
        self.overwritten = self._overwritten()
        self._add_external_values()
        forward, backward = self._phases()
        for node in forward:
            self._add_op(node, "forward")
        self._add_tangents()
        for node in backward:
            self._add_op(node, "backward")
        results = self._results()
        return Joint(
            module=self.module,
            graph=Graph(tuple(self.ops), tuple(self.values), results),
            nodes=tuple(self.op_nodes),
            value_of={n: self._values_of(n) for n in self.nodes if n.op != "output"},
            faces=tuple(map(tuple, self.faces)),
            placeholders=tuple(self.placeholders),
            forward_outputs=self.fwd_outputs,
            backward_outputs=self.bwd_outputs,
            forward_descs=self.fwd_descs,
            backward_descs=self.bwd_descs,
        )

    def _after_tangent(self) -> set[fx.Node]:
        """Nodes that depend on an incoming gradient, or were put into the backward by hand."""
        found: set[fx.Node] = set()
        for n in self.nodes:
            handed_in = n.op == "placeholder" and (_is_tangent(n) or _is_bwd_seed_offset(n) or _is_backward_state(n))
            if handed_in or _must_be_in_backward(n) or any(a in found for a in n.all_input_nodes):
                found.add(n)
        return found

    def _overwritten(self) -> dict[int, str]:
        """Storages of inputs that the step overwrites, with their names."""
        written: dict[int, str] = {}
        for n in self.nodes:
            for target in _written(n):
                for tensor in _tensors(target.meta.get("val")):
                    written[_storage(tensor)] = self._name(target)
        return written

    def _reads_overwritten(self, node: fx.Node) -> str | None:
        """The name of the overwritten input that this op reads and depends on."""
        if _is_mutating(node):
            return None
        if node.target in _OUTSIDE_ITS_RUNNING_STATISTICS and node.args[5]:
            return None
        for a in node.all_input_nodes:
            for tensor in _tensors(a.meta.get("val")):
                if _storage(tensor) in self.overwritten:
                    return self.overwritten[_storage(tensor)]
        return None

    def _phases(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The op nodes of the forward and of the backward, each in the order of first execution.

        What neither depends on a tangent nor is needed for the forward's results runs next to its first user in the
        backward: in the order of the joint graph it would force everything it reads to be there at once.
        """

        def is_op(n: fx.Node) -> bool:
            return n.op == "call_function" and n not in self.is_view and n.target is not operator.getitem

        def must_run_in_forward(n: fx.Node) -> bool:
            if not is_op(n) or n in self.after_tangent:
                return False
            return bool(self._pinned(n)) and not _has_tag_is_backward(n)

        forward = _ancestors([*_nodes(self.fwd_outputs), *filter(must_run_in_forward, self.nodes)])
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

        needed = _ancestors([*_nodes(self.bwd_outputs), *(n for n in self.nodes if self._has_effect_in_backward(n))])
        for n in self.nodes:
            if n in needed and n in self.after_tangent:
                demand(n)
        for n in _nodes(self.bwd_outputs):
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
        return n.op == "call_function" and n in self.after_tangent and (_is_mutating(n) or is_with_effects(n))

    def _add_external_values(self) -> None:
        """Parameters, buffers and inputs, once for each storage."""
        position = 0
        for n in self.nodes:
            if n.op == "placeholder" and n not in self.after_tangent:
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
        for i, tensor in enumerate(_tensors(node.meta.get("val"))):
            key = _storage(tensor)
            if key not in self.value_by_storage:
                v = self.value_by_storage[key] = len(self.values)
                name = self._name(node) if isinstance(node.meta["val"], torch.Tensor) else f"{node.name}[{i}]"
                self.values.append(Value(name, tensor.untyped_storage().nbytes(), producer, role))
                self.faces.append([])
                made.append(v)
        faces = [node] if isinstance(node.meta.get("val"), torch.Tensor) else _getitems(node)
        for face in faces:
            for v in self._values_of(face):
                if producer is None or v in made:
                    self.faces[v].append(face)
        return tuple(made)

    def _name(self, node: fx.Node) -> str:
        """What to call a node's value: an input as the user knows it, else as in the graph."""
        position = (
            getattr(node.meta.get("desc"), "idx", None) if node.op == "placeholder" and _is_primal(node) else None
        )
        return node.name if position is None or position >= len(self.input_names) else self.input_names[position]

    def _values_of(self, node: fx.Node) -> tuple[int, ...]:
        keys = dict.fromkeys(_storage(t) for t in _tensors(node.meta.get("val")))
        return tuple(self.value_by_storage[key] for key in keys if key in self.value_by_storage)

    def _add_op(self, node: fx.Node, phase: Phase) -> None:
        k = len(self.ops)
        read = dict.fromkeys(v for a in node.all_input_nodes for v in self._values_of(a))
        made = () if _is_mutating(node) else self._add_values(node, k, "intermediate")
        aliased = [v for v in self._values_of(node) if v not in made]
        if aliased and not _is_mutating(node):
            raise Unsupported(
                f"{where(node)}: an output of {node.target} shares memory with {self.values[aliased[0]].name}, "
                "another output does not. Clone the one that is a view."
            )
        pinned = self._pinned(node)
        self.ops.append(Op(node.name, str(node.target), tuple(read), made, phase, pinned, where(node)))
        self.op_nodes.append(node)

    def _pinned(self, node: fx.Node) -> str | None:
        """Why an op must run exactly once, in words."""
        if _is_mutating(node):
            return "overwrites " + ", ".join(map(self._name, _written(node)))
        if is_with_effects(node):
            return "has a side effect"
        if _is_random(node):
            return "draws random numbers"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return "runs a subgraph"
        if name := self._reads_overwritten(node):
            return f"reads {name}, which the step overwrites"
        return None

    def _add_tangents(self) -> None:
        """The incoming gradients: made between forward and backward, and held by autograd to the end."""
        tangents = [n for n in self.placeholders if n in self.after_tangent]
        k = len(self.ops)
        made = [v for n in tangents for v in self._add_values(n, k, "tangent")]
        self.tangents = tuple(made)
        if made:
            self.ops.append(Op("tangents", "autograd", (), self.tangents, "forward", "is handed in by autograd"))
            self.op_nodes.append(None)

    def _results(self) -> tuple[int, ...]:
        """Values that are held to the end of the step: outputs, tangents, and gradients as autograd stores them.

        A gradient whose layout autograd does not accept for the parameter (`AccumulateGrad`) is copied; the copy is an
        op here, and the gradient is free after it.
        """
        results = dict.fromkeys(v for n in _nodes(self.fwd_outputs) for v in self._values_of(n))
        results.update(dict.fromkeys(self.tangents))
        primals = [n for n in self.placeholders if _is_primal(n)]
        copied: list[tuple[fx.Node, torch.Tensor]] = []
        for primal, grad in zip(primals, self.bwd_outputs, strict=False):
            if not isinstance(grad, fx.Node):
                continue
            if _obeys_layout(grad.meta["val"], primal.meta["val"]):
                results.update(dict.fromkeys(self._values_of(grad)))
            else:
                copied.append((grad, primal.meta["val"]))
        for grad, like in copied:
            k, v = len(self.ops), len(self.values)
            self.values.append(Value(f"{grad.name}.grad", like.numel() * like.element_size(), k))
            self.faces.append([])
            self.ops.append(
                Op(
                    f"{grad.name}_accumulate",
                    "autograd",
                    self._values_of(grad),
                    (v,),
                    "backward",
                    "is done by autograd",
                )
            )
            self.op_nodes.append(None)
            results[v] = None
        return tuple(v for v in results if self.values[v].producer is not None)


def _obeys_layout(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether autograd takes a gradient as it is: the parameter's strides where that is dense, else contiguous."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        same = zip(grad.shape, grad.stride(), parameter.stride(), strict=True)
        return all(a == b for size, a, b in same if size != 1)
    return grad.is_contiguous()


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return found


def _nodes(leaves: Sequence[Any]) -> list[fx.Node]:
    return [n for n in leaves if isinstance(n, fx.Node)]


def _tensors(val: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(val) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _getitems(node: fx.Node) -> list[fx.Node]:
    """The nodes that name one output tensor of a node, through nested getitems."""
    found = []
    for user in node.users:
        if user.target is operator.getitem:
            found += [user] if isinstance(user.meta.get("val"), torch.Tensor) else _getitems(user)
    return found


def _is_view(node: fx.Node) -> bool:
    """All its tensors live in storages of its inputs, and it writes nothing; getitems are views of their source."""
    if node.op != "call_function" or _is_mutating(node):
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    inputs = {_storage(t) for a in node.all_input_nodes for t in _tensors(a.meta.get("val"))}
    outputs = _tensors(node.meta.get("val"))
    return bool(outputs) and all(_storage(t) in inputs for t in outputs)


def _is_mutating(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an op writes to."""
    if node.op != "call_function" or not _is_mutating(node):
        return []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = [*zip((a.name for a in arguments), node.args, strict=False), *node.kwargs.items()]
    writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return [n for name, arg in given if name in writes for n in _nodes(pytree.tree_leaves(arg))]


def _is_random(node: fx.Node) -> bool:
    """Draws from a generator. Attention ops carry the tag even where their dropout probability is zero."""
    if node.target is draw_mask:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            p = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(p != 0.0)
    return True
