"""A graph of a step that another tool has traced, read as a `Problem`: what it makes op by op, and in what time.

Nothing is captured here, and nothing rewritten: the nodes are the other tool's, in its order. Views are no ops. Where a
compiler fuses, no more is an op what it computes within its readers: such a node *melts* into each of them, and they
read what it reads. Inductor does that with pointwise ops whose readers stand near: no op that it does not fuse stands
in between, or else the kernels are two and the tensor is made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.device import as_allocated, main_device
from checkmate.capture.higher_order.table import runs_once
from checkmate.capture.nodes import (
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
from checkmate.capture.provenance import where
from checkmate.core.graph import Graph, Op, Phase, Value
from checkmate.core.problem import Problem, Profile
from checkmate.devices import kind_of
from checkmate.errors import Unsupported
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.roofline import roofline_seconds
from checkmate.torch_internals.trees import tree_leaves

aten = torch.ops.aten
Fuses = Callable[[fx.Node, fx.Node], bool]  # whether a compiler makes one kernel of an op and a reader

_UNKNOWN = 4096  # of a size that is left open, as PyTorch's partitioner takes it
_REDUCES = 4  # an op whose result has so many times fewer bytes than what it reads does not melt: it is dear, and small
_VIEWS = {aten._unsafe_view.default, aten.reshape.default, aten.detach.default, aten.alias.default}
_ESTIMATED_AS = {"cpu": "laptop"}  # else as an A100: what counts is how much longer products take than copies


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A step as ops and values, and the nodes that they stand for."""

    problem: Problem
    nodes: tuple[fx.Node | None, ...]  # for each op its node; None: stands for what the caller hands in

    def op_of(self) -> dict[fx.Node, int]:
        """The op that each node is."""
        return {node: k for k, node in enumerate(self.nodes) if node is not None}


def read_step(
    forward: Sequence[fx.Node],
    backward: Sequence[fx.Node],
    *,
    handed_in: Collection[fx.Node] = (),
    once: Callable[[fx.Node], str | None] = lambda node: None,
    fuses: Fuses | None = None,
    gathers_again: bool = False,
) -> StepGraph:
    """Read the nodes of a graph, placeholders and ops, but without its output node.

    Costs are estimated for the device that the tensors are on.

    Args:
        forward, backward: the nodes of each in the order in which they run; of ``forward`` also all inputs but
            ``handed_in``: gradients of results, which are there when the backward begins, and of no use after it.
        once: why an op must not run again, in words, beyond what can be seen; None where it may.
        fuses: of a compiler; without it each op makes its result.
        gathers_again: whether all-gathers may run again; all ranks must follow one plan then.

    Raises:
        Unsupported: if there is no op.
    """
    return _Reader(forward, backward, handed_in, once, fuses, gathers_again).read()


