"""The kernel of a group of ops, which Inductor compiles.

Groups that compute the same, of tensors of the same types, sizes and strides, share a kernel: a network has as many as
a block of it, however deep it is. A second variant stores the first result over an argument. Both are kept for the life
of the process, so that an op that runs again runs the same code; Inductor keeps them on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, cast

import torch
import torch.fx as fx
from torch import Tensor, nn

from checkmate.capture.fusion.members import (
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
from checkmate.torch_internals import inductor  # takes a second to import: looked up when needed
from checkmate.torch_internals.aot import tracing
from checkmate.torch_internals.descriptions import FakeTensorMode
from checkmate.torch_internals.dispatcher import outside_tracing, triton_utils

log = logging.getLogger("checkmate.capture.fusion")
aten = torch.ops.aten
Kernels = Literal["eager", "same-bits", "fused"]
_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
WAYS = 2  # arguments to write over that are tried; each is one more kernel to compile
_kernels: dict[tuple[str, int | None], Callable[..., Any]] = {}  # by what they compute, and the argument written over
# Memory of captured graphs would be in no plan; each op rounds its result to its type, as eager kernels do.
_SETTINGS = {"triton.cudagraphs": False, "emulate_precision_casts": True}


@dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel of a group, as the target of an op.

    Args:
        ops: computes the results, op by op.
        key: equal for kernels that compute the same.
        like: fake tensors like the arguments.
        moved: bytes beside its arguments and results: what reductions in another direction read a second time.
    """

    ops: fx.GraphModule
    key: str
    like: tuple[Tensor, ...]
    moved: int = 0

    @cached_property
    def name(self) -> str:
        """A name for people, of the first ops."""
        names = dict.fromkeys(str(node.target).split(".")[1] for node in self.members)
        return "_".join(("fused", *list(names)[:3]))

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"checkmate.{self.name}.{self.key}"

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

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run the kernel, which is compiled at its first call."""
        with torch.no_grad():
            return self._run(*args)

    @cached_property
    def _run(self) -> Callable[..., Any]:
        return self.compiled()

    def over(self, *args: Tensor, over: Tensor) -> tuple[Tensor, ...]:
        """Run its variant that stores the first result over one of its arguments."""
        at = next(i for i, arg in enumerate(args) if arg.is_set_to(over))
        with torch.no_grad():
            return over, *self.compiled(at)(*args)

    def compiled(self, over: int | None = None) -> Callable[..., Any]:
        """Compile it by Inductor, once in a process.

        Raises:
            RuntimeError: if it cannot be compiled.
        """
        if (self.key, over) not in _kernels:
            module = _alone(self.ops, over)
            with outside_tracing(), tracing(None), torch.no_grad():
                with FakeTensorMode():
                    fakes = [
                        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in self.like
                    ]
                _kernels[self.key, over] = inductor.compile_fx(module, fakes, config_patches={**_SETTINGS})
        return _kernels[self.key, over]


def can_compile(device: torch.device) -> bool:
    """Tell whether Inductor can make kernels for a device here; the log says why it cannot."""
    try:
        if device.type == "cpu":
            inductor.get_cpp_compiler()
        elif not triton_utils.has_triton():
            raise RuntimeError(f"there is no Triton for {device}")
    except RuntimeError as error:
        log.warning("Groups of ops run one by one, as PyTorch's own kernels: %s", str(error).strip().partition("\n")[0])
        return False
    return True


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
        copies[node].meta = {"val": node.meta["val"]}
    graph.output(tuple(copies[node] for node in results))
    ops = fx.GraphModule(nn.Module(), graph)
    like = tuple(node.meta["val"] for node in inputs)
    return Kernel(ops, _digest(graph), like, _read_again(members)), inputs, in_order(nodes), results


def _alone(ops: fx.GraphModule, over: int | None) -> fx.GraphModule:
    """A copy that Inductor may change; ``over``: its last act is to copy the first result to this argument."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    results: Any = graph.graph_copy(ops.graph, copies)
    if over is not None:
        first, *results = results
        graph.call_function(aten.copy_.default, (copies[ops.graph.find_nodes(op="placeholder")[over]], first))
    graph.output(tuple(results))
    return fx.GraphModule(nn.Module(), graph)


def _digest(graph: fx.Graph) -> str:
    """Hash a graph, its tensors and the number of threads to 16 letters, equal in every process."""
    names = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = node.target if node.op == "call_function" else ""
        args = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
        lines.append(f"{names[node]} {target} {args!r} {[*map(_describe, tensors(node.meta.get('val')))]}")
    return sha256("\n".join([*lines, str(torch.get_num_threads())]).encode()).hexdigest()[:16]


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype}{[*tensor.shape]}{[*tensor.stride()]}{tensor.device}"


def _read_again(members: Sequence[fx.Node]) -> int:
    """Bytes of arguments that a group's reductions over other dimensions than the first one's read again.

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
