"""The kernel of a group of ops, which Inductor compiles.

Groups that compute the same, of tensors of the same types, sizes and strides, share a kernel: a network has as many as
a block of it, however deep it is. A second variant stores the first result over an argument. Both are kept for the life
of the process, so that an op that runs again runs the same code; Inductor keeps them on disk. In a step with open
sizes one is compiled for all of these (`checkmate.capture.fusion.open_sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, cast

import torch
import torch.fx as fx
from torch import Tensor, nn

from checkmate.capture.fusion.compiling import Boxed, Key, compiled, compiler
from checkmate.capture.fusion.groups import (
    in_order,
    is_constant,
    is_elementwise,
    is_part,
    is_reduction,
    maker,
    read_from,
)
from checkmate.capture.inplace.rules import Written, is_alike
from checkmate.capture.nodes import tensors
from checkmate.capture.rewrite import scale_mask

aten = torch.ops.aten
Kernels = Literal["eager", "same-bits", "fused"]
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
WAYS = 2  # arguments to write over that are tried; each is one more kernel to compile


@dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel of a group, as the target of an op.

    Args:
        ops: computes the results, op by op.
        pattern: equal for kernels that compute the same but for numbers, such as sizes.
        numbers: of its arguments' shapes and strides, then those in its ops, then those of its results.
        like: fake tensors like the arguments.
        moved: bytes beside its arguments and results: what reductions in another direction read a second time.
        threads: in which it runs.
    """

    ops: fx.GraphModule
    pattern: str
    numbers: tuple[int, ...]
    like: tuple[Tensor, ...]
    moved: int = 0
    threads: int = field(default_factory=torch.get_num_threads)

    @cached_property
    def name(self) -> str:
        """A name for people, of the first ops."""
        names = dict.fromkeys(str(node.target).split(".")[1] for node in self.members)
        return "_".join(("fused", *list(names)[:3]))

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"checkmate.{self.name}.{self.pattern}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """Text that is equal for kernels that compute the same, in every process."""
        return _digest(self.pattern, *map(str, self.numbers))

    @property
    def members(self) -> list[fx.Node]:
        """Its ops."""
        return [node for node in self.ops.graph.nodes if node.op == "call_function" and not is_part(node)]

    @cached_property
    def written(self) -> Written | None:
        """How it writes its first result over an argument; None if none is like it."""
        first = self.ops.graph.output_node().args[0][0].meta["val"]  # type: ignore[index, union-attr]
        places = tuple(i for i, node in enumerate(self.ops.graph.find_nodes(op="placeholder")) if is_alike(node, first))
        if not places:
            return None
        return Written(self.over, places[:WAYS], "over", pointwise=all(map(is_elementwise, self.members)))

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        """Run the kernel, which is compiled at its first call."""
        return _run(self._plainly, args)

    @cached_property
    def _plainly(self) -> Boxed:
        return self.compiled()

    def over(self, *args: Tensor, over: Tensor) -> tuple[Tensor, ...]:
        """Run its variant that stores the first result over one of its arguments."""
        at = next(i for i, arg in enumerate(args) if arg.is_set_to(over))
        return over, *_run(self.compiled(at), args)

    def compiled(self, over: int | None = None) -> Boxed:
        """Compile it, once in a process; ``over``: the variant that stores its first result over this argument.

        Raises:
            RuntimeError: if it cannot be compiled.
        """
        return compiled(self.key, self.ops, self.like, self.threads, over)

    def tasks(self, *, variants: bool) -> Iterator[tuple[Key, fx.GraphModule, tuple[Tensor, ...], int]]:
        """Yield what `compiling.begin` takes to compile it, or its variants."""
        for over in (self.written.positions if self.written else ()) if variants else (None,):
            yield (self.key, over), self.ops, self.like, self.threads


def _run(kernel: Boxed, args: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run a kernel, which autograd must not see; setting its mode takes longer than asking for it."""
    if not torch.is_grad_enabled():
        return kernel([*args])
    with torch.no_grad():
        return kernel([*args])