class _Reader:
    def __init__(
        self,
        forward: Sequence[fx.Node],
        backward: Sequence[fx.Node],
        handed_in: Collection[fx.Node],
        once: Callable[[fx.Node], str | None],
        fuses: Fuses | None,
        gathers_again: bool,
    ) -> None:
        self.forward, self.backward, self.handed_in = forward, backward, handed_in
        self.once, self.fuses, self.gathers_again = once, fuses, gathers_again
        self.place = {node: i for i, node in enumerate((*forward, *backward))}
        device = main_device(t for node in self.place for t in tensors(node.meta.get("val")))
        self.block_bytes = kind_of(device).block_bytes
        self.device = DEVICES[_ESTIMATED_AS.get(device.type, "a100")]
        self.values: list[Value] = []
        self.made: dict[fx.Node, tuple[int, ...]] = {}  # what each op and each input makes
        self.by_storage: dict[int, int] = {}
        self.shown: dict[fx.Node, tuple[int, ...]] = {}  # the values behind any node
        self.written = {  # storages that ops write to, with the place of the last that does
            storage(t): i for n, i in self.place.items() for w in written(n) for t in tensors(w.meta.get("val"))
        }
        hard = [self._is_op(n) and not self._may_fuse(n) for n in self.place]
        self.hard_before = [0, *accumulate(hard)]
        self.melted = {n for n in self.place if self._is_op(n) and self._melts(n)}

    def read(self) -> StepGraph:
        ops: list[Op] = []
        nodes: list[fx.Node | None] = []
        for node in self.forward:
            if node.op != "call_function":
                self._make(node, None)
        for phase, part in (("forward", self.forward), ("backward", self.backward)):
            if phase == "backward" and self.handed_in:
                made = tuple(v for n in self.handed_in for v in self._make(n, len(ops)))
                ops.append(Op("tangents", "autograd", (), made, "backward", "is handed in by autograd"))
                nodes.append(None)
            for node in part:
                if self._is_op(node) and node not in self.melted:
                    ops.append(self._op(node, phase, len(ops)))  # type: ignore[arg-type]
                    nodes.append(node)
        if not ops:
            raise Unsupported("The graph has no op to plan.")
        profile = Profile(
            [self._seconds(op, node) for op, node in zip(ops, nodes, strict=True)],  # type: ignore[arg-type]
            [0] * len(ops),  # type: ignore[arg-type]
            sum(value.size_bytes for value in self.values if value.producer is None),
            f"roofline estimate for {self.device.name}",
            estimated=tuple(range(len(ops))),
        )
        return StepGraph(Problem(Graph(tuple(ops), tuple(self.values), self._results()), profile), tuple(nodes))

    def _is_op(self, node: fx.Node) -> bool:
        is_call = node.op == "call_function" and node.target is not operator.getitem and not self._is_view(node)
        return is_call and bool(tensors(node.meta.get("val")) or is_mutating(node))

    def _is_view(self, node: fx.Node) -> bool:
        return node.target in _VIEWS or is_view(node)

    def _op(self, node: fx.Node, phase: Phase, k: int) -> Op:
        read = dict.fromkeys(v for a in node.all_input_nodes for v in self.behind(a))
        made = () if is_mutating(node) else self._make(node, k)
        inputs = tuple(v for v in read if v not in made)
        return Op(node.name, target_name(node), inputs, made, phase, self._pinned(node), where(node))

    def _pinned(self, node: fx.Node) -> str | None:
        if is_mutating(node):
            return f"{'draws random numbers' if is_random(node) else 'writes'} into what is there"
        if is_random(node):
            return "draws random numbers"
        if is_collective(node) and not (self.gathers_again and _gathers(node)):
            return "exchanges data with other ranks"
        if reason := runs_once(node):
            return reason
        if any(storage(t) in self.written for t in tensors(node.meta.get("val"))):
            return "makes what an op writes to"
        read = (storage(t) for a in node.all_input_nodes for t in tensors(a.meta.get("val")))
        if any(self.written.get(key, -1) > self.place[node] for key in read):
            return "reads what the step overwrites"
        return self.once(node)

    def _make(self, node: fx.Node, producer: int | None) -> tuple[int, ...]:
        made: list[int] = []
        for i, tensor in enumerate(tensors(node.meta.get("val"))):
            key = storage(tensor)
            known = self.by_storage.get(key)
            if known is not None and (producer is None or known in made):
                made.append(known)
                continue
            size = as_allocated(_number(tensor.untyped_storage().nbytes()), self.block_bytes)
            self.by_storage[key] = len(self.values)
            made.append(len(self.values))
            role = "intermediate" if producer is not None else "input"
            name = node.name if len(tensors(node.meta.get("val"))) == 1 else f"{node.name}[{i}]"
            self.values.append(Value(name, size, producer, role))  # type: ignore[arg-type]
        self.made[node] = tuple(dict.fromkeys(made))
        return self.made[node]

    def behind(self, node: fx.Node) -> tuple[int, ...]:
        """The values that a reader of a node reads."""
        if node in self.made:
            return self.made[node]
        if node not in self.shown:
            values = [v for a in node.all_input_nodes for v in self.behind(a)]
            if node.target is operator.getitem:
                own = [self.by_storage.get(storage(t)) for t in tensors(node.meta.get("val"))]
                values = [v for v in own if v in values] or values
            elif self._is_view(node):
                values = [*self.behind(node.all_input_nodes[0])] if node.all_input_nodes else []
            elif is_mutating(node):
                values = [v for target in written(node) for v in self.behind(target)]
            self.shown[node] = tuple(dict.fromkeys(values))
        return self.shown[node]

    def _results(self) -> tuple[int, ...]:
        graph = next(iter(self.place)).graph
        (output,) = graph.find_nodes(op="output")
        shown = dict.fromkeys(v for n in leaf_nodes(tree_leaves(output.args)) for v in self.behind(n))
        return tuple(v for v in shown if self.values[v].producer is not None)

    def _seconds(self, op: Op, node: fx.Node | None) -> float:
        if node is None:
            return 0.0
        if self._may_fuse(node):
            moved = sum(self.values[v].size_bytes for v in {*op.inputs, *op.outputs})
            return self.device.seconds(0, "float32", moved)
        try:
            return roofline_seconds(node, self.device)
        except (Unsupported, KeyError, TypeError, IndexError, AttributeError, ValueError):
            moved = sum(self.values[v].size_bytes for v in {*op.inputs, *op.outputs})
            return self.device.seconds(0, "float32", moved)

    def _may_fuse(self, node: fx.Node) -> bool:
        return self.fuses is not None and self.fuses(node, node)

    def _melts(self, node: fx.Node) -> bool:
        """Whether a compiler computes it within its readers, which stand near where they are of the same half."""
        if self.fuses is None or not self._may_fuse(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if is_random(node) or is_mutating(node) or self.once(node) or storage(node.meta["val"]) in self.written:
            return False
        read = sum(_bytes_of(a) for a in node.all_input_nodes)
        if _bytes_of(node) * _REDUCES < read:
            return False
        half = (
            range(len(self.forward))
            if self.place[node] < len(self.forward)
            else range(len(self.forward), len(self.place))
        )
        readers = [*self._readers(node)]
        if not readers or not all(n.op == "call_function" and self.fuses(node, n) for n in readers):
            return False
        last = max((self.place[n] for n in readers if self.place.get(n, -1) in half), default=self.place[node])
        return self.hard_before[last] == self.hard_before[self.place[node]]

    def _readers(self, node: fx.Node) -> Iterable[fx.Node]:
        for user in node.users:
            if user in self.place and user.op == "call_function" and self._is_view(user):
                yield from self._readers(user)
            elif user in self.place or user.op == "output":
                yield user


def _gathers(node: fx.Node) -> bool:
    """An all-gather, or the wait for one."""
    waits = str(node.target).startswith("_c10d_functional.wait_tensor")
    origin = node.args[0] if waits else node
    return isinstance(origin, fx.Node) and str(origin.target).startswith("_c10d_functional.all_gather_into_tensor")


def _bytes_of(node: fx.Node) -> int:
    return sum(_number(t.numel()) * t.element_size() for t in tensors(node.meta.get("val")))


def _number(size: Any) -> int:
    """A size, of one that is left open what it was when the step was traced."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else _UNKNOWN
