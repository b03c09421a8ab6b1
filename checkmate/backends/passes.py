"""The passes over a captured graph: checks of Dynamo's graph, and rewrites of the joint graph of AOTAutograd.

Who adds a pass adds a line. The parts around each call are listed in `checkmate.backends.compilation`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture import rewrite
from checkmate.capture.autocast import Copies, refuse_products_within
from checkmate.capture.cudnn import expose_cudnn
from checkmate.capture.higher_order import checkpoints
from checkmate.capture.higher_order.fused_attention import compile_attention
from checkmate.capture.higher_order.triton_kernels import make_what_they_write
from checkmate.capture.inplace.shape_only import forget_inputs
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.number_inputs import refuse_nested, refuse_sizes_of_data
from checkmate.capture.patches.leaves import refuse_lost_leaves
from checkmate.capture.provenance import where
from checkmate.capture.sharded.shards import Shards
from checkmate.codegen import undefined_gradients
from checkmate.codegen.refused_backwards import added_within, computed_from, refuse_views, refuse_watching
from checkmate.errors import Unsupported
from checkmate.profiling.trial import repeats, same_again, same_in_two
from checkmate.updates.insert import Insert

_BY_CUDNN = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def refuse_no_data(names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Refuse inputs without data, where ops are measured."""
    for name, tensor in zip(names, inputs, strict=True):
        if is_fake(tensor):
            raise Unsupported(
                f"{name} is a fake tensor or on the meta device: with no data, nothing can run and be measured. "
                'checkmate.trace(..., profile="roofline:h100") estimates the costs for a named device instead.'
            )


def refuse_inexact(module: fx.GraphModule) -> None:
    """Refuse ops that tracing gets wrong: other kernels or generators, and some writes to lists of tensors."""
    for node in module.graph.nodes:
        if getattr(getattr(node.target, "f", None), "__module__", "") == "torch._numpy.random":
            raise Unsupported(
                f"{where(node)}: a draw from NumPy's global generator is captured as one from torch's. "
                "Draw with torch, or draw outside and pass the numbers in as a tensor."
            )
        if node.target in _BY_CUDNN and node.args[0].meta["example_value"].is_cuda:
            raise Unsupported(
                f"{where(node)}: on a GPU {node.target.__name__} is a kernel of cuDNN, which cannot be captured. "
                "Call nn.LSTMCell, nn.GRUCell or nn.RNNCell once for each step of the sequence."
            )
        name = getattr(node.target, "__name__", node.target)
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype is torch.complex32 and not value.is_contiguous():
            raise Unsupported(
                f"{where(node)}: a tensor of torch.complex32 that is not contiguous has gradients with other last "
                "bits. Call .contiguous() on it, or compute in complex64."
            )
        if name == "ormqr" and value.is_complex() and value.requires_grad:
            raise Unsupported(
                f"{where(node)}: the gradient of torch.ormqr of complex numbers is traced by a formula with other last "
                "bits. Multiply by torch.linalg.householder_product(a, tau), which is the matrix that it multiplies by."
            )
        if not re.fullmatch(r"_foreach_\w+_", name):
            continue
        written: Any = node.args[0] if node.args else node.kwargs["self"]
        if len({*written}) < len(written):
            raise Unsupported(
                f"{where(node)}: {name} writes to one tensor more than once, of which tracing keeps the last write "
                "only. Call it once for each write."
            )
        tensors = [n.meta["example_value"] for n in written]
        if any(tensor._base is not None and tensor.requires_grad for tensor in tensors):
            raise Unsupported(
                f"{where(node)}: {name} writes to a view of a tensor, and tracing loses the gradient of that. "
                "Write to the whole tensor, or call the op of one tensor for each."
            )


# Of a graph as Dynamo captured it, with its inputs and their names, and whether its ops are to run here.
CHECKS: tuple[Callable[[fx.GraphModule, Sequence[Any], Sequence[str], bool], None], ...] = (
    lambda module, inputs, names, runs: refuse_inexact(module),
    lambda module, inputs, names, runs: refuse_nested(names, inputs),
    lambda module, inputs, names, runs: refuse_sizes_of_data(module),
    lambda module, inputs, names, runs: refuse_lost_leaves(module, inputs),
    lambda module, inputs, names, runs: refuse_products_within(module),
    lambda module, inputs, names, runs: checkpoints.refuse_other_draws(module),
    lambda module, inputs, names, runs: checkpoints.refuse_shared(module, names),
    lambda module, inputs, names, runs: checkpoints.warn_of_gradients(module.graph),
    lambda module, inputs, names, runs: refuse_no_data(names, inputs) if runs else None,
)


