"""Warnings and refusals about `torch.utils.checkpoint`, which capture removes, where plain PyTorch differs.

Plain PyTorch runs a checkpoint again in the backward, and so it makes the writes of its beginning twice: batch norm's
to its running statistics, and those of whatever else counts or averages. With ``use_reentrant=True`` it trains nothing
in a checkpoint that is given no tensor with a gradient, and each such checkpoint has a backward of its own: it adds to
``.grad``, and calls hooks, apart from other uses of a parameter.
"""

from __future__ import annotations

import logging
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.capture.nodes import leaf_nodes
from checkmate.capture.patches.only_our_captures import Handler, follow
from checkmate.capture.provenance import where
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import _has_tag_is_backward, _is_primal, wrap_fx_proxy
from checkmate.torch_internals.running import functorch

log = logging.getLogger("checkmate.capture.higher_order.checkpoints")
_CHECKPOINT = "ac_graph_id"  # in the meta of a node within a checkpoint: which one
_RUN_AGAIN = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
_OP = torch.ops.higher_order.tag_activation_checkpoint
_ARGUMENTS = "checkmate_arguments"  # in the meta of a checkpoint: nodes that are its arguments, and no free variables
_DRAWS = re.compile(
    r"dropout|^rand|bernoulli|rrelu|multinomial|poisson|(normal|uniform|exponential|cauchy|geometric)_?$"
)
_NAMED = 3  # places, before the others are counted
_said: set[str] = set()  # places that the user was told of


def warn_of_gradients(graph: fx.Graph) -> None:
    """Warn, once for each, of checkpoints in Dynamo's graph that plain PyTorch does not train."""
    untrained = []
    for node in graph.find_nodes(op="call_function", target=_OP):
        values = [argument.meta.get("example_value") for argument in node.all_input_nodes]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        if _is_reentrant(node) and tensors and all(isinstance(tensor, nn.Parameter) for tensor in tensors):
            untrained.append(node)
    _warn(
        untrained,
        "torch.utils.checkpoint with use_reentrant=True is given no tensor that needs a gradient. Plain PyTorch gives "
        "the parameters within no gradients then; the compiled step does, as without the checkpoint.",
    )


def refuse_shared(module: fx.GraphModule, names: Sequence[str]) -> None:
    """Refuse parameters that a reentrant checkpoint shares with another one, or with the step around it.

    Args:
        module: Dynamo's graph.
        names: of its inputs.
    """
    reached = _backwards(module, None)
    for name, leaf in zip(names, module.graph.find_nodes(op="placeholder"), strict=True):
        regions = [region for region in reached[leaf] if region is not None]
        if regions and len(reached[leaf]) > 1 and _needs_gradient(leaf):
            raise Unsupported(
                f"{where(regions[0])}: torch.utils.checkpoint with use_reentrant=True shares {name} with another "
                "checkpoint or with what is around it. Plain PyTorch adds the gradient of each to .grad by itself, "
                "after its hooks, and a plan adds their sum. Pass use_reentrant=False, in plain PyTorch too; or leave "
                "the checkpoint out: the plan decides what runs again."
            )


def refuse_other_draws(module: fx.GraphModule) -> None:
    """Refuse draws in checkpoints with ``preserve_rng_state=False``: plain PyTorch draws anew in the backward."""
    for node in module.graph.find_nodes(op="call_function", target=_OP):
        body: fx.GraphModule = getattr(module, str(node.args[0]))
        refuse_other_draws(body)
        drawn = [n for n in body.graph.nodes if _DRAWS.search(getattr(n.target, "__name__", str(n.target)))]
        if drawn and node.kwargs.get("preserve_rng_state") is False:
            raise Unsupported(
                f"{where(drawn[0])}: torch.utils.checkpoint with preserve_rng_state=False draws other random numbers "
                "in the backward than in the forward: plain PyTorch has the gradient of another function. Leave "
                "preserve_rng_state out, or leave the checkpoint out: the plan decides what runs again."
            )


