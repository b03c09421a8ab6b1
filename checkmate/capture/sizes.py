"""Sizes that change from call to call, as inputs of a captured step.

Dynamo and AOTAutograd trace such a step once, with symbols in place of these sizes. The sizes of a call are put into
the joint graph, and all that comes behind, from the rewrites to the code, is for a graph of fixed sizes, as if it had
been traced for that call: no rule, no simulator and no solver sees a symbol.

The numbers of a graph are computed by the functions that the step calls, and not by algebra, which may round otherwise:
1 / sqrt(n), say. Sizes are whole numbers, of which algebra is exact; one that a float takes part in has to be computed
by such a function: int(0.5 * n). Where algebra rounds it otherwise, guards do, too: such a call is captured by itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from checkmate.capture.nodes import storage
from checkmate.capture.number_inputs import NotFree, Number
from checkmate.capture.patches.kernels import value_of
from checkmate.capture.provenance import source_name, where
from checkmate.capture.rewrite import Unwritten
from checkmate.torch_internals.capturing import FakeTensor, FakeTensorMode, _is_primal, is_sym_node
from checkmate.torch_internals.running import tree_map

aten = torch.ops.aten
Sizes = tuple[int, ...]  # of a call, in the order of the inputs that stand for them
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OtherStep(NotFree):
    """Raised if sizes cannot be inputs for what was captured at others."""


def open_sizes(graph: fx.Graph, numbers: Collection[fx.Node] = ()) -> dict[int, int]:
    """The sizes among the inputs of a joint graph: positions, and their values in the trace.

    The offset of a view in its storage is such an input, too, and is left out where no op reads it. ``numbers`` are
    inputs that count as sizes only where a shape has them.
    """
    primals = _primals(graph)
    values = [node.meta["val"] for node in primals]
    in_shapes = {n.node.expr for n in symbols_of(graph)}
    return {
        i: value_of(val)
        for i, (node, val) in enumerate(zip(primals, values, strict=True))
        if isinstance(val, torch.SymInt) and ((node.users and node not in numbers) or val.node.expr in in_shapes)
    }


def symbols_of(graph: fx.Graph) -> list[torch.SymInt]:
    """The symbols in the shapes, strides and bytes of a joint graph's inputs; tracing may have fixed some since."""
    tensors = [val for node in _primals(graph) if isinstance(val := node.meta["val"], torch.Tensor)]
    numbers = [n for t in tensors for n in (*t.shape, *t.stride(), t.untyped_storage().nbytes())]
    return [n for n in numbers if isinstance(n, torch.SymInt)]


def fixed_at(env: Any) -> str | None:
    """The line that has fixed the first of the open sizes, by PyTorch's record of shapes; None: no line has."""
    return next(map(_line, env.replacements_slocs.values()), None)


def _line(location: Any) -> str:
    """The line of code that asked for a size, in one sentence's words."""
    line = re.match(r"(?P<code>.*?) *# (?P<file>\S+):(?P<number>\d+) in ", str(location.maybe_user_loc))
    return f"{source_name(line['file'])}:{line['number']}, {line['code']}" if line else str(location)


def check_answers(graph: fx.Graph, sizes: Mapping[int, int], numbers: Mapping[fx.Node, Number]) -> None:
    """Check that tracing would have been told the same of other sizes, and of other numbers.

    Args:
        graph: that was traced.
        sizes: by the positions of those that are open, as `open_sizes` lists them.
        numbers: for nodes that are inputs, too.

    Raises:
        NotFree: if PyTorch has fixed a size, after all.
        OtherStep: if with these sizes another step is traced.
    """
    primals = _primals(graph)
    values = [primals[i].meta["val"] for i in sizes]
    for value in (*values, *symbols_of(graph)):
        env = value.node.shape_env
        if value.node.expr.is_number or not values:
            raise NotFree(f"PyTorch traces it for one size only: {fixed_at(env)}")
    number_of = {**numbers, **{primals[i]: size for i, size in sizes.items()}}
    exprs = {node.meta["val"].node.expr: number for node, number in number_of.items()}
    symbols = {expr: number for expr, number in exprs.items() if not expr.is_number}
    for guard in env.guards:
        if guard.expr.xreplace(symbols) == sympy.false:
            on = "a size or number" if numbers else "the size"
            raise OtherStep(f"what is computed depends on {on}: {_line(guard.sloc)}")


def _primals(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="placeholder") if _is_primal(node)]