@dataclass
class JointGraph:
    """The traced graph of forward and backward, with what its rewrites need and note."""

    module: fx.GraphModule
    results: int  # how many of its outputs are of the forward
    static: Sequence[int]  # positions of parameters and buffers among the inputs
    inputs: Sequence[Any]
    names: Sequence[str]
    copies: Copies
    shards: Shards
    updates: Insert | None
    overlap: bool

    unreached: list[int] = field(default_factory=list)  # inputs that are never differentiated
    watches: list[Callable[..., None]] = field(default_factory=list)  # refuse what plain PyTorch does otherwise

    @property
    def graph(self) -> fx.Graph:
        """The graph, which a rewrite may replace."""
        return self.module.graph


@dataclass(frozen=True)
class OpGraph:
    """The joint graph at fixed sizes, with facts for its rewrites."""

    module: fx.GraphModule
    device: torch.device
    has_data: bool  # of the inputs: ops can be tried
    on_cpu: bool  # it is planned for the CPU
    states: Collection[str] | None = None  # names of the random states that are kept; None: of large draws

    @property
    def graph(self) -> fx.Graph:
        """The graph, which a rewrite may replace."""
        return self.module.graph

    def tried(self, trial: Callable[[fx.Node], bool]) -> Callable[[fx.Node], bool] | None:
        """The trial of an op, if ops can be tried."""
        return trial if self.has_data else None


# Gradients that autograd sums and passes in, as in eager PyTorch; sizes may be open.
GRADIENT_REWRITES: tuple[Callable[[JointGraph], None], ...] = (
    lambda g: checkpoints.warn_of_second_writes(g.graph),
    lambda g: undefined_gradients.drop_gradients_of_writes(g.module, g.inputs),
    lambda g: g.copies.find(g.graph),
    lambda g: g.shards.refuse_converted(g.graph, g.copies.kept, g.names),
    lambda g: g.shards.join_exchanges(g.graph, g.static, overlap=g.overlap),
    lambda g: g.unreached.extend(undefined_gradients.unreached(g.module, g.results)),
    lambda g: None if g.updates is None else g.updates(g.module, g.inputs, g.results, g.names),
    lambda g: g.watches.append(partial(refuse_views, added_within(g.graph, g.results))),
    lambda g: g.watches.append(partial(refuse_watching, computed_from(g.graph, g.results))),
)

# Ops and what they read and keep; sizes are fixed.
REWRITES: tuple[Callable[[OpGraph], None], ...] = (
    # Ops as eager PyTorch runs them.
    lambda g: rewrite.expose_dropout(g.graph),
    lambda g: rewrite.draw_as_in_place(g.graph),
    lambda g: expose_cudnn(g.graph),
    # Fewer ops, that read and keep less.
    lambda g: rewrite.forget_running_statistics(g.graph),
    lambda g: rewrite.skip_idle_views(g.graph),
    lambda g: rewrite.lay_out_at_once(g.graph),
    lambda g: rewrite.expose_workspaces(g.graph),
    lambda g: make_what_they_write(g.graph, g.tried(repeats)),
    lambda g: rewrite.gather_copies(g.graph),
    lambda g: rewrite.sum_what_masks_select(g.graph),
    lambda g: rewrite.eliminate_dead_code(g.graph),
    lambda g: rewrite.split_convolutions(g.graph, g.tried(same_in_two) if g.device.type != "cpu" else None),
    # Draws may run again, unless a trial gave other bits.
    lambda g: forget_inputs(g.graph) if g.on_cpu else None,
    lambda g: rewrite.save_states(g.graph, g.states) if g.on_cpu else None,
    lambda g: rewrite.save_device_states(g.graph, g.tried(same_again), g.states),
    lambda g: rewrite.note_wavering(g.graph, g.tried(repeats)),
    lambda g: g.graph.lint(),
    # Attention that Triton fuses.
    lambda g: compile_attention(g.graph) if g.has_data else None,
)