def _backwards(module: fx.GraphModule, region: fx.Node | None) -> dict[fx.Node, set[fx.Node | None]]:
    """By node, the reentrant checkpoints whose backward passes its gradient on to a leaf; None is that of the step.

    ``region`` is the checkpoint that the module is the body of.
    """
    reached: dict[fx.Node, set[fx.Node | None]] = defaultdict(set)
    for node in reversed(module.graph.nodes):
        if node.op == "output" or not node.users:
            reached[node] = {region}
        if node.target is not _OP:
            for argument in node.all_input_nodes if _needs_gradient(node) else ():
                reached[argument] |= reached[node]
            continue
        body_name, *inputs = node.args
        body: fx.GraphModule = getattr(module, str(body_name))
        within = _backwards(body, node if _is_reentrant(node) else region)
        for argument, inner in zip(inputs, body.graph.find_nodes(op="placeholder"), strict=True):
            # Arguments are detached, and their gradients returned to the backward around.
            is_returned = _is_reentrant(node) and argument in node.meta.get(_ARGUMENTS, ())
            reached[argument] |= {region} if is_returned else within[inner]
    return reached


def _needs_gradient(node: fx.Node) -> bool:
    """Tell whether a node's value may need a gradient; what `torch.func` has made of a tensor does not know."""
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or value.requires_grad or functorch.is_functorch_wrapped_tensor(value)


def _is_reentrant(checkpoint: fx.Node) -> bool:
    return checkpoint.kwargs.get("use_reentrant") is not False  # None means yes


def _note_arguments(plain: Handler, self: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call a checkpoint; note which inputs of its graph are its arguments.

    A reentrant one is given views: all that its backward adds to an argument's gradient is summed before it is added.
    """
    graph: fx.Graph = tx.output.current_tracer.graph
    before, reentrant = set(graph.nodes), kwargs.get("use_reentrant")
    if reentrant is None or reentrant.as_python_constant() is not False:
        args = [args[0], *(_view(tx, arg) if arg.is_tensor() and arg.requires_grad else arg for arg in args[1:])]
    result = plain(self, tx, args, kwargs)
    arguments = [argument.as_proxy().node for argument in args[1:] if argument.is_tensor()]
    for node in graph.find_nodes(op="call_function", target=_OP):
        if node not in before:
            node.meta[_ARGUMENTS] = arguments
    return result


def _view(tx: Any, tensor: Any) -> Any:
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_method", "view_as", (tensor.as_proxy(),) * 2, {}))


def warn_of_second_writes(graph: fx.Graph) -> None:
    """Warn, once for each, of modules in a joint graph of AOTAutograd's that write twice in plain PyTorch."""
    # Plain PyTorch runs each checkpoint again up to the last op that saves a tensor. Nodes of an op and of its backward
    # have one ``seq_nr``, and so do ops without a backward that follow it.
    at = {node: position for position, node in enumerate(graph.nodes)}
    ops: dict[Any, fx.Node] = {}
    ends: dict[Any, int] = {}
    for node in at:
        op = ops.setdefault(node.meta.get("seq_nr"), node)
        reads_saved = _has_tag_is_backward(node) and not all(map(_has_tag_is_backward, node.all_input_nodes))
        if reads_saved and _CHECKPOINT in op.meta:
            ends[op.meta[_CHECKPOINT]] = max(at[op], ends.get(op.meta[_CHECKPOINT], 0))

    written = []
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, source = leaf_nodes(copy.args)
        while source.target is operator.getitem:
            (source,) = source.all_input_nodes
        again = source.meta.get("recompute") in _RUN_AGAIN and at[source] <= ends.get(source.meta.get(_CHECKPOINT), -1)
        if again and _is_primal(target):
            written.append(source)
    _warn(
        written,
        "within torch.utils.checkpoint buffers are updated once in a step, as without it. Plain PyTorch runs the "
        "checkpoint again in the backward, and updates them twice. Leave the checkpoint out, and both do the same: the "
        "plan decides what runs again.",
    )


def _warn(nodes: Iterable[fx.Node], message: str) -> None:
    if new := [place for place in dict.fromkeys(map(where, nodes)) if place not in _said]:
        _said.update(new)
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        log.warning("%s%s: %s", ", ".join(new[:_NAMED]), more, message)


follow("CheckpointHigherOrderVariable._call_function", _note_arguments)