def put_in(
    module: fx.GraphModule, sizes: Sizes, inputs: Sequence[Any] | None = None, numbers: Collection[fx.Node] = ()
) -> fx.GraphModule:
    """The joint graph of fixed sizes that a graph with open sizes stands for.

    Args:
        module: the joint graph; it stays as it is.
        sizes: for those that are open, as `open_sizes` lists them.
        inputs: of a call of these sizes; None: as they were when the graph was traced.
        numbers: inputs that stay open; some may be sizes, as for `open_sizes`.

    Raises:
        NotFree: if a size is computed with a number, or by way of a float that cannot be followed.
    """
    primals = _primals(module.graph)
    input_of = dict(zip(primals, [None] * len(primals) if inputs is None else inputs, strict=True))
    places = open_sizes(module.graph, numbers)
    free = {*numbers}.difference(primals[i] for i in places)  # and all that are computed from these
    symbols = {n: x for n, x in input_of.items() if isinstance(n.meta["val"], torch.SymInt) and n not in free}
    number_of = {n: value_of(n.meta["val"]) if x is None else x for n, x in symbols.items()}
    number_of |= {primals[i]: size for i, size in zip(places, sizes, strict=True)}
    fixed = _Fixed({n.meta["val"].node.expr: number for n, number in number_of.items()})
    graph = fx.Graph()
    become = dict[fx.Node, Any]()  # a node of the new graph, or a number
    for node in module.graph.nodes:
        val = node.meta.get("val")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), become.__getitem__)
        if is_sym_node(node) and not free.isdisjoint((node, *node.all_input_nodes)):
            free.add(node)
        elif node.op == "call_function" and is_sym_node(node):
            is_of_tensor = any(isinstance(arg, fx.Node) for arg in args)
            become[node] = fixed.number(val, node) if is_of_tensor else node.target(*args, **kwargs)
            if type(become[node]) is int and isinstance(val, torch.SymInt):
                fixed.rounded(val, become[node], node)
            continue
        # A part that is all of a tensor is that tensor, as it is in a graph that is traced for these sizes. Where it is
        # all at any size, and no index of Python's such as x[:], it is an op there, too.
        if node.target in (aten.slice.Tensor, aten.slice_backward.default):
            whole = node.args[0].meta["val"]
            shape, of_whole = ([fixed.number(n, node) for n in t.shape] for t in (val, whole))
            is_always = sys.maxsize not in node.args and _expressions(val.shape) == _expressions(whole.shape)
            if shape == of_whole and not is_always:
                become[node] = args[0]
                if node.target is aten.slice_backward.default:
                    fixed.share(val, whole)
                continue
        # Inputs as they are, and all else as it is described.
        new = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = {key: value for key, value in node.meta.items() if key != "tensor_meta"}
        if node in input_of and isinstance(val, torch.Tensor):
            new.meta["val"] = fixed.input(val, input_of[node], node)
        elif isinstance(val, torch.Tensor):
            new.meta["val"] = fixed.described(val, node)
        elif "val" in node.meta and node not in free:
            new.meta["val"] = tree_map(lambda leaf, n=node: fixed.described(leaf, n), val)
        become[node] = number_of.get(node, new)
    result = Unwritten(module, graph)
    result.meta.update(module.meta)
    return result


def _expressions(shape: Sequence[Any]) -> list[Any]:
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in shape]


class _Fixed:
    """Numbers and fake tensors in place of symbols and of tensors whose sizes are symbols."""

    def __init__(self, sizes: Mapping[sympy.Expr, int]) -> None:
        self._sizes = sizes
        self._rounded = dict[sympy.Expr, sympy.Integer]()  # whole numbers that are computed with floats
        self._numbers = dict[Any, Any]()
        self._storages = dict[int, torch.UntypedStorage]()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.cache_enabled = False  # the cache of fake results keeps those of all sizes

    def number(self, value: Any, node: fx.Node) -> Any:
        """The number that a symbolic one stands for; others unchanged."""
        if type(value) is int or not isinstance(value, SYMBOLS):
            return value
        expr = value.node.expr
        if expr not in self._numbers:
            exact = expr.xreplace(self._rounded)
            if exact.has(sympy.Float):
                raise NotFree(f"{where(node)}: a size of {node.name} is computed with floats")
            number = sympy.sympify(exact.xreplace(self._sizes))
            if number.free_symbols:
                raise NotFree(f"{where(node)}: a size of {node.name} is of no input, or depends on a number")
            self._numbers[expr] = bool(number) if isinstance(value, torch.SymBool) else int(number)
        return self._numbers[expr]

    def rounded(self, value: torch.SymInt, number: int, node: fx.Node) -> None:
        """Know a whole number as the step computes it; by algebra, as guards compute it, it has to be the same."""
        expr = value.node.expr
        if expr.has(sympy.Float):
            if expr.xreplace(self._sizes) != number:
                raise NotFree(f"{where(node)}: a size is computed with floats, in an order that is not kept")
            self._rounded[expr] = sympy.Integer(number)

    def described(self, value: Any, node: fx.Node) -> Any:
        """A description of fixed sizes; tensors that share memory do so."""
        if not isinstance(value, torch.Tensor):
            return self.number(value, node)
        if storage(value) not in self._storages:  # that of an input has bytes which the graph may not know
            self._add(value, self.number(value.untyped_storage().nbytes(), node))
        shape, strides = ([self.number(n, node) for n in numbers] for numbers in (value.shape, value.stride()))
        return self._fake(value, self.number(value.storage_offset(), node), shape, strides)

    def input(self, value: torch.Tensor, tensor: torch.Tensor | None, node: fx.Node) -> torch.Tensor:
        """A description of an input as it is given."""
        if storage(value) not in self._storages:
            nbytes: Any = (value if tensor is None else tensor).untyped_storage().nbytes()
            with suppress(NotFree):  # it is a view, and the graph does not know what of
                nbytes = self.number(nbytes, node)
            self._add(value, nbytes)
        if tensor is None:
            return self.described(value, node)
        return self._fake(value, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def share(self, value: torch.Tensor, other: torch.Tensor) -> None:
        """Take the memory of a tensor for that of another one."""
        self._storages[storage(value)] = self._storages[storage(other)]

    def _add(self, value: torch.Tensor, nbytes: Any) -> None:
        self._storages[storage(value)] = torch.UntypedStorage(value_of(nbytes), device="meta")

    def _fake(self, like: torch.Tensor, offset: int, shape: Any, strides: Any) -> torch.Tensor:
        memory = self._storages[storage(like)]
        described = torch.empty(0, dtype=like.dtype, device="meta").set_(memory, offset, shape, strides)
        fake = FakeTensor(self._mode, described, like.device)
        if like.is_conj():
            fake = fake.conj()
        if like.is_neg():
            fake = fake._neg_view()
        return fake.requires_grad_() if like.requires_grad else fake