def kernel_of(members: Sequence[fx.Node]) -> tuple[Kernel, list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Make the kernel of a group; give it, its arguments, the nodes in it, and its results, the largest first."""
    inside, results = set(members), read_from(members)
    results.sort(key=lambda node: -node.meta["val"].nbytes)
    # Collect the nodes between what it reads and makes: members, and views of what they make.
    nodes, read = dict[fx.Node, None](), dict[fx.Node, None]()
    stack = [*results]
    while stack:
        node = stack.pop()
        if node in nodes or node in read:
            continue
        within = node in inside or is_constant(node) or (is_part(node) and maker(node) in inside)
        (nodes if within else read)[node] = None
        stack += node.all_input_nodes if within else ()
    inputs = [node for member in members for node in member.all_input_nodes if node in read]
    inputs = [*dict.fromkeys([*inputs, *in_order(read)])]
    # Copy them to a graph of their own.
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"given{i}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in in_order(nodes):
        if node.target is scale_mask:
            mask, keep, dtype = cast(tuple[fx.Node, float, torch.dtype], node.args)
            copies[node] = graph.call_function(
                aten.div.Tensor, (graph.call_function(aten._to_copy.default, (copies[mask],), {"dtype": dtype}), keep)
            )
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {key: node.meta[key] for key in ("val", "is_gradient_acc") if key in node.meta}
    graph.output(tuple(copies[node] for node in results))
    ops = fx.GraphModule(nn.Module(), graph)
    like = tuple(node.meta["val"] for node in inputs)
    return Kernel(ops, *_take_apart(graph), like, _read_again(members)), inputs, in_order(nodes), results


def _take_apart(graph: fx.Graph) -> tuple[str, tuple[int, ...]]:
    """Hash a graph without its numbers, with the number of threads and the compiler; give the numbers, too."""
    names = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines, numbers = [str(torch.get_num_threads()), compiler()], list[int]()

    def take(arg: Any) -> Any:
        if type(arg) is int:
            numbers.append(arg)
            return ...
        return names[arg] if isinstance(arg, fx.Node) else arg

    for node in graph.nodes:
        values = tensors(node.meta.get("val"))
        if node.op == "placeholder":
            numbers += [n for t in values for n in (*t.shape, *t.stride())]
        args = fx.node.map_aggregate((node.args, node.kwargs), take)
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{names[node]} {target} {args!r} {[(t.dtype, t.dim(), t.device) for t in values]}")
    results = tensors([node.meta["val"] for node in graph.output_node().all_input_nodes])
    numbers += [n for t in results for n in (*t.shape, *t.stride())]
    return _digest(*lines), tuple(numbers)


def _digest(*lines: str) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def _read_again(members: Sequence[fx.Node]) -> int:
    """Bytes of arguments that a group reads again, for reductions over other dimensions than those of the first.

    A norm's backward sums along rows and along columns; one pass over memory cannot do both.
    """
    passes = dict[Any, int]()
    for node in filter(is_reduction, members):
        read = sum(t.nbytes for a in {*node.all_input_nodes} for t in tensors(a.meta["val"]))
        for dims in _directions(node):
            passes[dims] = max(passes.get(dims, 0), read)
    return sum(sorted(passes.values())[:-1])


def _directions(node: fx.Node) -> tuple[str, ...]:
    """The directions in which a reduction reads its argument, one for each pass."""
    x, name = node.all_input_nodes[0].meta["val"], str(node.target)
    if "norm_backward" in name or "batch_norm" in name or "group_norm" in name:
        return "rows", "columns"
    dims: Any = node.args[1] if node.target in _SUMS and len(node.args) > 1 else None
    along_rows = not dims or any(dim % max(1, x.dim()) == x.dim() - 1 for dim in dims)
    return ("rows",) if along_rows else ("columns",)
