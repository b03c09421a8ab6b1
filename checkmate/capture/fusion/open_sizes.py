"""Kernels whose sizes are inputs: a group of a step with open sizes is compiled once for all of these.

At each size a step is read as a graph of fixed sizes, and so are its groups. Of two sizes the same group differs in
numbers only: of shapes and strides, and among the arguments of views and constants. A group that is met at one size is
compiled for it; at a second one, each number that differs is written as a term of the open sizes, such as
``4 * n`` or ``n - 1``, and the kernel is compiled with symbols in place of these sizes. At any other one the terms say
whether it is the kernel of the group there: they have to give all of its numbers. So a term that fits two sizes and not
a third costs one more kernel, and changes no bit. What Inductor has assumed of the symbols has to hold there too.

A kernel that gives other bits than its ops, or cannot be compiled so, is none: its ops run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations_with_replacement
from math import prod
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import nn

from checkmate.capture.fusion.compiling import Boxed, alone, bind, compiled_at_open_sizes, is_known
from checkmate.capture.fusion.kernels import Kernel
from checkmate.torch_internals.capturing import ConstantSource, DimDynamic, FakeTensorMode, ShapeEnv
from checkmate.torch_internals.running import outside_tracing

Sizes = tuple[int, ...]
T = TypeVar("T")
DEGREE = 3  # of a term: as many sizes are multiplied at most
MOST = 8  # kernels of a pattern


@dataclass(frozen=True)
class Term:
    """A number as the step's open sizes make it: a constant, and a product of some of them."""

    constant: int
    coefficient: int = 0
    factors: tuple[int, ...] = ()  # positions of sizes

    def __call__(self, sizes: Sequence[Any]) -> Any:
        """Its value, for numbers, symbols or nodes in place of the sizes."""
        if not self.factors:
            return self.constant
        value = sizes[self.factors[0]]
        for i in self.factors[1:]:
            value = value * sizes[i]
        value = value if self.coefficient == 1 else value * self.coefficient
        return value + self.constant if self.constant else value


def term(first: Sizes, second: Sizes, a: int, b: int) -> Term | None:
    """The simplest term that is ``a`` for the first sizes and ``b`` for the second ones; None if none is.

    >>> term((8,), (10,), 32, 40), term((8,), (10,), 7, 9), term((8, 2), (10, 3), 16, 30)
    (Term(constant=0, coefficient=4, factors=(0,)), Term(constant=-1, coefficient=1, factors=(0,)), \
Term(constant=0, coefficient=1, factors=(0, 1)))
    """
    if a == b:
        return Term(a)
    terms = []
    for degree in range(1, DEGREE + 1):
        for factors in combinations_with_replacement(range(len(first)), degree):
            p, q = (prod(sizes[i] for i in factors) for sizes in (first, second))
            if p != q and (b - a) % (q - p) == 0:
                coefficient = (b - a) // (q - p)
                terms.append(Term(a - coefficient * p, coefficient, factors))
    return min(terms, key=lambda t: t.constant != 0, default=None)


