"""Sharded parameters, `DTensor`, as plain tensors of a captured step.

A step is traced with the shards that lie in this rank's memory, so that its graph, its plan and its updates know
ordinary tensors. Within the graph each use of a shard begins by making the `DTensor` of it; around the compiled
function each `DTensor` is taken apart, and the gradient that comes back is made one, with the placements that it has in
plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.around import Around
from checkmate.capture.autocast import is_converted
from checkmate.capture.nodes import input_position, viewed
from checkmate.capture.sharded.collectives import join_waits
from checkmate.errors import Unsupported


def is_shard(tensor: object) -> bool:
    """Tell whether a tensor is a `DTensor`, split over ranks."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # who has not imported it, has none
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local(tensor: Any) -> Any:
    """The local shard of a `DTensor`, without its gradient; other values unchanged.

    >>> local(x := torch.ones(2)) is x
    True
    """
    if not is_shard(tensor):
        return tensor
    (name, *_), _ = tensor.__tensor_flatten__()  # no op runs, where ops are traced
    return getattr(tensor, name)


@dataclass(eq=False)
class Layout:
    """A tensor's placement on the ranks, which makes a `DTensor` from a shard."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """The layout of a `DTensor`."""
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    @property
    def is_even(self) -> bool:
        """Tell whether all ranks have shards of one size."""
        parts = [1] * len(self.shape)
        for i, placement in enumerate(self.placements):
            if placement.is_shard():
                parts[placement.dim] *= self.mesh.size(i)
        return not any(size % count for size, count in zip(self.shape, parts, strict=True))

    def whole(self, shard: torch.Tensor) -> Any:
        """The `DTensor` that a rank has this shard of."""
        kind: Any = sys.modules["torch.distributed.tensor"].DTensor
        options = {"shape": self.shape, "stride": self.stride, "run_check": False}
        with torch.no_grad():
            return kind.from_local(shard, self.mesh, self.placements, **options)


@dataclass(eq=False)
class Shards(Around):
    """The inputs of a captured step that are shards, by position."""

    layouts: dict[int, Layout] = field(default_factory=dict)
    of_gradients: dict[int, Layout] = field(default_factory=dict)  # as the backward was traced

    @classmethod
    def among(cls, inputs: Sequence[Any]) -> Shards:
        """The shards among the inputs."""
        return cls({i: Layout.of(tensor) for i, tensor in enumerate(inputs) if is_shard(tensor)})

    def take_apart(self, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Make Dynamo's graph take shards, and give the inputs for tracing; refuse a `DTensor` as result."""
        results = (node.meta.get("example_value") for node in module.graph.output_node().all_input_nodes)
        if any(map(is_shard, results)):
            raise Unsupported(
                "The step gives a DTensor, which is more than what lies in this rank's memory. Have it give "
                "result.to_local(), or result.full_tensor(); a loss is computed within the step."
            )
        placeholders, values = module.graph.find_nodes(op="placeholder"), [*inputs]
        for i in self.layouts:
            node, described = placeholders[i], local(placeholders[i].meta["example_value"])
            with described.fake_mode:
                values[i] = described.detach().requires_grad_(inputs[i].requires_grad)
            for user in [*node.users]:
                with module.graph.inserting_before(user):
                    whole = module.graph.call_function(self._maker(i), (node,))
                whole.meta = dict(node.meta)
                user.replace_input_with(node, whole)
        if self.layouts:
            module.recompile()
        return values

    def _maker(self, i: int) -> Callable[[torch.Tensor], Any]:
        def whole_of_shard(shard: torch.Tensor) -> Any:
            return _Whole.apply(shard, self, i)

        return whole_of_shard

    def refuse_converted(self, graph: fx.Graph, kept: Sequence[bool], names: Sequence[str]) -> None:
        """Refuse weights whose converted copies autocast keeps: their shards are no leaves in the step.

        ``kept``: of each input, whether autocast would keep what it converts it to; ``names``: of the inputs.
        """
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
            (source,) = node.all_input_nodes or (None,)  # a number that is made a tensor is no input
            i = None if source is None else input_position(viewed(source))
            if i in self.layouts and kept[i] and is_converted(node):
                raise Unsupported(
                    f"{names[i]} is a DTensor, and autocast converts it where it is read. Convert it yourself: the "
                    "parameters of the module, or the whole parameter in what gathers it, .to(torch.bfloat16)."
                )

    def join_exchanges(self, graph: fx.Graph, static: Collection[int], *, overlap: bool = False) -> None:
        """Make one op of each collective of a joint graph; ``static``: positions of parameters and buffers.

        With ``overlap`` links carry them, so that plans may have them go on beside other ops.
        """
        by_position = {input_position(node): node for node in graph.find_nodes(op="placeholder")}
        parameters = [by_position[i] for i in static if i in self.layouts and i in by_position]
        again = all(layout.is_even for layout in self.layouts.values())  # else the steps of ranks differ
        join_waits(graph, parameters, again=again, overlap=overlap)

    def before(self, inputs: list[Any]) -> None:
        """Take whole tensors apart before each call."""
        for i in self.layouts:
            inputs[i] = _Shard.apply(inputs[i], self, i)


class _Whole(torch.autograd.Function):
    """Inside the traced graph: the `DTensor` of a shard. The placement of its gradient is noted."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, shards: Shards, i: int) -> Any:
        ctx.shards, ctx.i = shards, i
        return shards.layouts[i].whole(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        lies = Layout.of(gradient)
        if ctx.shards.of_gradients.setdefault(ctx.i, lies).placements != lies.placements:
            raise Unsupported(
                f"A parameter of shape {tuple(lies.shape)} is used twice in the step, and its gradients lie on the "
                "ranks in two ways. Use it once, or have both uses redistribute it alike."
            )
        return local(gradient), None, None


class _Shard(torch.autograd.Function):
    """Around the compiled function: the shard of a `DTensor`, whose gradient becomes a `DTensor` again."""

    @staticmethod
    def forward(ctx: Any, whole: Any, shards: Shards, i: int) -> torch.Tensor:
        ctx.shards, ctx.i = shards, i
        ctx.created, ctx.counts = ctx._sequence_nr(), (1,)  # see `checkmate.codegen.contributions`
        ctx.set_materialize_grads(False)
        shard: torch.Tensor = local(whole).detach()
        return shard

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else ctx.shards.of_gradients[ctx.i].whole(gradient), None, None
