"""Properties of a node of a graph, from its fake tensors and schema: view, write, random draw, dependencies."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.patches.results import strides as layouts
from checkmate.capture.random_draws import DRAWS, draws
from checkmate.torch_internals.running import OpOverload, tree_leaves

Reads = Callable[[fx.Node], Iterable[fx.Node]]  # the arguments that a node reads
LINK = "checkmate_link"  # in the meta of a node: what carries it beside other ops, as in `Op.link`
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem")
COPIES_OF_STORAGES = {  # given a part of a storage, they copy all of it; a cached fake result has lost the rest
    getattr(torch.ops.aten, name).default
    for name in ("copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
}
LOSSES = {  # their kernels make the sum or mean of the terms within the storage of all terms, and keep that
    getattr(torch.ops.aten, name).default
    for name in ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
}


@dataclass(frozen=True, eq=False, repr=False)  # in the text of a graph, which shows no data
class Held:
    """A tensor that an op overwrites and that is no argument of it: a state of an optimizer, a sum of gradients."""

    name: str
    nbytes: int
    parameter: torch.Tensor  # that it belongs to
    get: Callable[[], torch.Tensor | None]  # it as it is now; None: there is none
    put: Callable[[torch.Tensor], None]  # put another tensor in its place


@dataclass(frozen=True, eq=False)
class PlannedOp:
    """A function as an op of the graph that is measured by another one: an update, an exchange with other ranks."""

    name: str
    run: Callable[..., Any]  # what a graph calls
    rehearsal: Callable[[], Callable[..., Any]]  # makes a function that costs the same and leaves everything as it is
    does: str | None = None  # beside its results, with a place for its second argument, a parameter; it then runs once
    overwrites: tuple[int, ...] = ()  # positions of the arguments that it overwrites
    held: Callable[[], Sequence[Held]] = tuple  # what it overwrites beside arguments
    stores: bool = False  # its result is what it holds
    out: tuple[int, ...] = ()  # positions of those over which it may write its first result, as ``out=``
    moved: int = 0  # bytes beside its arguments and results
    workspace: Callable[[], int] = lambda: 0  # bytes that it makes on its way, where they are not measured
    begin: Callable[..., Any] | None = None  # of a collective: launches it, and gives what `run` waits for
    namespace: str = "checkmate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op."""
        return self.run(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


def rehearsed(target: Any) -> Callable[..., Any]:
    """A function that costs what a target does, and leaves everything as it is."""
    return target.rehearsal() if isinstance(target, PlannedOp) else target


def ancestors(roots: Iterable[fx.Node], until: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes and their ancestors, except some nodes and the ancestors of these."""
    nodes: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        n = stack.pop()
        if n not in nodes and n not in until:
            nodes.add(n)
            stack += n.all_input_nodes
    return nodes


def call(
    origin: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    name: str | None = None,
    val: Any = None,
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Insert a call into the graph, with the provenance of another node; ``val``: its fake result, if known."""
    kwargs = dict(kwargs or {})
    node = origin.graph.create_node("call_function", target, args, kwargs, name)
    if val is None:
        fakes, options = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with tensors(fakes)[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            val = rehearsed(target)(*fakes, **options)
    node.meta = {key: value for key, value in origin.meta.items() if key != "tensor_meta"} | {"val": val}
    return node


def leaf_nodes(leaves: Sequence[Any]) -> list[fx.Node]:
    """The nodes among arguments or outputs, which may be constants."""
    return [n for n in leaves if isinstance(n, fx.Node)]


def tensors(val: Any) -> list[torch.Tensor]:
    """The tensors in a fake result, however nested."""
    if isinstance(val, torch.Tensor):  # as most are
        return [val]
    if val is None or type(val) in (list, tuple):
        return [] if val is None else [tensor for part in val for tensor in tensors(part)]
    return [leaf for leaf in tree_leaves(val) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def storages(*nodes: fx.Node) -> list[int]:
    """The storages of the nodes' tensors, in order; one may be repeated."""
    return [storage(t) for node in nodes for t in tensors(node.meta.get("val"))]


def input_position(node: fx.Node) -> int | None:
    """The position of a joint graph's placeholder among the traced inputs; None if it is no input."""
    return getattr(node.meta.get("desc"), "idx", None)


def viewed(node: fx.Node) -> fx.Node:
    """The node at the root of a chain of views; a node that is no view itself."""
    while node.op == "call_function" and is_view(node):
        (node, *_) = node.all_input_nodes
    return node


def target_name(node: fx.Node) -> str:
    """The name of a node's target, equal in every process: ``aten.mm.default``, ``checkmate.draw_mask``."""
    if isinstance(node.target, types.FunctionType) and called(node) is node.target:
        return f"{node.target.__module__.partition('.')[0]}.{node.target.__name__}"
    op = called(node)
    return _name_of(op) if isinstance(op, OpOverload) else str(op)


@cache
def _name_of(op: OpOverload) -> str:
    return str(op)


def called(node: fx.Node) -> Any:
    """The target of a node, or of the node behind a copy."""
    return node.args[0] if node.target in (layouts.write_copy, layouts.draw_copy) else node.target


def getitems(node: fx.Node) -> list[fx.Node]:
    """The nodes that name one output tensor of a node, through nested getitems."""
    results = []
    for user in node.users:
        if user.target is operator.getitem:
            results += [user] if isinstance(user.meta.get("val"), torch.Tensor) else getitems(user)
    return results


def is_view(node: fx.Node) -> bool:
    """Tell whether all its tensors share storages with its inputs and it writes nothing; getitems are views too."""
    if node.op != "call_function" or is_mutating(node):
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    outputs = storages(node)
    return bool(outputs) and {*outputs} <= {*storages(*node.all_input_nodes)}


def is_mutating(node: fx.Node) -> bool:
    """Tell whether it writes to an argument."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def written(node: fx.Node) -> list[fx.Node]:
    """The argument nodes that an op writes to."""
    if node.op != "call_function" or not is_mutating(node):
        return []
    return leaf_nodes(layouts.written(node.target, node.args, node.kwargs))


def updated(node: fx.Node) -> list[fx.Node]:
    """The parameters that an update overwrites; none for other ops.

    Unlike what the step itself overwrites, a parameter is read by ops of the step, all before its update.
    """
    return leaf_nodes([node.args[i] for i in node.target.overwrites]) if isinstance(node.target, PlannedOp) else []


def done_with_gradients(node: fx.Node) -> str | None:
    """The words for what an op does beside its results, with a place for the parameter's name; None for other ops."""
    return node.target.does if isinstance(node.target, PlannedOp) else None


def has_effect(node: fx.Node) -> bool:
    """Tell whether it has an effect, so that it must stay even if unread."""
    return node.is_impure() or is_random(node) or is_mutating(node) or bool(done_with_gradients(node))


def is_random(node: fx.Node) -> bool:
    """Tell whether it draws from a generator."""
    op = called(node)
    return node.target in DRAWS or (isinstance(op, OpOverload) and draws(op, node.args, node.kwargs))


def is_convolution(node: fx.Node) -> bool:
    """Tell whether it is a convolution, or the gradient of one."""
    return node.op == "call_function" and "convolution" in target_name(node)


def is_collective(node: fx.Node) -> bool:
    """Tell whether it communicates with other ranks, or waits for that."""
    return isinstance(node.target, (OpOverload, PlannedOp)) and node.target.namespace in _COLLECTIVES


# Of Dynamo's graph: what a node depends on.


def up_to(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes of the graph in order, up to this one."""
    for n in node.graph.nodes:
        yield n
        if n is node:
            return


def needed_by(node: fx.Node, reads: Reads = lambda n: n.all_input_nodes) -> set[fx.Node]:
    """The node, the nodes it is computed from, and earlier writes to any of them."""
    needed, memory = set[fx.Node](), set[int]()
    writers = [n for n in up_to(node) if is_write(n)]
    todo = [node]
    while todo:
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                memory.update(memory_of(n))
                todo += reads(n)
        todo = [n for n in writers if n not in needed and any(memory_of(a) & memory for a in written_by(n))]
    return needed


def is_write(node: fx.Node) -> bool:
    """Tell whether the name of a function or method says that it writes; `guards.evaluate` finds other writes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        node.target is operator.setitem
        or (getattr(operator, name, None) is node.target and name.startswith("i"))  # iadd
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("out") is not None
        or bool(node.kwargs.get("inplace"))
    )


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node may write to, if it `is_write`."""
    out = tree_leaves(node.kwargs.get("out"))
    return [a for a in (*node.args[:1], *out) if isinstance(a, fx.Node)]


def memory_of(node: fx.Node) -> set[int]:
    """The storages of a node's tensors, from Dynamo's fake tensors."""
    return {storage(t) for t in tensors(node.meta.get("example_value")) if t.layout is torch.strided}