@dataclass(eq=False)
class OpenKernel:
    """A kernel whose sizes are inputs.

    Args:
        like: the kernel of one of its sizes.
        terms: of its numbers, in order.
        sizes: of that kernel, which tell Inductor what is usual.
    """

    like: Kernel
    terms: list[Term]
    sizes: Sizes
    is_good: bool | None = None  # by its first trial; None: there was none yet
    _code: dict[int | None, Callable[..., Any]] = field(default_factory=dict)
    _assumed: list[tuple[Any, list[Any]]] = field(default_factory=list)  # of symbols, for each of its variants

    def is_of(self, kernel: Kernel, sizes: Sizes) -> bool:
        """Tell whether it is the kernel of a group at these sizes."""
        return (
            len(sizes) == len(self.sizes)
            and kernel.numbers == tuple(term(sizes) for term in self.terms)
            and all(_hold(guards, symbols, sizes) for guards, symbols in self._assumed)
        )

    def at(self, sizes: Sizes, over: int | None = None) -> Boxed:
        """The kernel for these sizes, or its variant that writes over an argument.

        Raises:
            RuntimeError: if it cannot be compiled, or not for these sizes.
        """
        if over not in self._code:
            self._code[over] = self._compiled(over)
        if not all(_hold(guards, symbols, sizes) for guards, symbols in self._assumed):
            raise RuntimeError(f"it is compiled for other sizes than {sizes}")
        code = self._code[over]
        return lambda args: code(*sizes, *args)

    def _compiled(self, over: int | None) -> Callable[..., Any]:
        env = ShapeEnv()
        sources = [ConstantSource(f"size{i}") for i in range(len(self.sizes))]
        symbols = [
            env.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            for size, source in zip(self.sizes, sources, strict=True)
        ]
        sizes = [
            env.create_symintnode(symbol, hint=size, source=source)
            for symbol, size, source in zip(symbols, self.sizes, sources, strict=True)
        ]
        terms, fakes = iter(self.terms), [*sizes]
        graph, copies = fx.Graph(), dict[fx.Node, Any]()
        inputs = [fx.Proxy(graph.placeholder(f"size{i}")) for i in range(len(sizes))]

        def copy(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return copies[arg]
            value = next(terms)(inputs) if type(arg) is int else arg
            return value.node if isinstance(value, fx.Proxy) else value

        with outside_tracing(), FakeTensorMode(shape_env=env):
            for node in alone(self.like.ops, over).graph.nodes:
                if node.op == "placeholder":
                    val = node.meta["val"]
                    shape, strides = ([next(terms)(sizes) for _ in numbers] for numbers in (val.shape, val.stride()))
                    fakes.append(torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device))
                    copies[node] = graph.placeholder(node.name)
                elif node.op == "output":
                    graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
                else:
                    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), copy)
                    copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        try:
            code = compiled_at_open_sizes(fx.GraphModule(nn.Module(), graph), fakes)
        except Exception as error:  # any error of an op's, of a symbol's or of Inductor's
            raise RuntimeError(f"with open sizes, {error}") from error
        self._assumed.append((env.guards, symbols))
        return code


_open = dict[str, list[OpenKernel]]()  # by pattern
_bound_to = dict[str, OpenKernel]()  # by the key of a kernel
_met = dict[str, dict[tuple[int, ...], tuple[Sizes, bool]]]()  # by pattern and numbers: at which sizes, and if good


def may_run(kernel: Kernel, sizes: Sizes, *, anew: bool) -> bool:
    """Tell whether a kernel of a step with open sizes may be tried at these.

    ``anew``: it is compiled for them alone, where its group was met at no others.

    Raises:
        RuntimeError: if it cannot be compiled.
    """
    if is_known(kernel.key):
        return True
    candidates, met = _open.setdefault(kernel.pattern, []), _met.setdefault(kernel.pattern, {})
    open_kernel = next((candidate for candidate in candidates if candidate.is_of(kernel, sizes)), None)
    if open_kernel is None:
        if min(sizes) < 2 or len(candidates) == MOST:
            return False
        for numbers, (met_sizes, is_good) in reversed(met.items()):
            terms = [term(met_sizes, sizes, a, b) for a, b in zip(numbers, kernel.numbers, strict=True)]
            if len(met_sizes) == len(sizes) and None not in terms:
                open_kernel = OpenKernel(kernel, terms, sizes, None if is_good else False)  # type: ignore[arg-type]
                candidates.append(open_kernel)
                break
        else:
            return anew and all(met_sizes == sizes for met_sizes, _ in met.values())
    if open_kernel.is_good is False:
        return False
    try:
        open_kernel.at(sizes)
    except RuntimeError:
        open_kernel.is_good = False
        raise
    bind(kernel.key, partial(open_kernel.at, sizes))
    _bound_to[kernel.key] = open_kernel
    return True


def was_tried(kernel: Kernel) -> bool:
    """Tell whether its code was tried at other sizes, and was good."""
    return kernel.key in _bound_to and bool(_bound_to[kernel.key].is_good)


def note(kernel: Kernel, sizes: Sizes, *, is_good: bool) -> None:
    """Note the result of a trial at these sizes."""
    open_kernel = _bound_to.get(kernel.key)
    if open_kernel is None:
        _met.setdefault(kernel.pattern, {})[kernel.numbers] = sizes, is_good
    elif open_kernel.is_good is None:
        open_kernel.is_good = is_good


def _hold(guards: list[Any], symbols: list[Any], sizes: Sizes) -> bool:
    """Tell whether what was assumed of symbols holds for these sizes."""
    values = dict(zip(symbols, sizes, strict=True))
    return all(guard.expr.xreplace(values) == sympy.true for guard in guards)
